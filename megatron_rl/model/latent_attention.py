"""Multi-latent attention (DeepSeek-V3) on Megatron-Core's MLASelfAttention, with rotary angles by token positions.

Rotary angles: Megatron-Core (0.16.1 ``transformer/multi_latent_attention.py``) computes them within
each layer, from a table that begins at position 0. It rotates each pair of neighbouring
columns, as transformers does under ``rope_interleave``. Here each layer's rotary embedding gives
the angles of the packed tokens' own positions (model/rotary.py). So samples may share one copy of
their prompt.

Projections to the latents: Megatron-Core's local spec splits their weights over tensor ranks and
gathers their outputs. Backward of that gather does not sum gradients over ranks. The sum is needed:
all heads of all ranks use the one rotated part of k, and a rank's gradient of that part comes from
its own heads only. So here these weights are whole on every tensor rank, as in Transformer Engine's
spec. Under sequence parallelism each rank projects its own tokens, and backward of the gather along
the sequence sums the gradients. Megatron-Core's ``finalize_model_grads`` then sums the weights'
gradients over tensor ranks.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from megatron_rl.errors import ConfigError
from megatron_rl.model.attention.packed import PackedSequences, TorchAttention
from megatron_rl.model.layer_spec import RMSNorm
from megatron_rl.model.rotary import PackedRotary
from megatron_rl.weights.model_shape import ModelShape

from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # isort: skip
from megatron.core.transformer import multi_latent_attention  # isort: skip
from megatron.core.transformer.enums import AttnMaskType  # isort: skip
from megatron.core.transformer.multi_latent_attention import (  # isort: skip
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.transformer_config import MLATransformerConfig  # isort: skip

# Without Transformer Engine 0.16.1 still asks whether a linear is of its classes, whose stand-ins are no
# types.
if not isinstance(multi_latent_attention.TELinear, type):
    multi_latent_attention.HAVE_TE = False

# independent of rms_norm_eps, as in transformers 5.19 ``DeepseekV3Attention`` and DeepSeek's own model.py
LATENT_NORM_EPS = 1e-6
# In checkpoints the norms have the names of Transformer Engine's spec, so that either spec loads them.
_CHECKPOINT_NAMES = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}

_BUILT_BY_SPEC = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


def latent_fields(shape: ModelShape, hf_config: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """Return {field: value} of Megatron-Core's MLATransformerConfig for a model with multi-latent attention.

    extra: the user's ``megatron.transformer`` fields.

    Megatron-Core multiplies the attention scores by m² / sqrt(columns of q per head). Without yarn
    m is 1. Under yarn m is 0.1 · mscale_all_dim · ln(factor) + 1, with both names from
    ``rope_parameters``.

    Raises ConfigError for ``apply_rope_fusion=true``, and for values wider than keys in Transformer
    Engine's layers.
    """
    if extra.get("apply_rope_fusion"):
        raise ConfigError(
            f"megatron.transformer.apply_rope_fusion=true of {shape.family}: Megatron-Core's fused rotary kernel of "
            "multi-latent attention reads a table of positions from 0, and here positions come with the tokens; "
            "remove the setting"
        )
    if shape.value_head_dim > shape.head_dim and shape.layer_spec == "transformer_engine":
        raise ConfigError(
            f"v_head_dim={shape.value_head_dim} above qk_nope_head_dim + qk_rope_head_dim={shape.head_dim} of "
            f"{shape.family}: Transformer Engine's attention was not run with values wider than keys; set "
            "model.layer_spec=torch"
        )
    rope = hf_config.rope_parameters
    return dict(
        multi_latent_attention=True,
        qk_layernorm=True,
        q_lora_rank=shape.q_lora_rank or None,
        kv_lora_rank=shape.kv_lora_rank,
        qk_head_dim=shape.head_dim - shape.rope_head_dim,
        qk_pos_emb_head_dim=shape.rope_head_dim,
        v_head_dim=shape.value_head_dim,
        rope_type="rope",  # SpecifiedLatentAttention says why
        rotary_base=rope["rope_theta"],
        rotary_scaling_factor=rope.get("factor") or 1.0,
        mscale_all_dim=rope.get("mscale_all_dim") or 0.0,
        apply_rope_fusion=False,
    )


class LatentRotary(PackedRotary):
    """Computes the rotary angles of a latent attention's tokens; returns (angles, ``factor``).

    factor: multiplies cos and sin.
    """

    def __init__(self, inv_freq: torch.Tensor, factor: float):
        super().__init__(inv_freq)
        self.factor = factor

    def forward(self, position_ids: torch.Tensor, *_, **__) -> tuple[torch.Tensor, float]:
        """Return the angles [T, 1, rope_head_dim] of tokens at ``position_ids`` [T], and the factor on cos and sin."""
        return super().forward(position_ids), self.factor


class ReplicatedLinear(torch.nn.Linear):
    """Projects [T, 1, in] to [T, 1, out] by a weight that is whole on every tensor rank, and returns no bias."""

    def __init__(self, config: MLATransformerConfig, size_in: int, size_out: int):
        super().__init__(size_in, size_out, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # finalize then sums its gradient

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


class SpecifiedLatentAttention(MLASelfAttention):
    """Builds multi-latent attention with the norms and projections that its spec names, and no others.

    Megatron-Core 0.19.2 (``transformer/mla_qk_norm_config.py``) would add a norm before the
    projection of queries that have no latents. Moonlight, a model without query latents, has no
    such norm. Megatron-Core 0.16.1 adds none.

    The rotary embedding must return a pair: the angles, and a factor that multiplies cos and sin.
    """

    def __init__(self, config: MLATransformerConfig, *args, **kwargs):
        # Under rope_type="yarn" Megatron-Core's constructor would make a table of cos and sin, in pinned memory.
        # Its forward expects (angles, factor) from the rotary embedding only under "yarn".
        super().__init__(copy.copy(config), *args, **kwargs)  # a copy: later layers and chunks are built from config
        self.config.rope_type = "yarn"

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, ModuleSpec | type]:
        return {name: getattr(submodules, name) for name in _BUILT_BY_SPEC}


class EngineLatentAttention(SpecifiedLatentAttention):
    """Computes Megatron-Core's multi-latent attention with Transformer Engine's modules.

    Tests run it on plain torch modules in place of Transformer Engine's; it was not tested on a
    GPU. ``give_latent_rotary`` sets the rotary embedding after construction.
    """

    def __init__(self, config: MLATransformerConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        for part in ("q", "kv") if config.q_lora_rank is not None else ("kv",):
            getattr(self, f"linear_{part}_up_proj").eps = LATENT_NORM_EPS  # TELayerNormColumnParallelLinear
            # Transformer Engine marks every linear's weight as split; with the mark the gradient norm
            # would count every rank's copy of this weight
            getattr(self, f"linear_{part}_down_proj").weight.tensor_model_parallel = False

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: PackedSequences | None = None,
        **kwargs,
    ):
        """Return q, k, v and latents by Megatron-Core's method of this name, called without sequence bounds.

        Row t of the rotary angles is that of token t's own position, and without bounds (cu_seqlens)
        the method takes it for token t. With bounds it would look the angles up by position, from 0
        in each sequence.
        """
        unbounded = dataclasses.replace(
            packed_seq_params,
            cu_seqlens_q=None,
            cu_seqlens_kv=None,
            cu_seqlens_q_padded=None,
            cu_seqlens_kv_padded=None,
        )
        return super().get_query_key_value_tensors(hidden_states, key_value_states, position_ids, unbounded, **kwargs)


class LatentAttention(SpecifiedLatentAttention):
    """Computes multi-latent attention with torch's modules; input and output are hidden states [T, 1, hidden]."""

    def __init__(self, config: MLATransformerConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        hidden, device = config.hidden_size, self.linear_kv_up_proj.weight.device
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, width).to(device)
        self.kv_layernorm.eps = LATENT_NORM_EPS
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, config.q_lora_rank).to(device)
            self.q_layernorm.eps = LATENT_NORM_EPS

    def _run_core_attention(self, query, key, value, attention_mask, attn_mask_type=None, **given):
        """Return the core attention's output.

        This replaces Megatron-Core 0.19.2's method, which cuts values that are wider than the keys to
        the keys' width. ``TorchAttention`` takes keys and values of different widths, so nothing is
        cut here.
        """
        return self.core_attention(query, key, value, attention_mask, attn_mask_type=attn_mask_type, **given)


