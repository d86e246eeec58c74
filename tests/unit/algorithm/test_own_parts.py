"""Checks own policy losses and estimators: what passes the contract, what breaks it, and what ``exact`` says."""

import contextlib
import pathlib
import re
import types

import numpy as np
import pytest
import torch

from megatron_rl.algorithm import own_estimator, own_policy_check
from megatron_rl.algorithm.advantage import GroupRewards, advantages, may_have_advantage
from megatron_rl.algorithm.objective import Objective
from megatron_rl.algorithm.signal import signal_rule
from megatron_rl.config import AdvantageConfig, Config, LossConfig, load_config
from megatron_rl.errors import ConfigError
from megatron_rl.validate import objective, validate_config

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "your-own.md"


def own_loss(name: str, **arguments) -> LossConfig:
    return LossConfig(policy=f"tests.own_parts:{name}", arguments=arguments)


def own(name: str, **settings) -> AdvantageConfig:
    return AdvantageConfig(estimator=f"tests.own_parts:{name}", **settings)


@pytest.mark.parametrize("name", ["clipped", "by_sequence"])
def test_a_loss_that_keeps_the_contract_passes_every_property(name):
    findings = own_policy_check.check(own_loss(name, low=0.1))
    assert len(findings) == 6 and all(finding.holds for finding in findings), findings
    validate_config(Config(loss=own_loss(name)), objective.own_parts)
    assert signal_rule(Config(loss=own_loss(name))).drops


def test_each_call_of_a_users_loss_is_entered_by_its_name():
    """The run bounds its time so (Watchdog.own_call); a built-in loss is not entered."""
    entered, called = [], []

    @contextlib.contextmanager
    def enter(name):
        entered.append(name)
        yield
        called.append(len(entered))

    for policy, times in ((own_loss("clipped"), 2), (LossConfig(policy="ppo"), 2)):
        objective = Objective(policy)
        objective.enter_own = enter
        zeros = torch.zeros(3)
        given = dict.fromkeys(("advantages", "weights", "old_logprobs", "rollout_logprobs"), zeros)
        given |= {"sequences": torch.zeros(3, dtype=torch.int64), "num_sequences": 1, "reference_logprobs": None}
        tokens = types.SimpleNamespace(**given, kl_coefficient=None, measured=None)
        for _ in range(2):
            objective.policy(tokens, zeros.clone().requires_grad_(), zeros)
        assert entered == ["loss"] * times and called == [1, 2]


@pytest.mark.parametrize(("name", "message"), [
    ("by_part_of_a_sequence", "losses do not depend on how its tokens are split over ranks"),
    ("without_weight", "advantages and weights times 4 give 4 times the loss"),
    ("mean", r"returned losses of shape \[\] .* for \[25\] tokens"),
    ("per_microbatch", "losses do not depend on the other samples of its micro-batch"),
    ("random", "two calls on the same tokens give the same"),
    ("in_place", "two calls on the same tokens give the same"),
    ("without_gradient", "RuntimeError"),
    ("empty", "it raised RuntimeError|it raised IndexError"),
    ("overflows", "a loss or a gradient is not finite"),
    ("misspelt", "it raised AttributeError: 'PolicyTokens' object has no attribute 'advantage'"),
])
def test_a_loss_that_breaks_a_property_is_refused_with_its_name(name, message):
    with pytest.raises(ConfigError, match=f"loss.policy='tests.own_parts:{name}' breaks its contract.*({message})"):
        validate_config(Config(loss=own_loss(name)), objective.own_parts)


def test_exact_refuses_a_loss_that_trains_without_advantage_and_the_others_say_so():
    """A quadratic on top trains at A = 0, as ``dro``'s does."""
    for mode in ("approximate", "off"):
        config = load_config(None, ["loss.policy=tests.own_parts:quadratic", f"skip.mode={mode}"])
        validate_config(config, objective.own_parts)
        wanted = ("loss.policy=tests.own_parts:quadratic",) if mode == "approximate" else ()
        assert signal_rule(config).approximated == wanted
    config = load_config(None, ["loss.policy=tests.own_parts:quadratic"])
    with pytest.raises(ConfigError, match="skip.mode=exact .* loss.policy=tests.own_parts:quadratic makes that untrue"):
        signal_rule(config)
    failed = [finding.name for finding in own_policy_check.check(config.loss) if not finding.holds]
    assert failed == [own_policy_check.ZERO]


def test_central_differences_are_the_gradient_where_nothing_is_detached():
    for loss in (own_loss("quadratic"), own_loss("clipped", low=0.9, high=9.0)):
        gradient, numeric = own_policy_check.finite_differences(loss)
        assert torch.allclose(gradient, numeric, atol=1e-6)  # steps of 1e-6 in float64: about 1e-9 off


