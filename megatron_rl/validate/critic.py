"""Functions that derive the critic's and the teacher's Config from the run's Config, and count the policy's ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_rl.config import Config, OptimizerConfig, ParallelConfig
from megatron_rl.config.checks import hints_of
from megatron_rl.config.typed import typed_value
from megatron_rl.errors import ConfigError, quoted

OWN_SECTIONS = ("parallel", "optimizer")


def policy_ranks(of_critic: int, num_ranks: int) -> int:
    """Return the number of ranks that hold the policy. Raises ConfigError if a separate critic leaves none.

    of_critic: the number of ranks that hold the critic alone (``Config.separate_critic_ranks``).
    num_ranks: the number of ranks of the job.
    """
    if of_critic >= num_ranks:
        raise ConfigError(
            f"critic.ranks={of_critic} leaves the policy none of the {num_ranks} ranks; start more ranks, or lower "
            "critic.ranks"
        )
    return num_ranks - of_critic


def critic_config(config: Config) -> Config:
    """Return the Config from which the critic's model is built: the run's, with the settings of section ``critic``.

    Raises ConfigError if ``critic.parallel`` has a field that section ``parallel`` lacks, or
    ``critic.optimizer`` one that ``optimizer`` lacks.
    """
    critic = config.critic
    # A critic has no LM head, so its stages balance by another layout than the policy's.
    fields = {"parallel": {"pipeline_layout": [], **critic.parallel}, "optimizer": critic.optimizer}
    before = {"parallel": config.parallel, "optimizer": config.optimizer}
    sections = {name: _changed(before[name], name, fields[name], critic.lr) for name in OWN_SECTIONS}
    sections["optimizer"] = dataclasses.replace(sections["optimizer"], lr=critic.lr)
    samples_per_mini_batch = critic.samples_per_mini_batch or config.train.samples_per_mini_batch
    own_weights = {"hf_path": critic.hf_path, "init": "pretrained"} if critic.hf_path is not None else {}
    return dataclasses.replace(
        config,
        **sections,
        model=dataclasses.replace(config.model, **own_weights),
        train=dataclasses.replace(config.train, samples_per_mini_batch=samples_per_mini_batch),
        skip=dataclasses.replace(config.skip, steps="match", ghost="dense"),
        rollout=dataclasses.replace(config.rollout, bitwise=False),  # a critic generates no samples
    )


def teacher_config(config: Config) -> Config:
    """Return the Config from which the teacher's model is built: the run's, with the teacher's weights.

    A ``parallel.pipeline_layout`` of the policy is left out, so the teacher's pipeline stages are
    balanced by cost.
    """
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, hf_path=config.teacher.hf_path),
        parallel=dataclasses.replace(config.parallel, pipeline_layout=()),
    )


def _changed(before: ParallelConfig | OptimizerConfig, section: str, fields: dict[str, Any], lr: float):
    known = [field.name for field in dataclasses.fields(before)]
    for name, value in fields.items():
        if (section, name) == ("optimizer", "lr"):
            raise ConfigError(f"critic.optimizer.lr={quoted(value)} is set by critic.lr={lr}; set that alone")
        if name not in known:
            raise ConfigError(f"critic.{section}.{name}={quoted(value)} is not known; {section} has {', '.join(known)}")
    hints = hints_of(type(before))
    changed = {name: typed_value(f"critic.{section}.{name}", value, hints[name]) for name, value in fields.items()}
    return dataclasses.replace(before, **changed)
