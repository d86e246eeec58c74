"""Refuses weights that hold NaN or infinity, by the name of their tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from megatron_rl.errors import ConfigError


def check_finite(values: torch.Tensor, sources: Callable[[], Iterable[tuple[str, torch.Tensor]]], way_out: str) -> None:
    """Raise ConfigError where some of ``values`` are NaN or infinite, with the tensor's name and their number.

    values: weights in the dtype in which they will be used.
    sources: returns (name, tensor) of the tensors that they come from, in their own dtype; called
        for a message alone.
    way_out: the setting of a wider dtype, where the dtype of ``values`` has no place for numbers of
        the sources.
    """
    if torch.stack(torch.aminmax(values.detach())).isfinite().all():  # one pass, without a copy
        return
    names = []
    for name, whole in sources():
        if wrong := int((~whole.isfinite()).sum()):
            raise ConfigError(
                f"{name} holds {wrong} numbers that are NaN or infinite, of {whole.numel()}: the weights are broken"
            )
        names.append(name)
    raise ConfigError(f"{', '.join(names)} hold numbers that {values.dtype} has no place for; {way_out}")