@pytest.mark.parametrize(("overrides", "message"), [
    (["loss.policy=tests.own_parts:cliped"], "has no 'cliped'; the nearest it has is 'clipped'"),
    (["loss.policy=tests.own_parts:np"], "is a module, which cannot be called"),
    (["loss.policy=tests.own_parts:clipped", "loss.arguments={lwo: 1}"], "unexpected keyword argument 'lwo'"),
    (["advantage.estimator=tests.own_parts:nothing"], "has no 'nothing'"),
    (["advantage.estimator=tests.own_parts:centred", "advantage.arguments={sale: 1}"], "argument 'sale'"),
    (["loss.policy=ppoo"], "loss.policy='ppoo' is not known; choose one of .*, your own module:function"),
    (["loss.arguments={low: 1}"], "loss.arguments=.* and loss.policy=ppo is built in"),
    (["advantage.arguments={low: 1}"], "advantage.arguments=.* and advantage.estimator=grpo is built in"),
    (["advantage.moves_equal_rewards=true"], "advantage.moves_equal_rewards=True belongs to an estimator of your"),
])
def test_names_and_arguments_that_do_not_fit_are_named(overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate_config(load_config(None, overrides), objective.own_parts)


REWARDS = GroupRewards(totals=np.array([1.0, 0.0, 0.5, 2.0, 2.0, np.nan]), groups=np.array([4, 4, 4, 7, 7, 7]),
                       included=np.array([True] * 5 + [False]), sample_ids=("a", "b", "c", "d", "e", "f"))


def test_an_own_estimator_gives_the_built_in_ones_advantages_and_says_which_groups_are_dropped():
    by_own = advantages(REWARDS, estimator="tests.own_parts:centred", arguments={"scale": 2.0})
    assert by_own.tolist() == (2 * advantages(REWARDS, estimator="dr_grpo")).tolist() == [1.0, -1.0, 0.0, 0, 0, 0]
    assert all(finding.holds for finding in own_estimator.check(own("centred")))
    assert all(finding.holds for finding in own_estimator.check(own("by_batch", moves_equal_rewards=True)))
    # of a group of unequal rewards every sample may move: another baseline than the mean moves the sample at it
    for name, moves, wanted in (("centred", False, [True] * 3 + [False] * 3), ("by_batch", True, [True] * 5 + [False])):
        live = may_have_advantage(REWARDS, estimator=f"tests.own_parts:{name}", moves_equal_rewards=moves)
        assert live.tolist() == wanted


@pytest.mark.parametrize(("name", "message"), [
    ("by_batch", "gave sample d the advantage 0.9, and all rewards of its group are equal: .*moves_equal_rewards"),
    ("moves_what_is_out", "gave sample f the advantage 1, and it is taken out of its group"),
    ("too_few", r"returned an array of shape \[5\] for 6 samples"),
    ("words", "returned a list, not an array of numbers"),
])
def test_advantages_that_break_the_contract_are_refused_in_a_run(name, message):
    with pytest.raises(ConfigError, match=f"advantage.estimator='tests.own_parts:{name}' {message}"):
        advantages(REWARDS, estimator=f"tests.own_parts:{name}")


@pytest.mark.parametrize(("name", "message"), [
    ("by_batch", "all rewards of its group are equal"),
    ("reads_what_is_out", "a sample taken out changes no other's advantage"),
    ("by_place", "the order of the samples changes no advantage"),
    ("divides_by_nothing", "sample .* has -?(inf|nan)"),
    ("fails", "it raised KeyError: 'no such group'"),
])
def test_an_estimator_that_breaks_a_property_is_refused_at_start(name, message):
    wanted = f"advantage.estimator='tests.own_parts:{name}' breaks its contract.*{message}"
    with pytest.raises(ConfigError, match=wanted):
        validate_config(Config(advantage=own(name)), objective.own_parts)


def test_the_parts_that_the_page_shows_keep_the_contract(tmp_path):
    blocks = re.findall(r"```python\n(def (\w+)\((?:tokens|rewards).*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    (tmp_path / "shown.py").write_text("import numpy as np\nimport torch\n\n" + "\n".join(text for text, _ in blocks))
    loss, estimator = (f"{tmp_path}/shown.py:{name}" for _, name in blocks)
    assert all(finding.holds for finding in own_policy_check.check(LossConfig(policy=loss, arguments={"low": 0.1})))
    assert all(finding.holds for finding in own_estimator.check(AdvantageConfig(estimator=estimator)))
