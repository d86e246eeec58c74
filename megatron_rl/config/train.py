"""The sections of the two phases of training: supervised steps (`sft`) and RL's rollouts (`train`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.ranges import Range
from megatron_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Takes supervised steps on `data.solution_key` before RL; the optimizer starts anew after them."""

    steps: Annotated[int, Range(0)] = 0
    """Supervised optimizer steps; 0: none."""
    samples_per_step: Annotated[int, Range(1, 10**6)] = 64
    """Samples of each supervised step."""
    lr: Annotated[float, Range(0, 10)] = 1e-3
    """Learning rate of the supervised steps."""
    weight_decay: Annotated[float, Range(0, 10)] = 0.0
    """AdamW's weight decay in the supervised steps."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Sets the number and size of RL's rollouts, and of the optimizer steps that each is divided into.

    One of `train.num_rollouts` and `train.epochs` says when the run ends; the other is null.
    """

    num_rollouts: Annotated[int, Range(0)] | None = 100
    """Rollouts of the run; null: as many as `train.epochs` asks for."""
    epochs: Annotated[int, Range(1)] | None = None
    """With `train.num_rollouts=null`: as many rollouts as it takes to train every prompt so often."""
    prompts_per_rollout: Annotated[int, Range(1, 10**6)] = 64
    """Prompts of each rollout."""
    samples_per_mini_batch: Annotated[int, Range(1)] | None = None
    """Samples per optimizer step; null: the whole rollout."""
    epochs_per_rollout: Annotated[int, Range(1, 1000)] = 1
    """Number of times that each rollout is trained."""
    export_every_rollouts: Annotated[int, Range(1)] | None = None
    """Rollouts between exports as a Hugging Face directory under `checkpoints/`; null: none before the last."""
    export_last: bool = True
    """Whether the policy is exported after the last rollout."""

    def __post_init__(self) -> None:
        if (self.num_rollouts is None) == (self.epochs is None):
            raise ConfigError(
                f"train.num_rollouts={self.num_rollouts} and train.epochs={self.epochs}: one of the two says when the "
                "run ends; set the other to null"
            )
