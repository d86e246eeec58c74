"""What rollout.bitwise asks of an update, and of a server, which has no trainer's log-probs to compare."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError, EngineError
from megatron_rl.model.build import refuse_bitwise
from megatron_rl.model.hf_config import read_shape
from megatron_rl.rollout.build import RankLocation, place_engine
from megatron_rl.trainer.bitwise import compare_update
from megatron_rl.types import StepKind, StepResult
from tests.reference import tiny_config


def result(**sums: float) -> StepResult:
    return StepResult(kind=StepKind.REAL, grad_norm=1.0, learning_rate=1e-3, applied=True, sums=sums)


def test_an_update_whose_log_probs_differ_ends_the_run() -> None:
    compare_update(result(logprob_gap_max=0.0, tokens=5.0))
    compare_update(result())  # a ghost's
    for gap in (1e-7, float("nan")):
        with pytest.raises(EngineError, match=f"the update's own log-probs are up to {gap:.3g} nats from the engine's"):
            compare_update(result(logprob_gap_max=gap, tokens=5.0))


def test_an_engine_without_a_trainer_is_refused() -> None:
    config = load_config(None, ["rollout.bitwise=true"])
    location = RankLocation(rank=0, world_size=1, local_rank=0, local_world_size=1)
    given = dict(location=location, device=torch.device("cpu"), dtype=torch.float32, vocab_size=9)
    with pytest.raises(ConfigError, match=r"rollout\.bitwise=true compares a run's rollouts with its trainer"):
        place_engine(config, None, **given)


def test_a_family_that_was_not_shown_is_refused_by_name() -> None:
    refuse_bitwise(read_shape(tiny_config("qwen3"), layer_spec="torch"))
    with pytest.raises(ConfigError, match="was shown for llama, .* model_type is phi3, whose layers may have other"):
        refuse_bitwise(read_shape(tiny_config("phi3"), layer_spec="torch"))
