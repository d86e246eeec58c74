"""The section of the reference policy: the place of its weights, their renewal, and the KL's coefficient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.checks import choose
from megatron_rl.config.ranges import Range


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """Describes the policy that the KL of `loss.kl_coefficient` is measured against (docs/reference.md)."""

    kl_in: str = "loss"
    """`loss`: the coefficient times the KL is added to it; `reward`: that of each token is taken off it."""
    placement: str = "host"
    """`host`: weights copied to host memory, swapped in for its passes; `device`: a second model in device memory."""
    refresh_every_rollouts: Annotated[int, Range(1)] | None = None
    """Rollouts after which the current policy becomes the reference; null: never."""
    controller: str = "fixed"
    """`fixed`; `adaptive`: starts at `loss.kl_coefficient`, and moves so that the KL comes to `reference.kl_target`."""
    kl_target: Annotated[float, Range(0, 1000, open_low=True)] = 0.1
    """KL that an adaptive coefficient leads to, in nats per token."""
    kl_horizon: Annotated[int, Range(1, 10**12)] = 10_000
    """Samples over which a KL far above the target multiplies an adaptive coefficient by about e^0.2."""

    def __post_init__(self) -> None:
        choose("reference.kl_in", self.kl_in, ("loss", "reward"))
        choose("reference.placement", self.placement, ("host", "device"))
        choose("reference.controller", self.controller, ("fixed", "adaptive"))
