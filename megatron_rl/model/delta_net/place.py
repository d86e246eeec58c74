"""The placing of gated delta nets, and of the gated attention between them, in the specs of a model's layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from megatron_rl.model.delta_net.kernels import choose_rule
from megatron_rl.model.delta_net.layer import DeltaNetSubmodules, GatedDeltaNet
from megatron_rl.weights.model_shape import ModelShape

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # isort: skip
from megatron.core.transformer.attention import SelfAttention  # isort: skip
from megatron.core.transformer.identity_op import IdentityOp  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip

# In checkpoints the norm before a delta net has the name of Transformer Engine's fused linear, so that either kind of
# layers loads it.
_CHECKPOINT_NAMES = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}


class GatedAttention(SelfAttention):
    """Computes attention whose output is multiplied by a gate, with each head's gate below its query in the weight.

    Megatron-Core (0.16.1 and 0.19.2 ``transformer/attention.py``) has the gates of a group of heads
    below the queries of the group. Files have the order here, and so have LoRA's adapters.
    """

    def get_query_key_value_tensors(
        self, hidden_states, key_value_states=None, output_gate=False, split_qkv=True, **_
    ) -> tuple[torch.Tensor, ...]:
        """Return q [T, 1, heads, d], k and v [T, 1, groups, d], and the gates in the shape of q."""
        assert output_gate and split_qkv and key_value_states is None
        mixed, _bias = self.linear_qkv(hidden_states)
        groups, width = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        mixed = mixed.view(*mixed.shape[:-1], groups, -1)
        both, key, value = mixed.split([mixed.shape[-1] - 2 * width, width, width], -1)
        query, gate = both.unflatten(-1, (-1, 2, width)).unbind(-2)
        query, gate = (x.reshape(*x.shape[:2], -1, width) for x in (query, gate))
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value, gate


def put_delta_nets(spec: TransformerBlockSubmodules, shape: ModelShape, layers: Sequence[int], kernel: str) -> None:
    """Replace attention in the specs of a model chunk's layers by gated delta nets and gated attention, in place.

    layers: the layers' numbers in the whole model, from 0.
    kernel: the setting ``model.delta_kernel``.
    """
    spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]  # layers of a kind share one spec
    for number, layer in zip(layers, spec.layer_specs, strict=True):
        parts = layer.submodules
        if shape.has_delta_net(number):
            parts.self_attention = _delta_net(shape, kernel)
            if shape.layer_spec == "transformer_engine":
                parts.input_layernorm = IdentityOp
            else:
                parts.sharded_state_dict_keys_map |= _CHECKPOINT_NAMES
        else:
            parts.self_attention.module = GatedAttention


def _delta_net(shape: ModelShape, kernel: str) -> ModuleSpec:
    linears = DeltaNetSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    if shape.layer_spec == "transformer_engine":
        from megatron.core.extensions import transformer_engine as te

        linears = DeltaNetSubmodules(in_proj=te.TELayerNormColumnParallelLinear, out_proj=te.TERowParallelLinear)
    own = dict(shape=shape.delta, rule=choose_rule(kernel))
    return ModuleSpec(module=GatedDeltaNet, params=own, submodules=linears)
