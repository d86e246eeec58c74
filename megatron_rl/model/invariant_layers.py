"""The modules of a transformer layer with a row-invariant forward, in place of torch's and Megatron-Core's."""

from __future__ import annotations

import torch

from megatron_rl.model import invariant
from megatron_rl.model.invariant_attention import InvariantAttention, NoRotary

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip


class InvariantNorm(torch.nn.Module):
    """Computes the norm of model/layer_spec.py's RMSNorm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return invariant.rms_norm(x, self.weight, self.eps)


def _product(input, weight, bias=None, *, allreduce_dgrad=False, tp_group=None, **_) -> torch.Tensor:
    """Compute what Megatron-Core's linears ask for (0.16.1 ``tensor_parallel/layers.py`` _forward_impl)."""
    result = invariant.linear(input, weight, tp_group if allreduce_dgrad else None)
    return result if bias is None else result + bias


class InvariantColumnLinear(ColumnParallelLinear):
    """Splits its output over tensor ranks."""

    def _forward_impl(self, *arguments, **named):
        return _product(*arguments, **named)


class InvariantRowLinear(RowParallelLinear):
    """Splits its input over tensor ranks, and adds up their products."""

    def _forward_impl(self, *arguments, **named):
        return _product(*arguments, **named)


def invariant_block_spec(config: TransformerConfig, num_layers: int) -> TransformerBlockSubmodules:
    """Return the submodules of a block of ``num_layers`` dense layers."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = InvariantNorm
    attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
    attention.core_attention = InvariantAttention
    attention.linear_qkv, attention.linear_proj = InvariantColumnLinear, InvariantRowLinear
    mlp.linear_fc1, mlp.linear_fc2 = InvariantColumnLinear, InvariantRowLinear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = InvariantNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=InvariantNorm)


def give_angles(model: GPTModel, frequencies: torch.Tensor) -> None:
    """Have the attentions of a model apply the rotary angles; frequencies: [d / 2] float32."""
    model.rotary_pos_emb = NoRotary()
    for module in model.modules():
        if isinstance(module, InvariantAttention):
            module.inv_freq = frequencies
