"""Prints a JSON object: what configs, fields of a provider and entries of a mapping are refused with, by case."""

import tests.bridge.engine  # noqa: F401  # isort: skip

import copy
import json
import types
from collections.abc import Callable

from megatron.bridge.models.conversion.param_mapping import AutoMapping, QKVMapping
from transformers import DeepseekV3Config, Exaone4Config, Gemma2Config

from megatron_rl.errors import ConfigError
from megatron_rl.model.bridge.family import PLAIN, _entry, read_provider, refuse_other_layers
from megatron_rl.model.hf_config import read_shape
from megatron_rl.weights.model_shape import ModelShape
from tests.reference import tiny_config

SIZES = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96)
CASES = {
    "phi3": lambda: tiny_config("phi3"),
    "qwen3_moe": lambda: tiny_config("qwen3_moe"),
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=32, vocab_size=99),
    "deepseek_v3": lambda: DeepseekV3Config(vocab_size=99, num_hidden_layers=2),
    "exaone4": lambda: Exaone4Config(**SIZES, vocab_size=99, sliding_window=None, layer_types=["full_attention"] * 2),
}


def shape_of(config: object) -> ModelShape:
    return read_shape(config, layer_spec="torch", provider="bridge")


def words(call: Callable[[], object]) -> str:
    """Return what a call is refused with, or gives."""
    try:
        return str(call())
    except ConfigError as error:
        return f"refused: {error}"


def field_refused(provider: object, name: str) -> str:
    """Return what a Gemma's provider is refused with where one of its fields has another value."""
    changed = copy.copy(provider)
    setattr(changed, name, "another")
    return words(lambda: refuse_other_layers(changed, "gemma"))


def mapping_refused(found: object) -> str:
    """Return what a mapping is refused with that gives ``found`` for a layer's linear_fc1."""
    registry = types.SimpleNamespace(megatron_to_hf_lookup=lambda name: found)
    return words(lambda: _entry(registry, "mlp.linear_fc1.weight", "rows", "gemma", gated=True))


if __name__ == "__main__":
    said = {name: words(lambda make=make: shape_of(make()).family) for name, make in CASES.items()}
    said["yarn"] = words(lambda: shape_of(tiny_config("qwen3_yarn")).family)
    gemma, _ = read_provider(tiny_config("gemma"))
    said |= {f"field {name}": field_refused(gemma, name) for name in PLAIN}
    weight = "mlp.linear_fc1.weight"
    said["no tensor"] = mapping_refused(None)
    said["strange kind"] = mapping_refused(object())
    said["one tensor"] = mapping_refused(AutoMapping(weight, "model.layers.0.mlp.gate_up.weight"))
    parts = {x: f"transformer.h.0.{x}" for x in "qkv"}
    said["strange name"] = mapping_refused(QKVMapping(weight, **parts))
    shape = shape_of(tiny_config("gemma"))
    said["gemma"] = f"{shape.family} of {shape.num_layers} layers"
    print(json.dumps(said))
