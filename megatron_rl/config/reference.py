"""The policy that the KL is measured against: where its weights are, when they change, and what the KL costs. Semantics
§7."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.checks import at_least, choose


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """Read where ``loss.kl_coefficient`` is not 0; ``kl_in``: what that coefficient times the KL is added to.

    ``placement``: ``host``, a copy of the weights in host memory that is swapped in for the reference's passes, or
    ``device``, a second model. ``refresh_every_rollouts``: rollouts after which the reference becomes the current
    policy; null: never. ``controller``: the coefficient stays, or is moved so that the KL comes to ``kl_target`` nats
    per token, the faster the fewer samples ``kl_horizon`` is (algorithm/kl_controller.py).
    """

    kl_in: str = "loss"
    placement: str = "host"
    refresh_every_rollouts: int | None = None
    controller: str = "fixed"
    kl_target: float = 0.1
    kl_horizon: int = 10_000

    def __post_init__(self) -> None:
        choose("reference.kl_in", self.kl_in, ("loss", "reward"))
        choose("reference.placement", self.placement, ("host", "device"))
        choose("reference.controller", self.controller, ("fixed", "adaptive"))
        at_least("reference.refresh_every_rollouts", self.refresh_every_rollouts, 1)
        at_least("reference.kl_target", self.kl_target, 0.0, exclusive=True)
        at_least("reference.kl_horizon", self.kl_horizon, 1)
