"""Values that are not finite end a run before a plan is made; what rollout.bitwise asks of updates and servers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.advantage import GroupRewards
from megatron_rl.config import Config, load_config
from megatron_rl.errors import ConfigError, EngineError, NonFiniteAdvantage
from megatron_rl.model.hf_config import read_shape
from megatron_rl.model.invariant.parts import require_shown
from megatron_rl.rollout.build import place_engine
from megatron_rl.rollout.engines.placement import RankLocation
from megatron_rl.trainer.advantages.critic import CriticAdvantages
from megatron_rl.trainer.advantages.group import GroupAdvantages
from megatron_rl.trainer.advantages.kl_in_reward import KLInReward
from megatron_rl.trainer.passes.bitwise import compare_update
from megatron_rl.trainer.passes.passes import OldLogProbs, Passes
from megatron_rl.types import StepKind, StepResult
from tests.reference import tiny_config
from tests.unit.algorithm.facts import make_facts

MASK = np.array([True, False, True, True, False])  # of samples of two and of three tokens


def scored() -> SimpleNamespace:
    """Return one group of two samples, s0 and s1, with the rewards 1 and 0."""
    facts = make_facts(np.zeros(2, dtype=np.int64), np.array([1, 2]))
    of_facts = {"groups": facts.groups, "loss_tokens": facts.loss_tokens, "sample_ids": facts.sample_ids}
    rewards = GroupRewards(totals=np.array([1.0, 0.0]), included=np.ones(2, dtype=bool), **of_facts)
    return SimpleNamespace(facts=facts, rewards=rewards)


@pytest.mark.filterwarnings("ignore:overflow")  # it is the subject
def test_a_kl_in_the_reward_that_overflows_names_sample_and_settings() -> None:
    """e^800 is infinite: the sample's total would be −inf, and its group's advantages NaN."""
    old, reference = np.zeros(5, dtype=np.float32), np.array([0, 0, 0, 800, 0], dtype=np.float32)
    of_policy = OldLogProbs(flat=old, own=None, sums={}, metrics={})
    passes = Passes(loss_mask=MASK, old=of_policy, reference=reference)
    source = GroupAdvantages(Config().advantage, kl=KLInReward(estimator="k3", coefficient=lambda: 0.1))
    with pytest.raises(NonFiniteAdvantage, match=r"the KL in the reward of sample s1 is inf .*loss\.kl_coef"):
        source(scored(), passes)


def test_a_critics_value_that_is_not_finite_names_its_token() -> None:
    for values, said in (
        ([0.0, np.nan, 0.0, np.nan, 0.0], "the value of loss token 1 of sample s1 is nan"),
        ([-np.inf, 0.0, 0.0, 0.0, 0.0], "the value of loss token 0 of sample s0 is -inf"),
    ):
        config = load_config(None, ["advantage.estimator=gae"])
        with pytest.raises(NonFiniteAdvantage, match=rf"{said}.*the critic"):
            passes = Passes(loss_mask=MASK, values=np.array(values, dtype=np.float32))
            CriticAdvantages(config.advantage)(scored(), passes)


def result(**sums: float) -> StepResult:
    return StepResult(kind=StepKind.REAL, grad_norm=1.0, learning_rate=1e-3, applied=True, sums=sums)


def test_bitwise_refuses_an_update_that_differs_no_trainer_and_a_family_that_was_not_shown() -> None:
    compare_update(result(logprob_gap_max=0.0, tokens=5.0))
    compare_update(result())  # a ghost's
    for gap in (1e-7, float("nan")):
        with pytest.raises(EngineError, match=f"the update's own log-probs are up to {gap:.3g} nats from the engine's"):
            compare_update(result(logprob_gap_max=gap, tokens=5.0))
    config = load_config(None, ["rollout.bitwise=true"])
    location = RankLocation(rank=0, world_size=1, local_rank=0, local_world_size=1)
    given = dict(location=location, device=torch.device("cpu"), dtype=torch.float32, vocab_size=9)
    with pytest.raises(ConfigError, match=r"rollout\.bitwise=true compares the engine with a trainer"):
        place_engine(config, None, **given)
    require_shown(read_shape(tiny_config("qwen3"), layer_spec="torch"))
    with pytest.raises(ConfigError, match="was tested with llama, .* model_type is phi3, whose layers may have other"):
        require_shown(read_shape(tiny_config("phi3"), layer_spec="torch"))
