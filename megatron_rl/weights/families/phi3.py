"""Phi-3, 3.5 and 4 (``phi3``): a Llama layer with q, k and v in one tensor of a file, and gate and up in another."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.families.dense_layer import dense_layer, dense_sizes
from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.layer_fields import refuse_other_layers, windows_of
from megatron_rl.weights.model_shape import ModelShape

_JOINED = {Layout.QKV: "self_attn.qkv_proj.weight", Layout.GATE_UP: "mlp.gate_up_proj.weight"}


def refuse(hf_config: Any) -> None:
    """Raise ConfigError if a config has dropout, or an activation other than silu.

    Layers with neither full nor sliding attention are refused not here, but by ``features``.
    """
    refuse_other_layers(hf_config, windows=True)
    for name in ("resid_pdrop", "embd_pdrop"):
        if hf_config.to_dict()[name]:
            raise ConfigError(f"{name}={hf_config.to_dict()[name]} of phi3 is not supported: set it to 0.0")


def features(hf_config: Any) -> dict[str, Any]:
    """Return keyword arguments of ModelShape for the layers' sliding windows."""
    return dict(windows=windows_of(hf_config))


def joined_layer(shape: ModelShape) -> tuple[Entry, ...]:
    """Return an ``Entry`` (mapping to Hugging Face) for each parameter of a Phi-3 layer.

    It is a Llama layer whose files hold q, k, v in one tensor, and gate, up in another.
    """
    return tuple(
        dataclasses.replace(entry, hf=(_JOINED[entry.layout],), joined=True) if entry.layout in _JOINED else entry
        for entry in dense_layer(shape)
    )


def joined_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {Hugging Face name within the layer: shape} of a layer's tensors, except norms over the hidden state."""
    return dense_sizes(shape) | {
        _JOINED[Layout.QKV]: ((shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, shape.hidden_size),
        _JOINED[Layout.GATE_UP]: (2 * shape.ffn_hidden_size, shape.hidden_size),
    }


PHI3 = Family(
    model_type="phi3",
    turns_partly=True,
    refuse=refuse,
    features=features,
    layer=joined_layer,
    sizes=joined_sizes,
)
