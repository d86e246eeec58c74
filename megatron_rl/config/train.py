"""The sections of the two phases of training: supervised steps (`sft`) and RL's rollouts (`train`)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.checks import at_least
from megatron_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Takes supervised steps on `data.solution_key` before RL; the optimizer starts anew after them."""

    steps: int = 0
    """Supervised optimizer steps; 0: none."""
    samples_per_step: int = 64
    """Samples of each supervised step."""
    lr: float = 1e-3
    """Learning rate of the supervised steps."""
    weight_decay: float = 0.0
    """AdamW's weight decay in the supervised steps."""

    def __post_init__(self) -> None:
        at_least("sft.steps", self.steps, 0)
        at_least("sft.samples_per_step", self.samples_per_step, 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Sets the number and size of RL's rollouts, and of the optimizer steps that each is divided into.

    One of `train.num_rollouts` and `train.epochs` says when the run ends; the other is null.
    """

    num_rollouts: int | None = 100
    """Rollouts of the run; null: as many as `train.epochs` asks for."""
    epochs: int | None = None
    """With `train.num_rollouts=null`: as many rollouts as it takes to train every prompt so often."""
    prompts_per_rollout: int = 64
    """Prompts of each rollout."""
    samples_per_mini_batch: int | None = None
    """Samples per optimizer step; null: the whole rollout."""
    epochs_per_rollout: int = 1
    """Number of times that each rollout is trained."""
    export_every_rollouts: int | None = None
    """Rollouts between exports as a Hugging Face directory under `checkpoints/`; null: none before the last."""
    export_last: bool = True
    """Whether the policy is exported after the last rollout."""

    def __post_init__(self) -> None:
        at_least("train.num_rollouts", self.num_rollouts, 0)
        at_least("train.epochs", self.epochs, 1)
        if (self.num_rollouts is None) == (self.epochs is None):
            raise ConfigError(
                f"train.num_rollouts={self.num_rollouts} and train.epochs={self.epochs}: one of the two says when the "
                "run ends; set the other to null"
            )
        at_least("train.prompts_per_rollout", self.prompts_per_rollout, 1)
        at_least("train.samples_per_mini_batch", self.samples_per_mini_batch, 1)
        at_least("train.epochs_per_rollout", self.epochs_per_rollout, 1)
        at_least("train.export_every_rollouts", self.export_every_rollouts, 1)
