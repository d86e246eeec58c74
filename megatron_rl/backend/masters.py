"""The float32 masters that AdamW steps in place of bfloat16 weights; the model runs each master rounded."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # isort: skip
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params  # isort: skip


class Masters:
    """Sets the masters that this rank holds. No method is a collective.

    of: parameter → (its master, the range of the flattened parameter that the master covers). A
        distributed optimizer gives this rank ranges of some parameters. A float32 parameter has no
        entry: AdamW steps the parameter itself.
    """

    def __init__(self, parts: Iterable) -> None:
        """Find the masters in ``parts``, the optimizers of Megatron-Core's chained optimizer."""
        self.of: dict[torch.Tensor, tuple[torch.Tensor, slice]] = {}
        for part in parts:
            if not part.is_stub_optimizer:
                self.of |= _masters_of(part)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [master for master, _ in self.of.values()]

    @torch.no_grad()
    def set(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Set a parameter's master to ``values``; do nothing where this rank holds no master of it.

        values: of the parameter's shape and of any dtype. Rounded to the parameter's dtype they must
            be the parameter.
        """
        if parameter in self.of:
            master, held = self.of[parameter]
            master.copy_(values.reshape(-1)[held].view_as(master))

    @torch.no_grad()
    def take(self, other: Masters) -> None:
        """Copy every master of ``other``, which is of an optimizer over the same chunks and ranks."""
        for parameter, (master, _) in self.of.items():
            master.copy_(other.of[parameter][0])


def _masters_of(part) -> dict[torch.Tensor, tuple[torch.Tensor, slice]]:
    if isinstance(part, DistributedOptimizer):
        halves = [p for p in part.model_param_group_index_map if p.dtype != torch.float32]
        spans = {p: part._get_model_param_range_map(p)["param"] for p in halves}
        return {p: (p.main_param, slice(span.start, span.end)) for p, span in spans.items()}
    if isinstance(part, Float16OptimizerWithFloat16Params):
        return {p: (p.main_param, slice(0, p.numel())) for group in part.float16_groups for p in group}
    return {}
