"""Checks that the training data meet the model and the rewards before anything is built: `load_prompts`."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.reward import opened_reward
from megatron_rl.trainer.training_data import load_prompts
from tests.unit.data.letters import CountingTokenizer


@pytest.mark.parametrize(
    ("vocab_size", "context_tokens", "row", "message"),
    [
        (60, 99, {"prompt": "=", "answer": "2"}, "the token 61, and the model's vocabulary ends at 59"),
        (200, 3, {"prompt": "1+1=", "answer": "2"}, "has 4 tokens and at most 2 are allowed"),
        (200, 99, {"prompt": "1+1=", "answer": None}, "column 'answer' .* is null"),
    ],
)
def test_a_row_that_the_model_or_the_reward_cannot_take_is_refused(tmp_path, vocab_size, context_tokens, row, message):
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    config = load_config(None, [f"data.train={tmp_path / 'd.jsonl'}", "reward.functions=arithmetic"])
    hf_config = SimpleNamespace(vocab_size=vocab_size, max_position_embeddings=context_tokens)
    with opened_reward(config.reward) as reward, pytest.raises(ConfigError, match=message):
        load_prompts(config, CountingTokenizer(), hf_config, reward.required_columns)
