"""Layers with norms after attention and MLP, made of Megatron-Core's parts: OLMo 2 and 3, Gemma 3.

Megatron-Core 0.16.1 norms the inputs of attention and MLP, and each head of q and k. OLMo norms the
outputs of attention and MLP instead, before they are added to the residual stream, and norms q and k
over all heads together (OLMo 2, arXiv:2501.00656, section 2; transformers 5.19
``Olmo2DecoderLayer``). Gemma 3 norms inputs and outputs, and multiplies by 1 + weight (transformers
5.19 ``Gemma3DecoderLayer``).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)
from megatron_rl.errors import ConfigError
from megatron_rl.model.layer_spec import mlp_spec

from megatron.core.tensor_parallel.layers import (  # isort: skip
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention  # isort: skip
from megatron.core.transformer.identity_op import IdentityOp  # isort: skip
from megatron.core.transformer.mlp import MLP  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # isort: skip


class WideRMSNorm(torch.nn.RMSNorm):
    """Computes the norm and its product with the weight in float32 and rounds once.

    Hugging Face's Olmo2RMSNorm and GptOssRMSNorm do the same.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:  # torch's fused kernel rounds once, too
            return super().forward(x)
        return torch.nn.functional.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the weight, the same on all ranks, for ``dist_checkpointing``; MLP's method calls this one."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets
        )


class _SumOverTensorRanks(torch.autograd.Function):
    """Sums over tensor ranks; backward sums the gradients, since every rank's output depends on the sum."""

    @staticmethod
    def forward(ctx, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = local.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class ProjectionNorm(torch.nn.Module):
    """Computes an RMS norm over all heads of q or k, on all tensor ranks together: [T, 1, h, d] → the same.

    weight: [h·d], this rank's shard of the norm's weight.
    """

    def __init__(self, config: TransformerConfig, heads: int, head_dim: int, tp_group: dist.ProcessGroup):
        super().__init__()
        self.eps, self.tp_group = config.layernorm_epsilon, tp_group
        self.weight = torch.nn.Parameter(torch.ones(heads * head_dim, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide, ranks = x.float(), self.tp_group.size()
        total = wide.square().sum((-2, -1), keepdim=True)
        if ranks > 1:
            total = _SumOverTensorRanks.apply(total, self.tp_group)
        normed = wide * torch.rsqrt(total / (ranks * self.weight.numel()) + self.eps)
        return (normed * self.weight.float().view(x.shape[-2:])).to(x.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the weight under its global shape for ``dist_checkpointing``, so that another layout loads it."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class ShiftedRMSNorm(WideRMSNorm):
    """Computes the norm times 1 + weight in float32 and rounds once, as Hugging Face's norms of Gemma 1 and 3 do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(
            x.dtype
        )


class PostNormAttention(SelfAttention):
    """Computes attention and norms its output [T, 1, hidden]."""

    norm: type[WideRMSNorm] = WideRMSNorm

    def __init__(self, config: TransformerConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.post_norm = self.norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(*args, **kwargs)
        return self.post_norm(output), bias


class ProjectionNormAttention(PostNormAttention):
    """Computes attention over q and k normed as whole projections, and norms its output [T, 1, hidden]."""

    def __init__(self, config: TransformerConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        group, head_dim = self.linear_qkv.tp_group, self.hidden_size_per_attention_head
        self.q_layernorm = ProjectionNorm(config, self.num_attention_heads_per_partition, head_dim, group)
        self.k_layernorm = ProjectionNorm(config, self.num_query_groups_per_partition, head_dim, group)


class ShiftedPostNormAttention(PostNormAttention):
    """Computes attention and norms its output times 1 + weight [T, 1, hidden]."""

    norm = ShiftedRMSNorm


class PostNormMLP(MLP):
    """Computes the MLP and norms its output [T, 1, hidden]."""

    norm: type[WideRMSNorm] = WideRMSNorm

    def __init__(self, config: TransformerConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.post_norm = self.norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(*args, **kwargs)
        return self.post_norm(output), bias


class ShiftedPostNormMLP(PostNormMLP):
    """Computes the MLP and norms its output times 1 + weight [T, 1, hidden]."""

    norm = ShiftedRMSNorm


def put_norms_behind(spec: TransformerBlockSubmodules, layer_spec: str) -> None:
    """Make a block's layers OLMo 2 layers, in place: norms after attention and MLP, and over all of q and k.

    Raises ConfigError for Transformer Engine's layers, whose linears contain the norms before them.
    """
    if layer_spec != "torch":
        raise ConfigError(
            f"model.layer_spec={layer_spec}: norms behind attention and MLP (olmo2, olmo3) are built of torch's layers "
            "alone; set model.layer_spec=torch"
        )
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        parts.self_attention.module = ProjectionNormAttention
        parts.mlp = mlp_spec(PostNormMLP, ColumnParallelLinear, RowParallelLinear)
    spec.layer_norm = WideRMSNorm


def put_norms_around(spec: TransformerBlockSubmodules, layer_spec: str) -> None:
    """Make a block's layers Gemma 3 layers, in place: norms before and after, times 1 + weight.

    Raises ConfigError for Transformer Engine's layers, whose linears contain the norms before them.
    """
    if layer_spec != "torch":
        raise ConfigError(
            f"model.layer_spec={layer_spec}: norms before and behind attention and MLP (gemma3_text) are built of "
            "torch's layers alone; set model.layer_spec=torch"
        )
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = ShiftedRMSNorm
        parts.self_attention.module = ShiftedPostNormAttention
        parts.mlp = mlp_spec(ShiftedPostNormMLP, ColumnParallelLinear, RowParallelLinear)
        attention = parts.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = ShiftedRMSNorm
    spec.layer_norm = ShiftedRMSNorm
