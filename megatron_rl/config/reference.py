"""The section of the reference policy: the place of its weights, their renewal, and the KL's coefficient."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.checks import at_least, choose


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """Describes the policy that the KL of `loss.kl_coefficient` is measured against (docs/reference.md)."""

    kl_in: str = "loss"
    """`loss`: the coefficient times the KL is added to it; `reward`: that of each token is taken off it."""
    placement: str = "host"
    """`host`: weights copied to host memory, swapped in for its passes; `device`: a second model in device memory."""
    refresh_every_rollouts: int | None = None
    """Rollouts after which the current policy becomes the reference; null: never."""
    controller: str = "fixed"
    """`fixed`; `adaptive`: starts at `loss.kl_coefficient`, and moves so that the KL comes to `reference.kl_target`."""
    kl_target: float = 0.1
    """KL that an adaptive coefficient leads to, in nats per token."""
    kl_horizon: int = 10_000
    """Samples over which a KL far above the target multiplies an adaptive coefficient by about e^0.2."""

    def __post_init__(self) -> None:
        choose("reference.kl_in", self.kl_in, ("loss", "reward"))
        choose("reference.placement", self.placement, ("host", "device"))
        choose("reference.controller", self.controller, ("fixed", "adaptive"))
        at_least("reference.refresh_every_rollouts", self.refresh_every_rollouts, 1)
        at_least("reference.kl_target", self.kl_target, 0.0, exclusive=True)
        at_least("reference.kl_horizon", self.kl_horizon, 1)
