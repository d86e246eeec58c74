"""The policy that the KL is measured against: where its weights are, when they change, and what the KL costs. Semantics §7."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.config.checks import at_least, choose
from megatron_rl.types import ConfigError

if TYPE_CHECKING:
    from megatron_rl.config.sections import Config


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """Read where ``loss.kl_coefficient`` is not 0; ``kl_in``: what that coefficient times the KL is added to.

    ``placement``: ``host``, a copy of the weights in host memory that is swapped in for the reference's passes, or ``device``, a second
    model. ``refresh_every``: rollouts after which the reference becomes the current policy; null: never. ``controller``: the coefficient
    stays, or is moved so that the KL comes to ``kl_target`` nats per token, the faster the fewer samples ``kl_horizon`` is
    (loss/kl_controller.py).
    """

    kl_in: str = "loss"
    placement: str = "host"
    refresh_every: int | None = None
    controller: str = "fixed"
    kl_target: float = 0.1
    kl_horizon: int = 10_000

    def __post_init__(self) -> None:
        choose("reference.kl_in", self.kl_in, ("loss", "reward"))
        choose("reference.placement", self.placement, ("host", "device"))
        choose("reference.controller", self.controller, ("fixed", "adaptive"))
        at_least("reference.refresh_every", self.refresh_every, 1)
        at_least("reference.kl_target", self.kl_target, 0.0, exclusive=True)
        at_least("reference.kl_horizon", self.kl_horizon, 1)


def check_reference(config: Config) -> None:
    """Raises ConfigError for what of ``reference`` does not go with ``loss``, ``advantage`` and the size of a rollout."""
    given, loss = config.reference, config.loss
    if given.kl_in == "reward" and loss.kl_estimator == "unbiased":
        raise ConfigError(
            "reference.kl_in=reward with loss.kl_estimator=unbiased: its ratio π_θ/π_old is there for the gradient it carries, and a "
            "reward carries none; take loss.kl_estimator=k3, or reference.kl_in=loss"
        )
    if given.kl_in == "reward" and config.advantage.estimator == "gdpo":
        raise ConfigError(
            "reference.kl_in=reward with advantage.estimator=gdpo: it standardises every reward function by itself, and the KL is none of "
            "them; take another advantage.estimator, or reference.kl_in=loss"
        )
    if loss.kl_coefficient == 0 and given.controller == "adaptive":
        raise ConfigError(
            "reference.controller=adaptive moves the KL's coefficient by factors, and loss.kl_coefficient=0 would stay 0; start above it "
            "(0.1, say), or set reference.controller=fixed"
        )
    if loss.kl_coefficient == 0 and given.refresh_every is not None:
        raise ConfigError(
            f"reference.refresh_every={given.refresh_every} renews a reference policy that loss.kl_coefficient=0 never asks; set that "
            "above 0, or reference.refresh_every=null"
        )
    samples = config.train.prompts_per_step * config.rollout.samples_per_prompt
    if given.controller == "adaptive" and samples >= 5 * given.kl_horizon:
        raise ConfigError(
            f"reference.kl_horizon={given.kl_horizon} is too short for rollouts of train.prompts_per_step={config.train.prompts_per_step} "
            f"times rollout.samples_per_prompt={config.rollout.samples_per_prompt} = {samples} samples: one of them could take the KL's "
            f"coefficient to 0; give more than {samples // 5}"
        )
