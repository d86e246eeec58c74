"""A gated delta net over packed sequences, in place of attention in a layer of Megatron-Core.

A token's hidden state is projected to q, k, v, an output gate z, and two numbers b and a per head of
v. q, k and v pass a causal convolution over a few tokens and SiLU. q and k are divided by their
lengths. The gated delta rule (rule.py) takes β = sigmoid(b) and g = −e^{A} · softplus(a + bias). Its
outputs are normed per head, multiplied by SiLU(z), and projected back. Source of every step:
transformers 5.19 ``Qwen3NextGatedDeltaNet``.

Tensor ranks hold whole groups (a head of q and k, with its heads of v; weights/families/delta_layer.py).
Context ranks exchange tokens for groups, or gather all tokens (context.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_rl.model.attention.packed import PackedSequences
from megatron_rl.model.delta_net.context import all_tokens, own_groups, own_tokens
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
        gate = gate.contiguous()  # backward keeps this part of what is projected, not the whole
        if packed.context.size > 1:
            taken = all_tokens(torch.cat([mixed, steps], -1), packed)
            mixed, steps = taken.split([self.widths[0], steps.shape[-1]], -1)
        outputs = own_tokens(self._rule(mixed, steps, packed), self.groups, packed)
        gated = self._gated_norm(outputs, gate.view(len(gate), self.heads, -1))
        return self.out_proj(gated.view(len(gated), 1, -1))

    def _rule(self, mixed: torch.Tensor, steps: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        """Return [T', own heads, d_v] of all tokens over context ranks: convolution, then the gated delta rule.

        mixed: [T', own groups, …], each group's q, k and v (context.py ``own_groups``).
        steps: [T', own groups, …], each group's b and a.
        """
        shape, device = self.shape, mixed.device
        before = shape.conv_tokens - 1
        layout = packed.once(("delta net", before), lambda: DeltaLayout.of(packed.layout, before, device))
        rows = layout.history(mixed).flatten(1)
        first, count = own_groups(self.groups, packed.context)
        of_groups, per_group = slice(first, first + count), self._per_group(shape)
        taps = self.conv1d.weight.squeeze(1).unflatten(0, (self.groups, -1))[of_groups].flatten(0, 1)
        rate, bias = (x.float().view(self.groups, per_group)[of_groups].flatten() for x in (self.A_log, self.dt_bias))
        convolved = causal_convolution(rows, taps)
        b, a = steps.unflatten(-1, (2, -1)).unbind(-2)
        step = b.flatten(1).float().sigmoid()
        decay = -rate.exp() * F.softplus(a.flatten(1).float() + bias)
        return self.rule(convolved.view(len(rows), count, -1), decay, step, layout, shape)

    def _gated_norm(self, outputs: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the outputs [T, heads, d_v], normed per head in float32, times SiLU of the gates of that shape."""
        weight = copy_to_tensor_model_parallel_region(self.norm.weight, group=self.tp_group)
        return _GatedNorm.apply(outputs, gate, weight, self.config.layernorm_epsilon)

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


def causal_convolution(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return SiLU(y) [n, c] of rows x [n, c]: y_t = Σ_j w_j x_{t − K + 1 + j} by column, with zeros before row 0.

    weight: [c, K].

    Sums are float32. On a CPU it goes by blocks of rows, so that what a block makes stays in the
    cache. Backward computes y again; only x is kept.
    """
    return _Convolution.apply(rows, weight)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        taps, out = weight.float().t().contiguous(), torch.empty_like(rows)
        for start, stop in _blocks(rows):
            out[start:stop] = F.silu(_convolved(rows, taps, start, stop), inplace=True)
        return out

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weight = ctx.saved_tensors
        taps = weight.float().t().contiguous()
        width, of_taps = len(taps), torch.zeros_like(taps)
        of_rows = torch.zeros_like(rows, dtype=torch.float32)
        for start, stop in _blocks(rows):
            before = _convolved(rows, taps, start, stop)
            of_sum = torch.ops.aten.silu_backward(gradient[start:stop].float(), before)
            for back in range(width):
                first = min(max(start, back), stop)
                own = of_sum[first - start :]
                of_rows[first - back : stop - back].addcmul_(own, taps[-1 - back])
                of_taps[-1 - back] += (own * rows[first - back : stop - back]).sum(0)
        return of_rows.to(rows.dtype), of_taps.t().to(weight.dtype)


class _GatedNorm(torch.autograd.Function):
    """Computes RMS norm of outputs, times a weight, times SiLU of gates, by blocks; only the three are kept."""

    @staticmethod
    def forward(ctx, outputs: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(outputs, gate, weight)
        ctx.eps, made = eps, torch.empty_like(gate)
        for start, stop in _blocks(gate.flatten(1)):
            normed, _factor = _normed(outputs[start:stop], eps)
            made[start:stop] = (weight * normed.to(gate.dtype)).float() * F.silu(gate[start:stop].float())
        return made

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        outputs, gate, weight = ctx.saved_tensors
        of_outputs, of_gate = torch.empty_like(outputs), torch.empty_like(gate)
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start, stop in _blocks(gate.flatten(1)):
            normed, factor = _normed(outputs[start:stop], ctx.eps)
            own, given = gate[start:stop].float(), gradient[start:stop].float()
            weighted = (weight * normed.to(gate.dtype)).float()
            of_gate[start:stop] = torch.ops.aten.silu_backward(weighted.mul_(given), own)
            given = given * F.silu(own)
            of_weight += (given * normed).sum((0, 1))
            given *= weight.float()
            along = torch.linalg.vecdot(given, normed)[..., None] / outputs.shape[-1]
            of_outputs[start:stop] = given.sub_(normed.mul_(along)).mul_(factor)
        return of_outputs, of_gate, of_weight.to(weight.dtype), None


def _normed(outputs: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (outputs [n, heads, d] divided by their root mean square, one over it), float32."""
    outputs = outputs.float()
    factor = torch.rsqrt(torch.linalg.vecdot(outputs, outputs) / outputs.shape[-1] + eps)[..., None]
    return outputs * factor, factor


def _blocks(rows: torch.Tensor) -> list[tuple[int, int]]:
    """Return (first row, last row + 1) of blocks of ``rows``: one on a GPU, of about 2^17 elements on a CPU."""
    size = len(rows) if rows.is_cuda else max(2**17 // rows.shape[1], 16)
    return [(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]


def _convolved(rows: torch.Tensor, taps: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return rows ``start`` to ``stop`` of y, float32; taps: [K, c]."""
    out = rows[start:stop] * taps[-1]
    for back in range(1, len(taps)):
        first = max(start, back)
        if first < stop:
            out[first - start :].addcmul_(rows[first - back : stop - back], taps[-1 - back])
    return out
