"""Numbers that are each within their range and together make no sense are refused before anything is read."""

from __future__ import annotations

import pathlib

import pytest

from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.validate import validate_config


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.prompts_per_rollout=1000000", "rollout.samples_per_prompt=100"], "= 100000000 samples is more than"),
        (["optimizer.schedule=cosine", "optimizer.lr=1e-6", "optimizer.min_lr=1e-5"], "is above optimizer.lr=1e-06"),
        (["optimizer.warmup_steps=5", "optimizer.decay_steps=5"], "ends the decay before optimizer.warmup_steps=5 end"),
        (["eval.temperature=0.001"], r"must be 0 \(greedy\) or at least 0.01"),
    ],
)
def test_sizes_at_odds_are_refused(arithmetic: pathlib.Path, overrides: list[str], words: str) -> None:
    given = [f"model.hf_path={arithmetic}/model", "reward.functions=arithmetic"]
    validate_config(load_config(None, given))
    with pytest.raises(ConfigError, match=words):
        validate_config(load_config(None, [*given, *overrides]))
