"""The number of optimizer steps of a rollout and of a run, for policy and critic. Pure arithmetic."""

from __future__ import annotations

from megatron_rl.config import CriticConfig, RolloutConfig, SkipConfig, TrainConfig
from megatron_rl.errors import ConfigError


def steps_per_rollout(train: TrainConfig, rollout: RolloutConfig, skip: SkipConfig) -> int:
    """Return the number of optimizer steps of a whole rollout, ghosts included."""
    samples = train.prompts_per_rollout * rollout.samples_per_prompt
    per_epoch = (
        1 if skip.steps == "merge" and skip.mode != "off" else -(-samples // (train.samples_per_mini_batch or samples))
    )
    return train.epochs_per_rollout * per_epoch


def critic_steps_per_rollout(train: TrainConfig, rollout: RolloutConfig, critic: CriticConfig) -> int:
    """Return the number of the critic's optimizer steps in a whole rollout; ``skip.steps=merge`` does not apply."""
    samples = train.prompts_per_rollout * rollout.samples_per_prompt
    per_step = critic.samples_per_mini_batch or train.samples_per_mini_batch or samples
    return critic.epochs_per_rollout * -(-samples // per_step)


def total_rl_steps(train: TrainConfig, rollout: RolloutConfig, skip: SkipConfig, num_prompts: int) -> int:
    """Return the number of optimizer steps of the RL phase, ghosts included.

    With ``train.epochs`` the number is a lower bound: prompts that are asked again add steps.
    """
    rollouts = (
        train.num_rollouts if train.epochs is None else -(-train.epochs * num_prompts // train.prompts_per_rollout)
    )
    return rollouts * steps_per_rollout(train, rollout, skip)


def moving_rl_steps(
    train: TrainConfig, rollout: RolloutConfig, skip: SkipConfig, critic: CriticConfig | None, num_prompts: int
) -> int:
    """Return the number of RL's optimizer steps that may move the policy; its learning-rate schedule spans them.

    critic: None in a run without a critic.

    Raises ConfigError if the critic's warm-up leaves no such step.
    """
    if critic is None:
        return total_rl_steps(train, rollout, skip, num_prompts)
    per_rollout, total = steps_per_rollout(train, rollout, skip), total_rl_steps(train, rollout, skip, num_prompts)
    held_steps = critic.warmup_rollouts * per_rollout
    if held_steps >= total > 0:
        raise ConfigError(
            f"critic.warmup_rollouts={critic.warmup_rollouts} rollouts train the critic alone, and the run has "
            f"{total // per_rollout}: the policy would never move; lower critic.warmup_rollouts, or train longer"
        )
    return total - held_steps