def put_latent_attention(spec: TransformerBlockSubmodules, layer_spec: str) -> None:
    """Replace the attention in the spec of every layer of a model chunk by multi-latent attention, in place.

    layer_spec: "transformer_engine" or "torch", whose modules are taken.
    """
    for layer in spec.layer_specs:
        parts = layer.submodules
        if layer_spec == "transformer_engine":
            parts.input_layernorm, parts.self_attention = _engine_parts(parts.self_attention)
        else:
            parts.self_attention = _torch_attention()
            parts.sharded_state_dict_keys_map = dict(_CHECKPOINT_NAMES)


def _torch_attention() -> ModuleSpec:
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=TorchAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            kv_layernorm=RMSNorm,
        ),
    )


def _engine_parts(plain: ModuleSpec) -> tuple[type, ModuleSpec]:
    """Return (the class of the norm before attention, the spec of multi-latent attention) for Transformer Engine.

    plain: the spec of a layer's ordinary attention, whose core attention the returned spec takes.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    found = get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True, qk_layernorm=True).submodules
    found.self_attention.module = EngineLatentAttention
    found.self_attention.submodules.core_attention = plain.submodules.core_attention
    return found.input_layernorm, found.self_attention


def give_latent_rotary(model: GPTModel, frequencies: torch.Tensor, factor: float) -> None:
    """Make every latent attention of a model compute rotary angles from the tokens' own positions.

    frequencies: float32 [rope_head_dim / 2], the inverse frequencies.
    factor: multiplies cos and sin.
    """
    for module in model.modules():
        if isinstance(module, MLASelfAttention):
            module.rotary_pos_emb = LatentRotary(frequencies, factor)
