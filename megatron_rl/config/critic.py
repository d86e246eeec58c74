"""The section of PPO's critic, and the configuration that its own model is built from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.checks import at_least, choose
from megatron_rl.errors import ConfigError

OWN_SECTIONS = ("parallel", "optimizer")


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic of ``advantage.estimator=gae``: a model of its own with a value head. What is not said here is as the
    policy's.

    ``hf_path``: its weights (null: ``model.hf_path``), of a model with or without a ``score.weight`` [1, H]. ``init``:
    those weights, or the ``policy``'s at RL's start. ``parallel``, ``optimizer``: fields that differ from the policy's
    sections. ``lr``: its learning rate.
    ``placement``: on the policy's ranks (``shared``), or on the job's last ``ranks`` ranks, which then have no policy
        (``separate``).
    ``value_clip``: how far a value may move in a rollout (null: any way). ``warmup_rollouts``: first rollouts that
        train the critic alone.
    """

    hf_path: str | None = None
    init: str = "pretrained"
    parallel: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    lr: float = 1e-5
    placement: str = "shared"
    ranks: int | None = None
    value_clip: float | None = 0.2
    warmup_rollouts: int = 0
    epochs_per_rollout: int = 1
    samples_per_mini_batch: int | None = None

    def __post_init__(self) -> None:
        choose("critic.init", self.init, ("pretrained", "policy"))
        choose("critic.placement", self.placement, ("shared", "separate"))
        at_least("critic.ranks", self.ranks, 1)
        at_least("critic.lr", self.lr, 0.0)
        at_least("critic.value_clip", self.value_clip, 0.0, exclusive=True)
        at_least("critic.warmup_rollouts", self.warmup_rollouts, 0)
        at_least("critic.epochs_per_rollout", self.epochs_per_rollout, 1)
        at_least("critic.samples_per_mini_batch", self.samples_per_mini_batch, 1)
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
                f"critic.init=policy takes the policy's weights, and critic.hf_path={self.hf_path!r} names others; "
                "set one"
            )


def critic_config(config):
    """The Config that the critic's model is built from; ConfigError for a field that a section does not have."""
    given = config.critic
    sections = {name: _changed(config, name, dataclasses.asdict(given)[name]) for name in OWN_SECTIONS}
    sections["optimizer"] = dataclasses.replace(sections["optimizer"], lr=given.lr)
    size = given.samples_per_mini_batch or config.train.samples_per_mini_batch
    named = {"hf_path": given.hf_path, "init": "pretrained"} if given.hf_path is not None else {}
    return dataclasses.replace(
        config,
        **sections,
        model=dataclasses.replace(config.model, **named),
        train=dataclasses.replace(config.train, samples_per_mini_batch=size),
        skip=dataclasses.replace(config.skip, steps="match", ghost="dense"),
    )


def _changed(config, section: str, fields: dict[str, Any]):
    before = {"parallel": config.parallel, "optimizer": config.optimizer}[section]
    known = [field.name for field in dataclasses.fields(before)]
    for name, value in fields.items():
        if (section, name) == ("optimizer", "lr"):
            raise ConfigError(f"critic.optimizer.lr={value!r} is set by critic.lr={config.critic.lr}; set that alone")
        if name not in known:
            raise ConfigError(f"critic.{section}.{name}={value!r} is not known; {section} has {', '.join(known)}")
    return dataclasses.replace(
        before, **{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    )
