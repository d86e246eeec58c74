"""The reference policy's weights: copies in host memory, swapped in for reading, or a second model on the device.

Both keep bitwise copies of this rank's shards in the policy's dtype, so log-probs are the same to
the bit. Neither copy is in the optimizer or in a gradient buffer. W is the bytes of this rank's
weights:

- ``host`` takes W of host memory, pinned on a CUDA host, and no device memory. From the first
  reading on it takes W more, for the policy's weights. With adapters only the adapters are copied,
  so W is their bytes.
- ``device`` takes W of device memory for good, also while the trainer's gradients and optimizer
  state are offloaded. It copies nothing when the reference is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from megatron_rl.backend.schedule import Schedule
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.distributed.platform import HOST
from megatron_rl.model.frozen import build_frozen
from megatron_rl.model.settings import ModelSettings


class _HostMemory:
    """Holds copies of parameters in host memory, which is allocated once.

    Allocating pinned memory costs more than the copy.

    tensors: the copies; None before ``take``.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] | None = None

    def take(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
        """Copy the parameters into the host memory, and return the copies in the same order."""
        if self.tensors is None:
            self.tensors = [torch.empty_like(p, device="cpu", pin_memory=HOST.is_cuda) for p in parameters]
        overwrite(self.tensors, parameters)
        HOST.synchronize()
        return self.tensors


class HostCopy:
    """Keeps the reference policy's weights in host memory (``reference.placement=host``)."""

    def __init__(self, model: TrainableModel) -> None:
        self.model = model
        self._reference, self._policy = _HostMemory(), _HostMemory()

    @property
    def tensors(self) -> list[torch.Tensor] | None:
        """Return the reference's trained parameters on the host, model chunk by model chunk; None before ``keep``."""
        return self._reference.tensors

    def keep(self) -> None:
        """Make the model's current weights the reference.

        A collective only if a gather of parameters is pending.
        """
        self.model.schedule.gather_parameters()
        self._reference.take(trained(self.model.parameters()))

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Return a context within which the model's parameters have the reference's values, and after it the policy's.

        AdamW's master weights are not touched.
        """
        self.model.schedule.gather_parameters()
        parameters = trained(self.model.parameters())
        current = self._policy.take(parameters)
        try:
            overwrite(parameters, self.tensors)
            yield
        finally:
            overwrite(parameters, current)


class DeviceCopy:
    """Keeps the reference policy's weights in a second model on the device (``reference.placement=device``).

    The first ``keep`` builds the second model.

    tensors: the second model's copies of the trained parameters, model chunk by model chunk; None
        before ``keep``.
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
        """Make the model's current weights the reference. A collective."""
        model = self.model
        if self.chunks is None:
            self.chunks, _ = build_frozen(ModelSettings.of(model.config), model.hf_config, model.topology)
            self.schedule = Schedule(self.chunks, model.topology)
        model.schedule.gather_parameters()
        overwrite(self._parameters(), model.parameters())
        # buffers are weights that are never trained (Entry.frozen), and counters
        for own, theirs in zip(self.chunks, model.chunks, strict=True):
            overwrite(list(own.module.buffers()), list(theirs.module.buffers()))

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Return a context in which forward passes run the second model, the reference; it takes no gradient."""
        model = self.model
        own = model.chunks, model.schedule
        model.chunks, model.schedule = self.chunks, self.schedule
        try:
            yield
        finally:
            model.chunks, model.schedule = own


def trained(parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the parameters that are trained: the adapters' if the model has adapters, else all."""
    return [p for p in parameters if p.requires_grad]


@torch.no_grad()
def overwrite(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy each value into its target on the device's current stream; the host does not wait."""
    for target, value in zip(targets, values, strict=True):
        target.copy_(value, non_blocking=True)
