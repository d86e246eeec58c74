"""Prints a JSON object: what Megatron-Bridge's configs are refused with, by case."""

from __future__ import annotations

import tests.bridge.engine  # noqa: F401  # isort: skip

import json

from transformers import DeepseekV3Config, Exaone4Config, Gemma2Config

from megatron_rl.errors import ConfigError
from megatron_rl.model.hf_config import read_shape
from tests.reference import tiny_config

SIZES = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96)
CASES = {
    "phi3": lambda: tiny_config("phi3"),
    "qwen3_moe": lambda: tiny_config("qwen3_moe"),
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=32, vocab_size=99),
    "deepseek_v3": lambda: DeepseekV3Config(vocab_size=99, num_hidden_layers=2),
    "exaone4": lambda: Exaone4Config(**SIZES, vocab_size=99, sliding_window=None, layer_types=["full_attention"] * 2),
}

if __name__ == "__main__":
    said = {}
    for name, config in CASES.items():
        try:
            said[name] = str(read_shape(config(), layer_spec="torch", provider="bridge").family)
        except ConfigError as error:
            said[name] = f"refused: {error}"
    shape = read_shape(tiny_config("gemma"), layer_spec="torch", provider="bridge")
    said["gemma"] = f"{shape.family} of {shape.num_layers} layers"
    print(json.dumps(said))
