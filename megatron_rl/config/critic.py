"""The section of PPO's critic, and the configuration that its own model is built from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_rl.config.checks import choose
from megatron_rl.config.ranges import Range, hints_of
from megatron_rl.config.typed import typed_value
from megatron_rl.errors import ConfigError, quoted

OWN_SECTIONS = ("parallel", "optimizer")


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Describes the critic of `advantage.estimator=gae`: a model of its own with a value head (docs/ppo.md).

    Its other settings are the policy's. A `score.weight` [1, H] among its weights becomes the value head.
    """

    hf_path: str | None = None
    """Directory of the critic's weights, with a reward model's `score.weight` or without; null: `model.hf_path`."""
    init: str = "pretrained"
    """`pretrained`: the weights of `critic.hf_path`; `policy`: the policy's at RL's start, after supervised steps."""
    parallel: dict[str, Any] = field(default_factory=dict)
    """Fields of `parallel` that differ from the policy's, as in `critic.parallel.tensor=1`."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Fields of `optimizer` that differ from the policy's."""
    lr: Annotated[float, Range(0, 10)] = 1e-5
    """Learning rate of the critic."""
    placement: str = "shared"
    """`shared`: on the policy's ranks; `separate`: on the job's last `critic.ranks` ranks, which hold no policy."""
    ranks: Annotated[int, Range(1, 10**5)] | None = None
    """Number of ranks of a separate critic; null: it is shared."""
    value_clip: Annotated[float, Range(0, 10**6, open_low=True)] | None = 0.2
    """Distance that a value may move in a rollout; null: any."""
    warmup_rollouts: Annotated[int, Range(0)] = 0
    """First rollouts, which train the critic alone."""
    epochs_per_rollout: Annotated[int, Range(1, 1000)] = 1
    """Number of times that the critic is trained on each rollout."""
    samples_per_mini_batch: Annotated[int, Range(1)] | None = None
    """Samples per optimizer step of the critic; null: as `train.samples_per_mini_batch`."""

    def __post_init__(self) -> None:
        choose("critic.init", self.init, ("pretrained", "policy"))
        choose("critic.placement", self.placement, ("shared", "separate"))
        if (self.placement == "separate") != (self.ranks is not None):
            raise ConfigError(
                f"critic.placement={self.placement} and critic.ranks={self.ranks}: a separate critic says on how many "
                "ranks it runs, and a shared one runs on the policy's; set critic.ranks with separate, or leave it "
                "null"
            )
        if self.placement == "separate" and self.init == "policy":
            raise ConfigError(
                "critic.init=policy copies the policy's weights on ranks that hold both, and "
                "critic.placement=separate has none; give critic.hf_path"
            )
        if self.init == "policy" and self.hf_path is not None:
            raise ConfigError(
                f"critic.init=policy takes the policy's weights, and critic.hf_path={quoted(self.hf_path, 300)} names "
                "others; set one"
            )


def policy_ranks(config, num_ranks: int) -> int:
    """Count the ranks of a job that hold its policy. Raises ConfigError where a separate critic leaves none."""
    of_critic = (config.critic.ranks or 0) if config.has_critic else 0
    if of_critic >= num_ranks:
        raise ConfigError(
            f"critic.ranks={of_critic} of {num_ranks} ranks leave the policy none; start more, or lower it"
        )
    return num_ranks - of_critic


def critic_config(config):
    """Return the Config that the critic's model is built from.

    Raises ConfigError for a field that a section does not have.
    """
    critic = config.critic
    sections = {name: _changed(config, name, dataclasses.asdict(critic)[name]) for name in OWN_SECTIONS}
    sections["optimizer"] = dataclasses.replace(sections["optimizer"], lr=critic.lr)
    samples_per_mini_batch = critic.samples_per_mini_batch or config.train.samples_per_mini_batch
    own_weights = {"hf_path": critic.hf_path, "init": "pretrained"} if critic.hf_path is not None else {}
    return dataclasses.replace(
        config,
        **sections,
        model=dataclasses.replace(config.model, **own_weights),
        train=dataclasses.replace(config.train, samples_per_mini_batch=samples_per_mini_batch),
        skip=dataclasses.replace(config.skip, steps="match", ghost="dense"),
        rollout=dataclasses.replace(config.rollout, bitwise=False),  # nobody samples from a critic
    )


def _changed(config, section: str, fields: dict[str, Any]):
    before = {"parallel": config.parallel, "optimizer": config.optimizer}[section]
    known = [field.name for field in dataclasses.fields(before)]
    for name, value in fields.items():
        if (section, name) == ("optimizer", "lr"):
            raise ConfigError(
                f"critic.optimizer.lr={quoted(value)} is set by critic.lr={config.critic.lr}; set that alone"
            )
        if name not in known:
            raise ConfigError(f"critic.{section}.{name}={quoted(value)} is not known; {section} has {', '.join(known)}")
    hints = hints_of(type(before))
    changed = {name: typed_value(f"critic.{section}.{name}", value, hints[name]) for name, value in fields.items()}
    return dataclasses.replace(before, **changed)
