"""A gated delta net over packed sequences, in place of attention in a layer of Megatron-Core.

A token's hidden state is projected to q, k, v, an output gate z, and two numbers b and a per head of
v. q, k and v pass a causal convolution over a few tokens and SiLU. q and k are divided by their
lengths. The gated delta rule (rule.py) takes β = sigmoid(b) and g = −e^{A} · softplus(a + bias). Its
outputs are normed per head, multiplied by SiLU(z), and projected back. Source of every step:
transformers 5.19 ``Qwen3NextGatedDeltaNet``.

Tensor ranks hold whole groups (a head of q and k, with its heads of v; weights/families/delta_layer.py).
Context ranks gather q, k, v, b and a of all tokens, and each computes all tokens of its heads but keeps
its own: the layer needs each sequence in order, and one exchange of what is projected is all that it
takes. docs/models.md has the measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_rl.distributed.platform import send
from megatron_rl.model.attention.packed import PackedSequences, gather_context
from megatron_rl.model.attention.spans import context_positions
from megatron_rl.model.delta_net.kernels import DeltaRule
from megatron_rl.model.delta_net.runs import DeltaLayout
from megatron_rl.weights.model_shape import DeltaNetShape

from megatron.core.process_groups_config import ProcessGroupCollection  # isort: skip
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes  # isort: skip
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region  # isort: skip
from megatron.core.transformer.module import MegatronModule  # isort: skip
from megatron.core.transformer.spec_utils import build_module  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # isort: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSubmodules:
    """Holds the classes of a gated delta net's two linear layers, one split by rows and one by columns."""

    in_proj: type
    out_proj: type


class _Weight(torch.nn.Module):
    """Holds one parameter under the name ``weight``."""

    def __init__(self, size: tuple[int, ...], config: TransformerConfig):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))


class GatedDeltaNet(MegatronModule):
    """Computes a gated delta net over packed hidden states [T, 1, hidden], and returns the same shape.

    shape: the sizes of the model's delta nets.
    rule: the kernels that compute the gated delta rule.

    The other arguments are those of Megatron-Core's attention modules.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaNetSubmodules,
        layer_number: int,
        *,
        shape: DeltaNetShape,
        rule: DeltaRule,
        pg_collection: ProcessGroupCollection | None = None,
        **_,
    ):
        super().__init__(config)
        self.layer_number, self.shape, self.rule = layer_number, shape, rule
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.tp_group = groups.tp
        self.groups = shape.key_heads // self.tp_group.size()
        self.heads = shape.value_heads // self.tp_group.size()
        common = dict(config=config, init_method=config.init_method, bias=False, tp_group=self.tp_group)
        common |= dict(skip_bias_add=False, is_expert=False)
        self.in_proj = build_module(
            submodules.in_proj, config.hidden_size, shape.projected_width, gather_output=False, **common
        )
        self.out_proj = build_module(
            submodules.out_proj, shape.value_width, config.hidden_size, input_is_parallel=True, **common
        )
        per_group = self._per_group(shape)
        self.widths = (2 * shape.key_head_dim + per_group * shape.value_head_dim, per_group * shape.value_head_dim)
        self.conv1d = _Weight((self.groups * self.widths[0], 1, shape.conv_tokens), config)
        self.A_log = torch.nn.Parameter(torch.zeros(self.heads, dtype=config.params_dtype))
        self.dt_bias = torch.nn.Parameter(torch.zeros(self.heads, dtype=config.params_dtype))
        self.norm = _Weight((shape.value_head_dim,), config)
        for parameter in (self.conv1d.weight, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    @staticmethod
    def _per_group(shape: DeltaNetShape) -> int:
        """Return the number of heads of v in a group."""
        return shape.value_heads // shape.key_heads

    def forward(self, hidden_states: torch.Tensor, attention_mask=None, packed_seq_params=None, **_):
        """Return (output [T, 1, hidden], None). Raises TypeError unless the input is ``PackedSequences``."""
        packed = packed_seq_params
        if not isinstance(packed, PackedSequences):
            raise TypeError(f"GatedDeltaNet takes PackedSequences as packed_seq_params, not {type(packed).__name__}")
        projected, _bias = self.in_proj(hidden_states)
        grouped = projected.view(len(projected), self.groups, -1)
        mixed, gate, steps = grouped.split([*self.widths, 2 * self._per_group(self.shape)], -1)
        taken = torch.cat([mixed, steps], -1)
        if packed.context.size > 1:
            taken = gather_context(taken, packed)
        outputs = self._rule(taken, packed)
        if packed.context.size > 1:
            outputs = outputs.index_select(0, packed.once("delta net's own", lambda: _own_rows(packed)))
        gated = self._gated_norm(outputs, gate.reshape(len(gate), self.heads, -1))
        return self.out_proj(gated.view(len(gated), 1, -1))

    def _rule(self, taken: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        """Return [T', heads, d_v] of all tokens over context ranks: convolution, then the gated delta rule.

        taken: [T', groups, …], each group's q, k and v, then its b and a.
        """
        shape, device = self.shape, taken.device
        before = shape.conv_tokens - 1
        layout = packed.once(("delta net", before), lambda: DeltaLayout.of(packed.layout, before, device))
        mixed, steps = taken.split([self.widths[0], taken.shape[-1] - self.widths[0]], -1)
        rows = layout.history(mixed.flatten(1))
        convolved = F.silu(causal_convolution(rows, self.conv1d.weight.squeeze(1)))
        b, a = steps.unflatten(-1, (2, -1)).unbind(-2)
        step = b.flatten(1).float().sigmoid()
        decay = -self.A_log.float().exp() * F.softplus(a.flatten(1).float() + self.dt_bias.float())
        return self.rule(convolved.view(len(rows), self.groups, -1), decay, step, layout, shape)

    def _gated_norm(self, outputs: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the outputs [T, heads, d_v], normed per head in float32, times SiLU of the gates of that shape."""
        weight = copy_to_tensor_model_parallel_region(self.norm.weight, group=self.tp_group)
        normed = F.rms_norm(outputs.float(), outputs.shape[-1:], None, self.config.layernorm_epsilon)
        return ((weight * normed.to(gate.dtype)).float() * F.silu(gate.float())).to(gate.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return {key: ShardedTensor} under global shapes, so that another parallel layout can load the checkpoint."""
        own = {f"{name}.weight": getattr(self, name).weight for name in ("conv1d", "norm")}
        own |= {name: getattr(self, name) for name in ("A_log", "dt_bias")}
        split = dict.fromkeys(own.keys() - {"norm.weight"}, 0)
        tensors = make_sharded_tensors_for_checkpoint(
            own, prefix, split, sharded_offsets, tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"]
        )
        for name, module in self.named_children():
            if not isinstance(module, _Weight):
                tensors |= module.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return tensors


def _own_rows(packed: PackedSequences) -> torch.Tensor:
    """Return int64 [T], the indices of this context rank's tokens among those of all ranks, in its order."""
    own = context_positions(packed.layout.lengths, packed.context.rank, packed.context.size)
    return send(torch.from_numpy(own), packed.position_ids.device)


def causal_convolution(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return y [n, c] of rows x [n, c]: y_t = Σ_j w_j x_{t − K + 1 + j}, column by column, with zeros before row 0.

    weight: [c, K].
    """
    width = weight.shape[1]
    padded = F.pad(rows, (0, 0, width - 1, 0))
    out = padded[width - 1 :] * weight[:, -1]
    for tap in range(width - 1):
        out = torch.addcmul(out, padded[tap : tap + len(rows)], weight[:, tap])
    return out
