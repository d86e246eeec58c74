"""The sections of the two phases of training: ``sft`` (supervised steps) and ``train`` (RL's rollouts)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.checks import Range, choose
from megatron_rl.config.optimizer import OptimizerConfig
from megatron_rl.errors import ConfigError, quoted


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Takes supervised steps on the data's own responses before RL. RL then starts with a new optimizer state.

    A sample is one row of data: a solution or conversation to imitate, or under `preference.loss` a
    pair of responses. Held-out rows are evaluated before the first supervised step, every
    `sft.eval_every_steps` steps and after the last.
    """

    steps: Annotated[int, Range(0)] = 0
    """Number of supervised optimizer steps; 0: none."""
    epochs: Annotated[int, Range(1)] | None = None
    """With `sft.steps=0`: times that every row is trained; null: `sft.steps` sets the number of steps."""
    samples_per_step: Annotated[int, Range(1, 10**6)] = 64
    """Number of rows of each supervised step."""
    lr: Annotated[float, Range(0, 10)] = 1e-3
    """Learning rate of the supervised steps, after their warm-up."""
    min_lr: Annotated[float, Range(0, 10)] = 0.0
    """Learning rate at the end of the supervised steps, under `cosine` and `linear`."""
    schedule: str = "constant"
    """Learning rate after the warm-up: `constant`; `cosine` or `linear`: decays over `sft.steps`."""
    warmup_steps: Annotated[int, Range(0)] = 0
    """Number of supervised steps of linear warm-up; the first step's rate is above 0."""
    weight_decay: Annotated[float, Range(0, 10)] = 0.0
    """AdamW's weight decay in the supervised steps; RL steps have `optimizer.weight_decay`."""
    eval_path: str | None = None
    """File of held-out solutions, with the columns of `data.train`; null: none."""
    eval_share: Annotated[float, Range(0, 1, open_high=True)] = 0.0
    """Share of the rows of `data.train` that are held out: evaluated and never trained; 0: none."""
    eval_every_steps: Annotated[int, Range(1)] | None = None
    """Number of supervised steps between evaluations; null: none between the first and the last."""
    save_every_steps: Annotated[int, Range(0)] = 0
    """Number of supervised steps between checkpoints; 0: none during the supervised steps, except on a signal."""

    def __post_init__(self) -> None:
        choose("sft.schedule", self.schedule, ("constant", "cosine", "linear"))
        if self.eval_path is not None and self.eval_share:
            raise ConfigError(
                f"sft.eval_path={quoted(self.eval_path, 300)} and sft.eval_share={self.eval_share:g} both name the "
                "held-out solutions; give one of them"
            )
        if self.eval_every_steps and not self.has_evaluation:
            raise ConfigError(
                f"sft.eval_every_steps={self.eval_every_steps} and nothing is held out; name a file by sft.eval_path, "
                "a share of data.train by sft.eval_share, or set sft.eval_every_steps=null"
            )
        if self.steps and self.epochs:
            raise ConfigError(
                f"sft.steps={self.steps} and sft.epochs={self.epochs} both set the number of steps; "
                "set sft.steps=0, or sft.epochs=null"
            )
        if 0 < self.steps <= self.warmup_steps:
            raise ConfigError(
                f"sft.warmup_steps={self.warmup_steps} must be below sft.steps={self.steps}: the rate would never "
                "reach sft.lr"
            )

    @property
    def is_on(self) -> bool:
        """Return whether there are supervised steps."""
        return self.steps > 0 or self.epochs is not None

    def settled(self, num_rows: int) -> SftConfig:
        """Return a copy of the section in which ``epochs`` is replaced by the number of ``steps`` that it stands for.

        num_rows: the number of rows that are trained.
        """
        if self.epochs is None:
            return self
        return dataclasses.replace(self, steps=-(-self.epochs * num_rows // self.samples_per_step), epochs=None)

    @property
    def has_evaluation(self) -> bool:
        """Return whether rows are held out for evaluation."""
        return self.eval_path is not None or self.eval_share > 0

    def optimizer(self, of_rl: OptimizerConfig) -> OptimizerConfig:
        """Return the OptimizerConfig of the supervised steps: RL's, with this section's rates, schedule and decay.

        of_rl: the section ``optimizer``.
        """
        own = {name: vars(self)[name] for name in ("lr", "min_lr", "schedule", "warmup_steps", "weight_decay")}
        return dataclasses.replace(of_rl, **own, decay_steps=None)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Sets the number and size of RL's rollouts, and of the optimizer steps of each.

    Either `train.num_rollouts` or `train.epochs` sets the end of the run. The other is null.
    """

    num_rollouts: Annotated[int, Range(0)] | None = 100
    """Number of rollouts of the run; null: `train.epochs` sets their number."""
    epochs: Annotated[int, Range(1)] | None = None
    """With `train.num_rollouts=null`: times that every prompt is trained."""
    prompts_per_rollout: Annotated[int, Range(1, 10**6)] = 64
    """Number of prompts of each rollout."""
    samples_per_mini_batch: Annotated[int, Range(1)] | None = None
    """Number of samples per optimizer step; null: the whole rollout."""
    epochs_per_rollout: Annotated[int, Range(1, 1000)] = 1
    """Number of times that each rollout is trained."""
    export_every_rollouts: Annotated[int, Range(1)] | None = None
    """Number of rollouts between exports to Hugging Face's format in `checkpoints/`; null: none before the last."""
    export_last: bool = True
    """Whether the policy is exported after the last rollout."""

    def __post_init__(self) -> None:
        if (self.num_rollouts is None) == (self.epochs is None):
            raise ConfigError(
                f"train.num_rollouts={self.num_rollouts} and train.epochs={self.epochs} both set when the run ends; "
                "set one of them to null"
            )
