"""Layers with norms after attention and MLP, made of Megatron-Core's modules, for OLMo 2, OLMo 3 and Gemma 3.

Megatron-Core 0.16.1 norms the inputs of attention and MLP, and each head of q and k. OLMo norms the
outputs of attention and MLP instead, before they are added to the residual stream. It norms q and k
over all heads together (OLMo 2, arXiv:2501.00656, section 2; transformers 5.19
``Olmo2DecoderLayer``). Gemma 3 norms both inputs and outputs, and its norms multiply by 1 + weight
(transformers 5.19 ``Gemma3DecoderLayer``).
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
    """Computes an RMS norm and its product with the weight in float32, and rounds only the result.

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
        """Return {key: ShardedTensor} of the weight, which every rank holds whole, for ``dist_checkpointing``.

        Megatron-Core's MLP calls this method of its submodules.
        """
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets
        )


class _SumOverTensorRanks(torch.autograd.Function):
    """Sums a tensor over tensor ranks.

    Backward sums the gradients over tensor ranks too, since every rank's output depends on the sum.
    """

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
    """Computes an RMS norm of q or k over all heads of all tensor ranks together.

    Input and output are [T, 1, h, d], with the h heads of this tensor rank.

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
        """Return {key: ShardedTensor} of the weight under its global shape, for ``dist_checkpointing``.

        So another parallel layout can load it.
        """
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class ShiftedRMSNorm(WideRMSNorm):
    """Computes an RMS norm and its product with 1 + weight in float32, and rounds only the result.

    Hugging Face's norms of Gemma 1 and 3 do the same.
    """

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
    """Norms q and k over all heads together, computes attention, and norms its output [T, 1, hidden] (OLMo 2)."""

    def __init__(self, config: TransformerConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        group, head_dim = self.linear_qkv.tp_group, self.hidden_size_per_attention_head
        self.q_layernorm = ProjectionNorm(config, self.num_attention_heads_per_partition, head_dim, group)
        self.k_layernorm = ProjectionNorm(config, self.num_query_groups_per_partition, head_dim, group)


class ShiftedPostNormAttention(PostNormAttention):
    """Computes attention, and norms its output [T, 1, hidden] by a norm that multiplies by 1 + weight (Gemma 3)."""

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
    """Computes the MLP, and norms its output [T, 1, hidden] by a norm that multiplies by 1 + weight (Gemma 3)."""

    norm = ShiftedRMSNorm


def put_norms_behind(spec: TransformerBlockSubmodules, layer_spec: str) -> None:
    """Turn the specs of a model chunk's layers into specs of OLMo 2 layers, in place.

    They norm the outputs of attention and MLP but not the inputs, and q and k over all heads
    together. Raises ConfigError for Transformer Engine's layers, whose linear modules include the
    norms of their inputs.
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


def put_shifted_norms(spec: TransformerBlockSubmodules, layer_spec: str) -> None:
    """Make every norm of a model chunk's layers, and the final norm, multiply by 1 + weight, in place.

    Transformer Engine's norms do so by the field ``layernorm_zero_centered_gamma``.
    """
    if layer_spec != "torch":
        return
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = ShiftedRMSNorm
        attention = parts.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = ShiftedRMSNorm
    spec.layer_norm = ShiftedRMSNorm


def put_norms_around(spec: TransformerBlockSubmodules, layer_spec: str) -> None:
    """Turn the specs of a model chunk's layers into specs of Gemma 3 layers, in place.

    They norm inputs and outputs of attention and MLP, and every norm multiplies by 1 + weight.
    Raises ConfigError for Transformer Engine's layers, whose linear modules include the norms of
    their inputs.
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
