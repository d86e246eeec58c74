"""The section ``critic``, on the value model of PPO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_rl.config.checks import Range, choose
from megatron_rl.errors import ConfigError, quoted


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Describes the critic of `advantage.estimator=gae`: a model of its own with a value head (docs/ppo.md).

    Every setting that this section lacks is the policy's. If the critic's weights hold a
    `score.weight` [1, hidden size], as a reward model's do, it becomes the value head.
    """

    hf_path: str | None = None
    """Directory of the critic's first weights, such as a reward model's; null: `model.hf_path`."""
    init: str = "pretrained"
    """`pretrained`: the weights of `critic.hf_path`; `policy`: the policy's weights after the supervised steps."""
    parallel: dict[str, Any] = field(default_factory=dict)
    """Fields of `parallel` that differ for the critic, as in `critic.parallel.tensor=1`."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Fields of `optimizer` that differ for the critic; its learning rate is `critic.lr`."""
    lr: Annotated[float, Range(0, 10)] = 1e-5
    """Learning rate of the critic."""
    placement: str = "shared"
    """`shared`: on the policy's ranks; `separate`: on the job's last `critic.ranks` ranks, which hold no policy."""
    ranks: Annotated[int, Range(1, 10**5)] | None = None
    """Number of ranks that hold a separate critic; null with `critic.placement=shared`."""
    value_clip: Annotated[float, Range(0, 10**6, open_low=True)] | None = 0.2
    """Clip of the value loss: how far a value may move from its value at the rollout's start; null: no clip."""
    warmup_rollouts: Annotated[int, Range(0)] = 0
    """Number of rollouts, at the run's start, that train the critic and not the policy."""
    epochs_per_rollout: Annotated[int, Range(1, 1000)] = 1
    """Number of times that the critic is trained on each rollout."""
    samples_per_mini_batch: Annotated[int, Range(1)] | None = None
    """Number of samples per optimizer step of the critic; null: as `train.samples_per_mini_batch`."""

    def __post_init__(self) -> None:
        choose("critic.init", self.init, ("pretrained", "policy"))
        choose("critic.placement", self.placement, ("shared", "separate"))
        if (self.placement == "separate") != (self.ranks is not None):
            raise ConfigError(
                f"critic.placement={self.placement} and critic.ranks={'null' if self.ranks is None else self.ranks} "
                "exclude each other: placement=separate needs critic.ranks, and placement=shared needs "
                "critic.ranks=null"
            )
        if self.placement == "separate" and self.init == "policy":
            raise ConfigError(
                "critic.init=policy copies the policy's weights on ranks that hold both models, and "
                "critic.placement=separate has no such ranks; set critic.init=pretrained and critic.hf_path"
            )
        if self.init == "policy" and self.hf_path is not None:
            raise ConfigError(
                f"critic.init=policy takes the policy's weights, and critic.hf_path={quoted(self.hf_path, 300)} names "
                "others; set one"
            )
