"""LoRA adapters of linear layers: y = W x + (alpha / rank) · B A x (Hu et al. 2021, arXiv:2106.09685, eq. 3).

W and the rest of the model are frozen. A pair (A [rank, in], B [out, rank]) belongs to one Hugging
Face projection, although Megatron-Core fuses q, k, v and gate, up. So a pair means the same under
every parallel layout, and to PEFT. A forward hook on the linear adds the pairs' outputs. "Finalize"
below is Megatron-Core's ``finalize_model_grads``, which sums some gradients over tensor ranks.

Each tensor rank holds a shard of W [out, in]. A linear layer is split in one of two ways:

- By rows of W (linear_qkv, linear_fc1; Megatron-Core's column-parallel linears): A is whole on every
  rank, B has the rank's own rows. Every rank computes A x. Backward sums the gradient of A x over
  tensor ranks: as many numbers per token as A has rows. So the gradients of A and of x are whole on
  each rank.
  Under sequence parallelism x holds the rank's own tokens: A x is gathered and its gradient is
  reduce-scattered. Then A's gradient covers the rank's tokens, and finalize sums it.
- By columns of W (linear_proj, linear_fc2; Megatron-Core's row-parallel linears): A has the rank's
  own columns, B is whole. A x is summed over ranks, and B's gradient is whole on every rank. Under
  sequence parallelism A x is reduce-scattered. Then B's gradient covers the rank's tokens, and
  finalize sums it.

A parameter that finalize sums has the attribute ``sequence_parallel``. A split parameter has the
attribute ``tensor_model_parallel``. The gradient norm counts parameters without the second
attribute on tensor rank 0 alone (0.16.1 ``finalize_model_grads.py``, ``optimizer/optimizer.py``).

A routed expert's linear has its own pairs, which take the tokens that the dispatcher brought to the
expert. A grouped linear of Transformer Engine has one module with all its experts' pairs
(``GroupedAdapter``). The dispatcher gathers an expert's tokens over its tensor ranks. It sums their
outputs, and in backward the gradients of their inputs (0.16.1 ``moe/token_dispatcher.py``). So the
adapter's output needs no other sum. As above, A is whole if W is split by rows, and B is whole if W
is split by columns. Backward here sums the gradient of this whole parameter over expert tensor ranks.
The parameter has the attribute ``tensor_model_parallel`` on the first of these ranks alone, so that
the gradient norm counts it once.

Transformer Engine's fused layers contain the norm of their input. Their adapters compute that norm
again, with the layer's frozen weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)
from megatron_rl.distributed.topology import Topology
from megatron_rl.weights.entry import Entry, Layout
from megatron_rl.weights.mapping import pair_entries, shard_size, target_of
from megatron_rl.weights.model_shape import ModelShape

from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding  # isort: skip
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes  # isort: skip
from megatron.core.tensor_parallel.mappings import (  # isort: skip
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # isort: skip

MERGED_ROWS = 1024  # rows of a weight that are merged at a time, in float32


class Adapter(torch.nn.Module):
    """Holds the LoRA pairs (A, B) of one linear layer, as parameters ``<projection>_A`` and ``<projection>_B``.

    The pairs are zeros until ``start_adapters`` or ``fill_adapters`` fills them.

    enabled: False inside ``adapters_off``.
    target: the linear layer's name in ``lora.targets``.
    """

    def __init__(self, linear: torch.nn.Module, weight: Entry, shape: ModelShape, topology: Topology) -> None:
        super().__init__()
        own = linear.get_parameter(weight.megatron.rpartition(".")[2])
        self.enabled = True
        self.target = target_of(weight.megatron)
        self.scale = shape.lora_alpha / shape.lora_rank
        self.in_rows = weight.layout is not Layout.COLUMNS
        groups = weight.groups or (shape.num_kv_heads if weight.layout is Layout.QKV else 0)
        self.groups = groups // topology.tensor_size or 1
        self.of_expert = weight.expert is not None
        self.tp_group = topology.expert_tensor_group if self.of_expert else topology.tensor_group
        self.sequence_parallel = linear.sequence_parallel and not self.of_expert
        self.projections = tuple(name.removesuffix(".weight").rpartition(".")[2] for name in weight.hf)
        self.split: dict[str, int] = {}  # parameter's name → the dimension that tensor ranks split
        for entry in pair_entries(weight):
            name = entry.megatron.rpartition(".")[2]
            size = shard_size(entry, shape, self.tp_group.size())
            parameter = torch.nn.Parameter(torch.zeros(size, dtype=own.dtype, device=own.device))
            if self.of_expert:
                parameter.allreduce = own.allreduce  # False: reduced over the ranks that hold this expert
            if entry.layout is not Layout.REPLICATED:
                self.split[name] = 0 if self.in_rows else 1
                set_tensor_model_parallel_attributes(parameter, True, self.split[name], 1)
            elif self.of_expert:
                set_tensor_model_parallel_attributes(parameter, topology.expert_tensor_rank == 0, -1, 1)
            else:
                parameter.sequence_parallel = self.sequence_parallel
            self.register_parameter(name, parameter)

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (A, B) of each projection, in the order in which the linear layer fuses the projections."""
        return [(self.get_parameter(f"{name}_A"), self.get_parameter(f"{name}_B")) for name in self.projections]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the adapter adds to this rank's output of the linear layer, in the shape of that output.

        x: [S, 1, in], the linear's input (after its fused norm, if any), or [T, in], an expert's
            tokens.

        The result is [S', 1, out] or [T, out]. S' is S, but under sequence parallelism on TP ranks
        it is TP · S for a ColumnParallelLinear, and S / TP for a RowParallelLinear.
        """
        pairs = self.pairs()
        a, b = torch.cat([a for a, _ in pairs]), [b for _, b in pairs]
        if self.of_expert and self.in_rows:  # the half that is whole on all ranks sums its gradient
            a = copy_to_tensor_model_parallel_region(a, group=self.tp_group)
        elif self.of_expert:
            b = [copy_to_tensor_model_parallel_region(each, group=self.tp_group) for each in b]
        narrow = F.linear(x, a) * self.scale
        if not self.of_expert:
            narrow = self._over_ranks(narrow)
        parts = [F.linear(product, each) for product, each in zip(narrow.chunk(len(pairs), -1), b, strict=True)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.unflatten(-1, (self.groups, -1)) for part in parts], -1).flatten(-2)

    def _over_ranks(self, narrow: torch.Tensor) -> torch.Tensor:
        """Return the A x that this rank multiplies by B.

        narrow: the A x of this tensor rank.

        If the linear's output features are split (ColumnParallelLinear), ``narrow`` is returned as it
        is, or under sequence parallelism gathered. If its input features are split
        (RowParallelLinear), ``narrow`` is summed over ranks. Under sequence parallelism each rank
        then keeps its own tokens.
        """
        if self.in_rows and self.sequence_parallel:
            return gather_from_sequence_parallel_region(narrow, tensor_parallel_output_grad=True, group=self.tp_group)
        if self.in_rows:
            return copy_to_tensor_model_parallel_region(narrow, group=self.tp_group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(narrow, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(narrow, group=self.tp_group)

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W + (alpha / rank) · B A for this rank's shard of W, in a new tensor.

        weight: the shard of W.

        Product and sum are computed in float32 and rounded to W's dtype once. Beside the result,
        two float32 blocks of MERGED_ROWS rows need memory.
        """
        merged = weight.detach().clone()
        grouped, start = merged.unflatten(0, (self.groups, -1)), 0
        for a, b in self.pairs():
            grouped_b = b.unflatten(0, (self.groups, -1))
            rows = grouped_b.shape[1]
            for group, group_b in zip(grouped[:, start : start + rows], grouped_b, strict=True):
                for block, block_b in zip(group.split(MERGED_ROWS), group_b.split(MERGED_ROWS), strict=True):
                    block.copy_(torch.addmm(block.float(), block_b.float(), a.float(), alpha=self.scale))
            start += rows
        return merged

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return {key: ShardedTensor} of the pairs under their global shapes, for ``dist_checkpointing``.

        So another parallel layout can load them.
        """
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            self.split,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class GroupedAdapter(torch.nn.ModuleList):
    """Holds the adapters of a grouped linear of Transformer Engine, one for each of this rank's experts."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.topology = topology

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return {key: ShardedTensor} of all experts' pairs, with the expert's number as an axis of each tensor.

        A model whose experts have separate linears saves its pairs under the same keys.
        """
        tensors, topology = {}, self.topology
        for number, adapter in enumerate(self):
            offset = (len(sharded_offsets), topology.expert_rank * len(self) + number, topology.expert_size * len(self))
            own = adapter.sharded_state_dict(f"{prefix}{number}.", (*sharded_offsets, offset), metadata)
            replace_prefix_for_sharding(own, f"{prefix}{number}.", prefix)
            for tensor in own.values():
                tensor.replica_id = (*tensor.replica_id[:2], topology.expert_data_rank)
            tensors |= own
        return tensors


def add_to(linear: torch.nn.Module, adapters: Sequence[Adapter]) -> None:
    """Register a forward hook on a linear layer that adds the adapters' outputs to the layer's output.

    adapters: one adapter, or for a grouped linear one per expert. A grouped linear's second
        argument is each expert's number of tokens.
    """
    fused = hasattr(linear, "layer_norm_weight")

    def hook(_linear: torch.nn.Module, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor | None]):
        if not adapters[0].enabled:
            return None
        x, *counts = inputs
        parts = x.split(counts[0]) if counts else (normed(linear, x) if fused else x,)
        terms = [adapter(part) for adapter, part in zip(adapters, parts, strict=True)]
        return output[0] + (torch.cat(terms) if counts else terms[0]), output[1]

    linear.register_forward_hook(hook)


def normed(linear: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return x after the RMS norm that Transformer Engine's fused linear applies to its input.

    The norm is computed in float32 with the linear's norm weight, and rounded once.
    """
    weight = linear.layer_norm_weight.float() + (1 if linear.zero_centered_gamma else 0)
    return F.rms_norm(x.float(), weight.shape, weight, linear.eps).to(x.dtype)
