"""Keeps the reference policy's weights: in host memory, swapped in to be read, or in a second model on the device.

Both keep bitwise copies of this rank's own shards, in the policy's dtype, so that log-probs are the same to the bit,
and nothing of either is in the optimizer or in a gradient buffer. With W the bytes of this rank's weights:

- ``host`` takes W of host memory, W more for the policy's weights while the reference is read, and no device memory.
  With adapters only they change, so W is theirs alone.
- ``device`` takes W of device memory for good, also while the rest of the trainer is offloaded, and copies nothing when
  the reference is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from megatron_rl.backend.schedule import Schedule
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.model.frozen import build_frozen

NONE_YET = "there is no reference policy yet: call keep_reference() first"


class HostCopy:
    """Keeps the reference in host memory (``reference.placement=host``).

    tensors: a copy of each trained parameter, chunk by chunk; None before ``keep``.
    """

    def __init__(self, model: TrainableModel) -> None:
        self.model = model
        self.tensors: list[torch.Tensor] | None = None

    def keep(self) -> None:
        """Copy the model's current weights. Not a collective but for the parameter gather."""
        self.model.schedule.gather_parameters()
        self.tensors = _on_host(trained(self.model.parameters()))

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Give the model's parameters the reference's values within the block; the optimizer's masters stay."""
        if self.tensors is None:
            raise ValueError(NONE_YET)
        self.model.schedule.gather_parameters()
        parameters = trained(self.model.parameters())
        current = _on_host(parameters)
        try:
            overwrite(parameters, self.tensors)
            yield
        finally:
            overwrite(parameters, current)


class DeviceCopy:
    """Keeps the reference in a second model on the device (``reference.placement=device``), which ``keep`` builds.

    tensors: the second model's parameters that are trained in the first, chunk by chunk; None before ``keep``.
    """

    def __init__(self, model: TrainableModel) -> None:
        self.model = model
        self.chunks, self.schedule = None, None

    @property
    def tensors(self) -> list[torch.Tensor] | None:
        return None if self.chunks is None else trained(self._parameters())

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self.chunks for p in chunk.module.parameters()]

    def keep(self) -> None:
        """Copy the model's current weights; a collective."""
        model = self.model
        if self.chunks is None:
            self.chunks = build_frozen(model.config, model.hf_config, model.topology)
            self.schedule = Schedule(self.chunks, model.topology)
        model.schedule.gather_parameters()
        overwrite(self._parameters(), model.parameters())

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Make the second model's chunks the model's within the block; no gradient can be accumulated in them."""
        if self.chunks is None:
            raise ValueError(NONE_YET)
        model = self.model
        own = model.chunks, model.schedule
        model.chunks, model.schedule = self.chunks, self.schedule
        try:
            yield
        finally:
            model.chunks, model.schedule = own


ReferenceWeights = HostCopy | DeviceCopy
PLACEMENTS: dict[str, type[ReferenceWeights]] = {"host": HostCopy, "device": DeviceCopy}


def trained(parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the trained parameters: the adapters', or all where there are no adapters."""
    return [p for p in parameters if p.requires_grad]


def _on_host(parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [p.detach().to("cpu", copy=True) for p in parameters]


@torch.no_grad()
def overwrite(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
