"""reward/: the built-ins, the resolving of names, and the samples that pay when a function fails."""

import contextlib
import os
import sys
import types

import numpy as np
import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.reward import Reward
from megatron_rl.types import Prompt, Rollout, Score
from tests.unit.reward.rig import rollout_of, totals, with_environment


def make_rollouts(texts, answers=None, **columns) -> list[Rollout]:
    rollouts = []
    for i, text in enumerate(texts):
        row = {"prompt": "p", "answer": answers[i] if answers else "1"} | {key: x[i] for key, x in columns.items()}
        prompt = Prompt(prompt_id=f"{i}@0", text=f"prompt {i}", token_ids=(1,), columns=row)
        rollouts.append(rollout_of(prompt, 0, range(len(text)), text))
    return rollouts


@pytest.fixture
def module(monkeypatch):
    """Make an importable module for the reward functions of a test."""
    made = types.ModuleType("rewards_of_test")
    monkeypatch.setitem(sys.modules, "rewards_of_test", made)
    return made


def reward_of(module, *functions, weights=(), on_error="fail") -> Reward:
    for number, function in enumerate(functions):
        setattr(module, f"f{number}", function)
    names = tuple(f"rewards_of_test:f{number}" for number in range(len(functions)))
    return Reward(RewardConfig(functions=names, weights=weights, on_error=on_error))


# --- built-ins


def test_arithmetic_is_stripped_string_equality():
    rollouts = make_rollouts(["12", " 12\n", "12.0", "1 2", ""], [12, "12 ", "12", "12", "0"])
    assert totals(Reward(RewardConfig(functions=("arithmetic",))).score(rollouts)) == [1.0, 1.0, 0.0, 0.0, 0.0]


# --- resolving


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("arithmetics", "did you mean 'arithmetic'.*built-ins are arithmetic, math_verify"),
        ("no_such_module_here:f", "importing 'no_such_module_here' failed with ModuleNotFoundError.*PYTHONPATH"),
        ("rewards_of_test:lenght", "has no 'lenght'; the nearest it has is 'length'"),
        ("rewards_of_test:constant", "is a float, which cannot be called"),
        ("rewards_of_test:Class", "is a class; name an instance"),
        ("rewards_of_test:yields", "is an async generator; return the list"),
        ("rewards_of_test:yields_object", "is an async generator; return the list"),
    ],
)
def test_names_that_do_not_resolve(module, name, message):
    async def yields(**_):
        yield 1.0

    class Class:
        async def __call__(self, **_):
            yield 1.0

    vars(module).update(length=lambda **_: [], constant=1.0, Class=Class, yields=yields, yields_object=Class())
    with pytest.raises(ConfigError, match=message):
        Reward(RewardConfig(functions=(name,)))


def test_no_function_a_repeated_one_and_a_sample_of_no_environment_are_refused():
    with pytest.raises(RewardError, match="sample 0@0#0 comes from no environment; name one by environment.name"):
        Reward(RewardConfig(functions=("environment",))).score(make_rollouts(["1"]))
    with pytest.raises(ConfigError, match="reward.functions is empty"):
        Reward(RewardConfig())
    with pytest.raises(ConfigError, match="'arithmetic' more than once"):
        Reward(RewardConfig(functions=("arithmetic", "arithmetic")))


def test_columns_a_function_cannot_take_are_named(module):
    reward = reward_of(module, lambda completions, **_: [1.0], lambda completions, missing, **_: [1.0])
    with pytest.raises(ConfigError, match="f1' cannot be called: missing a required argument: 'missing'.*answer, pro"):
        reward.score(make_rollouts(["a"]))


# --- the call


def test_a_function_receives_every_column_as_a_list(module):
    seen = {}

    def record(prompts, completions, completion_ids, **columns):
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        return [0.0] * len(prompts)

    rollouts = make_rollouts(["a", "bc"], ["1", "2"], level=[3, None], prompts=["hidden", "hidden"])
    reward_of(module, record).score(rollouts)
    given = {"prompts": ["prompt 0", "prompt 1"], "completions": ["a", "bc"], "completion_ids": [[0], [0, 1]]}
    assert seen == given | {"prompt": ["p", "p"], "answer": ["1", "2"], "level": [3, None]}


def test_total_is_the_weighted_sum_over_functions_that_applied(module):
    reward = reward_of(
        module,
        lambda completions, **_: [1.0, None, None],
        lambda completions, **_: np.array([2.0, 4.0, np.float32(1)]).tolist()[:2] + [None],
        weights=(0.5, 2.0),
    )
    assert reward.names == ("rewards_of_test:f0", "rewards_of_test:f1")
    assert reward.score(make_rollouts(["a", "b", "c"])) == [
        Score(total=4.5, by_function=(1.0, 2.0)),
        Score(total=8.0, by_function=(None, 4.0)),
        Score(total=None, by_function=(None, None)),
    ]
    assert reward.score([]) == []
    # numbers of numpy and bools are numbers
    reward = reward_of(module, lambda completions, **_: [np.float32(0.5), True, np.bool_(False), np.int64(3)])
    assert totals(reward.score(make_rollouts("abcd"))) == [0.5, 1.0, 0.0, 3.0]


# --- errors


def raises_on_b(completions, **_):
    if "b" in completions:
        raise BaseException("too slow")
    return [1.0] * len(completions)


