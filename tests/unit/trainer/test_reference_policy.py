"""The reference policy's rules: a KL in the reward, settings that go together, the moves of the coefficient."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.kl import kl_penalty_per_token, kl_per_token
from megatron_rl.algorithm.objective import Objective
from megatron_rl.algorithm.signal import coupling_terms, signal_rule
from megatron_rl.config import Config, LossConfig, ReferenceConfig, load_config
from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.trainer.reference_policy import ReferencePolicy
from megatron_rl.types import StepKind, StepResult
from megatron_rl.validate import objective, validate_config

ADAPTIVE = (*("loss.kl_coefficient=0.2", "reference.controller=adaptive"),
            *("reference.kl_target=0.1", "reference.kl_horizon=200"))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_penalty_equals_the_losss_estimate_at_the_old_policy(estimator: str) -> None:
    random = np.random.default_rng(0)
    old, reference = -3 * random.random(200).astype(np.float32), -3 * random.random(200).astype(np.float32)
    found = kl_penalty_per_token(old, reference, estimator)
    policy = torch.from_numpy(old).double()
    wanted = kl_per_token(policy, torch.from_numpy(reference).double(), policy, estimator=estimator)
    assert found.dtype == np.float64
    # doubles; expm1 keeps the digits that e^d − 1 loses near d = 0
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-11, atol=1e-15)


def test_penalty_of_equal_policies_is_zero_and_values_that_are_not_known_are_refused() -> None:
    same = np.linspace(-5, 0, 7, dtype=np.float32)
    assert all((kl_penalty_per_token(same, same, x) == 0).all() for x in ("k1", "k2", "k3"))
    old, reference = np.array([-1.0, -2.0]), np.array([-1.5, -2.0])
    assert kl_penalty_per_token(old, reference, "k1").tolist() == [0.5, 0.0]
    assert kl_penalty_per_token(old, reference, "k3").round(5).tolist() == [0.10653, 0.0]
    with pytest.raises(ValueError, match="'unbiased' is no penalty for a reward; choose one of k1, k2, k3"):
        kl_penalty_per_token(old, reference, "unbiased")
    for override in ("kl_in=both", "placement=disk", "controller=pid", "refresh_every_rollouts=0"):
        with pytest.raises(ConfigError, match=f"reference.{override.split('=')[0]}"):
            load_config(None, [f"reference.{override}"])
    in_reward = ["loss.kl_coefficient=0.1", "reference.kl_in=reward"]
    for overrides in ([], [*ADAPTIVE, "train.prompts_per_rollout=124"], in_reward):
        validate_config(load_config(None, overrides), objective.reference)


def test_refusals_name_what_does_not_go_together_and_a_checkpoint_without_the_reference() -> None:
    for overrides, words in (
        (["reference.kl_in=reward", "loss.kl_estimator=unbiased"], ["loss.kl_estimator=k3", "reference.kl_in=loss"]),
        (["reference.kl_in=reward", "advantage.estimator=gdpo"], ["advantage.estimator=gdpo", "reference.kl_in=loss"]),
        (["reference.controller=adaptive"], ["loss.kl_coefficient=0 ", "reference.controller=fixed"]),
        (["reference.refresh_every_rollouts=3"], [f"reference.refresh_every_rollouts={x}" for x in (3, "null")]),
        ([*ADAPTIVE, "train.prompts_per_rollout=125"], ["kl_horizon=200", "prompts_per_rollout=125", "= 1000"]),
    ):
        config = load_config(None, overrides)
        with pytest.raises(ConfigError) as caught:
            validate_config(config, objective.reference)
        assert all(word in str(caught.value) for word in words), str(caught.value)
    with pytest.raises(CheckpointError, match=r"0\.3 needs the reference policy, .* under loss\.kl_coefficient=0;"):
        open_reference("loss.kl_coefficient=0.3", kept=0).load_state({"coefficient": None})
    open_reference(kept=0).load_state({"coefficient": None})


def test_kl_in_the_reward_couples_nothing_and_its_passes_drop_nothing() -> None:
    """Dropping by advantage stays exact; but those advantages are made of log-probs."""
    in_reward = Config(loss=LossConfig(kl_coefficient=0.1), reference=ReferenceConfig(kl_in="reward"))
    rule = signal_rule(in_reward)
    assert coupling_terms(in_reward) == () and rule.drops and rule.kl_in_reward and not rule.drops_logprob_passes
    without = signal_rule(Config(reference=ReferenceConfig(kl_in="reward")))
    assert without.drops_logprob_passes and not without.kl_in_reward
    adaptive = Config(loss=LossConfig(kl_coefficient=0.1), reference=ReferenceConfig(controller="adaptive"))
    with pytest.raises(ConfigError, match=r"loss\.kl_coefficient=0\.1 makes that untrue"):
        signal_rule(adaptive)


def test_the_inputs_coefficient_replaces_the_configurations() -> None:
    """Where it is 0 the KL is measured and trains nothing, not even where it is infinite."""
    logprobs, reference = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.0, -3.5])
    tokens = {**{"num_sequences": 1, "sequences": torch.zeros(3, dtype=torch.int64), "advantages": torch.zeros(3)},
              **{"weights": torch.ones(3), "measured": None, "old_logprobs": None, "rollout_logprobs": logprobs},
              **{"reference_logprobs": reference, "kl_coefficient": None}}

    def loss(**changed: object) -> tuple[float, float]:
        objective = Objective(LossConfig(kl_coefficient=0.5))
        total, sums = objective.policy(SimpleNamespace(**tokens | changed), logprobs, torch.zeros(3))
        return float(total), float(sums[3])

    kl = float(kl_per_token(logprobs, reference, logprobs, estimator="k3").sum())
    assert loss() == (pytest.approx(0.5 * kl), pytest.approx(kl))
    assert loss(kl_coefficient=0.125) == (pytest.approx(0.125 * kl), pytest.approx(kl))
    assert loss(kl_coefficient=0.0) == (0.0, pytest.approx(kl))
    assert loss(kl_coefficient=0.0, reference_logprobs=torch.tensor([1e9, 0.0, 0.0])) == (0.0, float("inf"))


class Weights:
    """Stands for a backend as far as Reference knows it: counts how often its weights were kept."""

    def __init__(self, *, kept: int = 0) -> None:
        self.kept = kept

    @property
    def reference(self) -> object | None:
        return object() if self.kept else None

    def keep_reference(self) -> None:
        self.kept += 1


def step(kl: float, tokens: float, *, applied: bool = True) -> StepResult:
    sums = {"kl": kl, "tokens": tokens}
    return StepResult(kind=StepKind.REAL, grad_norm=1.0, learning_rate=0.0, applied=applied, sums=sums)


def open_reference(*overrides: str, kept: int = 1) -> ReferencePolicy:
    config = load_config(None, list(overrides))
    return ReferencePolicy(config.loss, config.reference, Weights(kept=kept))


def test_adaptive_coefficient_follows_the_recurrence_over_rollouts_of_several_steps() -> None:
    """It moves once per rollout, by the sums over the applied steps; ghosts and others count nothing."""
    reference, wanted = open_reference(*ADAPTIVE), 0.2
    random = np.random.default_rng(1)
    for index in range(6):
        steps = [(float(random.uniform(0, 8)), float(random.integers(1, 50))) for _ in range(3)]
        for kl, tokens in steps:
            reference.measure(step(kl, tokens))
            assert reference.coefficient == reference.loss_coefficient == wanted
        reference.measure(step(float("nan"), 7.0, applied=False))
        reference.measure(step(0.0, 0.0))
        reference.after_rollout(index, 64)
        error = sum(kl for kl, _ in steps) / sum(tokens for _, tokens in steps) / 0.1 - 1
        wanted *= 1 + min(max(error, -0.2), 0.2) * 64 / 200
        assert reference.coefficient == pytest.approx(wanted, rel=1e-14)
    assert wanted != pytest.approx(0.2, rel=1e-2)
    reference.measure(step(0.0, 0.0))  # a rollout of ghosts alone
    reference.after_rollout(6, 64)
    assert reference.coefficient == pytest.approx(wanted, rel=1e-14)


def test_kl_in_the_reward_is_observed_by_hand_and_stays_out_of_the_loss() -> None:
    reference = open_reference(*ADAPTIVE, "reference.kl_in=reward")
    reference.measure(step(100.0, 1.0))
    reference.after_rollout(0, 64)
    assert (reference.coefficient, reference.loss_coefficient) == (0.2, 0.0)
    reference.observe(0.15, 64)
    assert (reference.coefficient, reference.loss_coefficient) == (pytest.approx(0.2 * (1 + 0.2 * 0.32)), 0.0)


def test_an_unneeded_reference_is_not_kept_and_a_needed_one_renewed_after_every_so_many() -> None:
    fixed = open_reference("loss.kl_coefficient=0.3")
    fixed.measure(step(50.0, 1.0))
    fixed.after_rollout(0, 64)
    assert fixed.coefficient == 0.3 and fixed.state() == {"coefficient": None} and fixed.backend.kept == 1
    none = open_reference(kept=0)
    none.keep()
    assert none.backend.kept == 0 and not none.is_needed
    reference, kept = open_reference("loss.kl_coefficient=0.3", "reference.refresh_every_rollouts=3", kept=0), []
    for index in range(7):
        reference.after_rollout(index, 8)
        kept.append(reference.backend.kept)
    assert kept == [0, 0, 1, 1, 1, 2, 2]


def test_state_brings_an_adaptive_coefficient_back_to_the_bit() -> None:
    first = open_reference(*ADAPTIVE)
    first.observe(0.1234567, 57)
    second = open_reference(*ADAPTIVE)
    second.load_state(first.state())
    assert second.coefficient == first.coefficient != 0.2
    for each in (first, second):
        each.observe(0.07, 3)
    assert second.coefficient == first.coefficient
    later = open_reference(*ADAPTIVE)
    later.load_state({"coefficient": None})  # fixed until now
    assert later.coefficient == 0.2
    fixed = open_reference("loss.kl_coefficient=0.3")
    fixed.load_state(first.state())  # adaptive until now: the configuration's from here on
    assert fixed.coefficient == 0.3
