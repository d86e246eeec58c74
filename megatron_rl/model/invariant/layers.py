"""A transformer layer's row-invariant modules, in place of torch's and Megatron-Core's modules.

Row-invariant: in the forward pass a row's (a token's) result has the same bits in any batch.
"""

from __future__ import annotations

import torch

from megatron_rl.model.invariant import operations as invariant
from megatron_rl.model.invariant.attention import InvariantAttention
from megatron_rl.model.layer_spec import mlp_spec
from megatron_rl.model.rotary import NoRotary

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # isort: skip
from megatron.core.transformer.mlp import MLP  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip


class InvariantNorm(torch.nn.Module):
    """Computes the RMSNorm of model/layer_spec.py such that a token's result has the same bits in any batch."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return invariant.rms_norm(x, self.weight, self.eps)


def _product(input, weight, bias=None, *, allreduce_dgrad=False, tp_group=None, **_) -> torch.Tensor:
    """Return input times the transpose of ``weight``, plus ``bias``; a row's result has the same bits in any batch.

    The arguments are those that ColumnParallelLinear passes to its product (Megatron-Core 0.16.1
    ``layers.py``).

    allreduce_dgrad: whether backward sums the input's gradient over ``tp_group``.
    """
    result = invariant.linear(input, weight, tp_group if allreduce_dgrad else None)
    return result if bias is None else result + bias


class InvariantColumnLinear(ColumnParallelLinear):
    """Computes a linear layer whose output is split over tensor ranks, and gives a token the same bits in any batch.

    The fields are for a model on one tensor rank that must give the same bits as a model split over
    several (``compute_for_ranks``):

    shards: the weight's rows of each rank of that split model; () for any other model.
    order: int64, the index of each of the layer's outputs in the concatenated outputs of the
        shards.
    """

    shards: tuple[torch.Tensor, ...] = ()
    order: torch.Tensor

    def _forward_impl(self, *arguments, **named):
        if not self.shards:
            return _product(*arguments, **named)
        found = torch.cat([invariant.linear(named["input"], shard) for shard in self.shards], dim=-1)[..., self.order]
        return found if named["bias"] is None else found + named["bias"]


class InvariantRowLinear(RowParallelLinear):
    """Computes a linear layer whose input is split over tensor ranks, and gives a token the same bits in any batch.

    The ranks' products are added up in the order of the ranks.

    shards: the weight's columns of each rank of a split model whose bits this model, on one tensor
        rank, must give (``compute_for_ranks``). () for any other model.
    """

    shards: tuple[torch.Tensor, ...] = ()

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.shards:
            inputs = input_.chunk(len(self.shards), dim=-1)
            products = [invariant.linear(x, shard) for x, shard in zip(inputs, self.shards, strict=True)]
            return invariant.ordered_sum(products), self.bias
        return invariant.rank_sum(invariant.linear(input_, self.weight), self.tp_group), self.bias


def invariant_block_spec(config: TransformerConfig, num_layers: int) -> TransformerBlockSubmodules:
    """Return the spec of ``num_layers`` dense layers with which a token's result has the same bits in any batch."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = InvariantNorm
    layer.submodules.mlp = mlp_spec(MLP, InvariantColumnLinear, InvariantRowLinear)
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = InvariantAttention
    attention.linear_qkv, attention.linear_proj = InvariantColumnLinear, InvariantRowLinear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = InvariantNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=InvariantNorm)


def give_angles(model: GPTModel, frequencies: torch.Tensor) -> None:
    """Make a model's core attentions apply the rotary angles themselves.

    frequencies: [d / 2] float32, the inverse frequencies.
    """
    model.rotary_pos_emb = NoRotary()
    for module in model.modules():
        if isinstance(module, InvariantAttention):
            module.inv_freq = frequencies


def compute_for_ranks(model: GPTModel, ranks: int) -> None:
    """Make an unsplit model compute the same bits as ``ranks`` tensor ranks would compute together.

    Each rank's shard of a weight is multiplied separately, since a product's order of summation may
    depend on its width. In an MLP's first linear a shard has some of the gate's rows and some of
    up's. The shards are copies without a gradient, so call this after the weights are loaded.
    """
    if ranks == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, InvariantAttention):
            module.parts = ranks
        elif isinstance(module, InvariantRowLinear):
            module.shards = tuple(shard.contiguous() for shard in module.weight.detach().chunk(ranks, dim=1))
        elif isinstance(module, InvariantColumnLinear) and "output_layer" not in name:
            rows = torch.arange(len(module.weight)).view(2 if name.endswith("linear_fc1") else 1, ranks, -1)
            held = rows.transpose(0, 1).flatten(1)
            module.shards = tuple(module.weight.detach()[own] for own in held)
            module.order = torch.argsort(held.flatten())
