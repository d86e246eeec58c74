"""Settings under which rollout.bitwise cannot be had are refused before anything is read, by name."""

from __future__ import annotations

import pathlib

import pytest

from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.validate import validate_config

REFUSED = (
    "parallel.context=2",
    "parallel.expert=2",
    "lora.rank=4",
    "model.layer_spec=transformer_engine",
    "model.logprob_kernel=triton",
    "rollout.engine=vllm",
    "rollout.producer.mode=prefetch",
    "weight_sync.interval_steps=2",
    "correction.old_logprobs=rollout",
    "replay.capacity_groups=8",
    "megatron.transformer.hidden_dropout=0.1",
    "megatron.transformer.attention_dropout=0.1",
)


@pytest.mark.parametrize("setting", REFUSED)
def test_a_setting_is_refused_by_name(arithmetic: pathlib.Path, setting: str) -> None:
    given = [f"model.hf_path={arithmetic}/model", "reward.functions=arithmetic", "skip.mode=off"]
    validate_config(load_config(None, [*given, "rollout.bitwise=true"]))
    validate_config(load_config(None, [*given, setting]))
    with pytest.raises(ConfigError, match=f"rollout.bitwise=true cannot be had under {setting}: .*rollout.bitwise=f"):
        validate_config(load_config(None, [*given, setting, "rollout.bitwise=true"]))


def test_sequence_parallelism_is_refused(arithmetic: pathlib.Path) -> None:
    given = [f"model.hf_path={arithmetic}/model", "reward.functions=arithmetic", "parallel.tensor=2"]
    with pytest.raises(ConfigError, match="cannot be had under parallel.sequence_parallel=true: .*=false, or rollout"):
        validate_config(load_config(None, [*given, "rollout.bitwise=true", "parallel.sequence_parallel=true"]))


def test_a_run_without_rollouts_is_refused(arithmetic: pathlib.Path) -> None:
    given = [f"model.hf_path={arithmetic}/model", "rollout.bitwise=true", "train.num_rollouts=0", "sft.steps=3"]
    with pytest.raises(ConfigError, match="train.num_rollouts=0 has none"):
        validate_config(load_config(None, given))