GUILTY_ON_B = [
    (raises_on_b, "BaseException: too slow"),
    (lambda completions, **_: [float("nan") if text == "b" else 1.0 for text in completions], "nan"),
    (lambda completions, **_: ["1.0" if text == "b" else 1.0 for text in completions], "'1.0', a str"),
    (lambda completions, **_: [1.0 for text in completions if text != "b"], "0 values for 1 samples"),
]


@pytest.mark.parametrize(("function", "message"), GUILTY_ON_B)
@pytest.mark.parametrize(("on_error", "total"), [("drop", None), ("zero", 0.0)])
def test_only_the_guilty_sample_meets_the_policy(module, function, message, on_error, total):
    reward = reward_of(module, function, lambda completions, **_: [1.0] * len(completions), on_error=on_error)
    scores = reward.score(make_rollouts("abc"))
    assert totals(scores) == [2.0, total, 2.0]
    assert scores[1].by_function == (None, 1.0)
    assert [(e.sample_id, e.function) for e in reward.last_errors] == [("1@0#0", "rewards_of_test:f0")]
    assert message in reward.last_errors[0].message
    reward.score(make_rollouts("ac"))
    assert reward.last_errors == ()


def test_the_log_has_the_first_error_of_each_kind_and_the_scores_have_every_one(module, caplog):
    def fails(completions, **_):
        return [{"a": 1.0, "b": 1e39}[text] for text in completions]

    reward = reward_of(module, fails, on_error="zero")
    scores = reward.score(make_rollouts("axbyb"))
    large = "its value is 1e+39; return a finite number (float32), or None where it does not apply"
    assert [score.error for score in scores] == [None, "KeyError: 'x'", large, "KeyError: 'y'", large]
    reward.score(make_rollouts("zb"))
    said = [record.getMessage() for record in caplog.records]
    assert [text.split()[6] for text in said] == ["1@0#0,", "2@0#0,"] and "Traceback" in said[0] and large in said[1]


@pytest.mark.parametrize(("function", "message"), GUILTY_ON_B)
def test_fail_names_the_sample_and_the_cause(module, function, message):
    with pytest.raises(RewardError, match="(?s)failed on sample 1@0#0 .1 of 3 .*reward.on_error") as caught:
        reward_of(module, function).score(make_rollouts("abc"))
    assert message in str(caught.value)


@pytest.mark.parametrize("on_error", ["fail", "drop", "zero"])
def test_a_batch_that_fails_without_a_guilty_sample_is_an_error(module, on_error):
    def wants_one(completions, **_):
        return [1.0] * (1 if len(completions) == 1 else 0)

    with pytest.raises(RewardError, match="(?s)batch of 2 samples .*none of them alone.*0 values for 2 samples"):
        reward_of(module, wants_one, on_error=on_error).score(make_rollouts("ab"))


def test_what_is_not_a_list_is_an_error_and_an_interrupt_is_the_users(module):
    with pytest.raises(RewardError, match="returned a NoneType for 1 samples") as caught:
        reward_of(module, lambda completions, **_: None).score(make_rollouts("a"))
    assert "Traceback" not in str(caught.value)  # no line of the user's raised it

    def interrupted(completions, **_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reward_of(module, interrupted, on_error="drop").score(make_rollouts("a"))


@pytest.mark.parametrize(
    ("leave", "message"), [(sys.exit, "SystemExit: 0"), (lambda code: os._exit(code), "os._exit(0) was called")]
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_that_exits_fails_on_its_sample(module, leave, message, is_async):
    def exits(completions, **_):
        return [leave(0) if text == "b" else 1.0 for text in completions]

    async def exits_later(completions, **_):
        return exits(completions)

    reward = reward_of(module, exits_later if is_async else exits, on_error="drop")
    assert totals(reward.score(make_rollouts("abc"))) == [1.0, None, 1.0]
    assert [failure.sample_id for failure in reward.last_errors] == ["1@0#0"]
    assert message in reward.last_errors[0].message


def test_under_fail_the_samples_behind_the_first_failure_are_not_called(module):
    called = []

    def fails(completions, **_):
        called.append("".join(completions))
        raise RuntimeError("down")

    with pytest.raises(RewardError, match="(?s)sample 0@0#0 .1 of 4 samples had failed by then.*RuntimeError: down"):
        reward_of(module, fails).score(make_rollouts("abcd"))
    assert called == ["abcd", "a"]


# --- what an environment gave


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_environments_reward_is_weighed_beside_functions(num_workers):
    rollouts = with_environment(make_rollouts(["1", "2", "1"]), 0.5, -1.0, None, excluded=(2,))
    config = RewardConfig(functions=("arithmetic", "environment"), weights=(1.0, 2.0), num_workers=num_workers)
    with contextlib.closing(Reward(config)) as reward:
        assert reward.runs_apart == bool(num_workers)
        found = reward.score(rollouts)
    assert totals(found) == [2.0, -2.0, None]
    assert [score.by_function for score in found] == [(1.0, 0.5), (0.0, -1.0), (None, None)]


def test_no_function_sees_a_sample_that_its_environment_gave_up(module):
    seen = []
    rollouts = with_environment(make_rollouts(["a", "b", "c"]), 1.0, None, 2.0, excluded=(1,))
    reward = reward_of(module, lambda completions, **_: seen.extend(completions) or [1.0] * len(completions))
    assert totals(reward.score(rollouts)) == [1.0, None, 1.0] and seen == ["a", "c"]
    assert totals(Reward(RewardConfig(functions=("environment",))).score(rollouts[1:2])) == [None]
