"""The metric sums of an optimizer step: added up over micro-batches on each rank, then reduced over ranks once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_rl.distributed.collectives import reduce_on_host


class StepSums:
    """Holds this rank's metric sums of the current optimizer step in ``values``, float64 on the host.

    names: the names of the sums.
    num_maxima: how many of the last names hold a maximum (of values ≥ 0) instead of a sum.
    """

    def __init__(self, names: Sequence[str], num_maxima: int) -> None:
        self.names, self._summed = tuple(names), len(names) - num_maxima
        self.values = torch.zeros(len(names), dtype=torch.float64)

    def add(self, microbatches: Sequence[torch.Tensor]) -> None:
        """Add the sums of micro-batches, each float64 [len(names)] on the device.

        One copy brings all of them to the host.
        """
        found, summed = torch.stack(list(microbatches)).cpu(), self._summed
        self.values[:summed] += found[:, :summed].sum(0)
        self.values[summed:] = torch.maximum(self.values[summed:], found[:, summed:].amax(0))

    def zero(self) -> None:
        """Set all sums to zero, for the next optimizer step."""
        self.values.zero_()

    def reduce(self, more: torch.Tensor) -> tuple[dict[str, float], torch.Tensor]:
        """Return ({name: sum over all ranks}, ``more`` summed over all ranks). A collective.

        more: further numbers, float64 of any shape.
        """
        summed = reduce_on_host(torch.cat([self.values[: self._summed], more.flatten()]))
        maxima = self.values[self._summed :].clone()
        if len(maxima):
            reduce_on_host(maxima, dist.ReduceOp.MAX)
        sums, others = summed.split([self._summed, more.numel()])
        return dict(zip(self.names, [*sums.tolist(), *maxima.tolist()], strict=True)), others.view(more.shape)
