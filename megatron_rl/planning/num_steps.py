"""The number of optimizer steps per rollout and per run, for policy and critic. Pure arithmetic."""

from __future__ import annotations

from megatron_rl.config import CriticConfig, RolloutConfig, SkipConfig, TrainConfig
from megatron_rl.errors import ConfigError


def steps_per_rollout(train: TrainConfig, rollout: RolloutConfig, skip: SkipConfig) -> int:
    """Return the policy's number of optimizer steps in a rollout that has all its samples.

    Ghost steps, which step the optimizer on a zero gradient, are included.
    """
    samples = train.prompts_per_rollout * rollout.samples_per_prompt
    per_epoch = (
        1 if skip.steps == "merge" and skip.mode != "off" else -(-samples // (train.samples_per_mini_batch or samples))
    )
    return train.epochs_per_rollout * per_epoch


def critic_steps_per_rollout(train: TrainConfig, rollout: RolloutConfig, critic: CriticConfig) -> int:
    """Return the critic's number of optimizer steps in a rollout that has all its samples.

    ``skip.steps=merge``, which merges the policy's steps, does not change this number.
    """
    samples = train.prompts_per_rollout * rollout.samples_per_prompt
    per_step = critic.samples_per_mini_batch or train.samples_per_mini_batch or samples
    return critic.epochs_per_rollout * -(-samples // per_step)


def total_rl_steps(train: TrainConfig, rollout: RolloutConfig, skip: SkipConfig, num_prompts: int) -> int:
    """Return the policy's number of optimizer steps in all rollouts, ghost steps on a zero gradient included.

    If ``train.epochs`` is set, the number is a lower bound, since a prompt that is asked again in an
    epoch adds steps.

    num_prompts: the number of prompts of the training data.
    """
    rollouts = (
        train.num_rollouts if train.epochs is None else -(-train.epochs * num_prompts // train.prompts_per_rollout)
    )
    return rollouts * steps_per_rollout(train, rollout, skip)


def moving_rl_steps(
    train: TrainConfig, rollout: RolloutConfig, skip: SkipConfig, critic: CriticConfig | None, num_prompts: int
) -> int:
    """Return the number of optimizer steps in RL that may change the policy.

    The steps of rollouts that train the critic alone (``critic.warmup_rollouts``) do not count. The
    policy's learning-rate schedule runs over the steps that count.

    critic: None in a run without a critic.

    Raises ConfigError if the critic's warm-up leaves no step.
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
