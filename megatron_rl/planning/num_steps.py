"""The number of optimizer steps of a rollout and of a run, for policy and critic. Arithmetic alone."""

from __future__ import annotations

from megatron_rl.config import Config
from megatron_rl.errors import ConfigError


def steps_per_rollout(config: Config) -> int:
    """Return the optimizer steps of a whole rollout, ghosts included."""
    samples = config.train.prompts_per_rollout * config.rollout.samples_per_prompt
    per_epoch = (
        1
        if config.skip.steps == "merge" and config.skip.mode != "off"
        else -(-samples // (config.train.samples_per_mini_batch or samples))
    )
    return config.train.epochs_per_rollout * per_epoch


def critic_steps_per_rollout(config: Config) -> int:
    """Return the steps of the critic's optimizer in a whole rollout; it merges nothing."""
    samples = config.train.prompts_per_rollout * config.rollout.samples_per_prompt
    per_step = config.critic.samples_per_mini_batch or config.train.samples_per_mini_batch or samples
    return config.critic.epochs_per_rollout * -(-samples // per_step)


def total_rl_steps(config: Config, num_prompts: int) -> int:
    """Return the optimizer steps of the RL phase, ghosts included.

    With ``train.epochs`` it is a lower bound: prompts that are asked again add some.
    """
    train = config.train
    rollouts = (
        train.num_rollouts if train.epochs is None else -(-train.epochs * num_prompts // train.prompts_per_rollout)
    )
    return rollouts * steps_per_rollout(config)


def moving_rl_steps(config: Config, num_prompts: int) -> int:
    """Return the optimizer steps of RL that may move the policy; its learning-rate schedule ends with them.

    Raises ConfigError where the critic's warm-up leaves none.
    """
    held_steps = config.critic.warmup_rollouts * steps_per_rollout(config) if config.has_critic else 0
    total = total_rl_steps(config, num_prompts)
    if held_steps >= total > 0:
        raise ConfigError(
            f"critic.warmup_rollouts={config.critic.warmup_rollouts} rollouts train the critic alone, and the run has "
            f"{total // steps_per_rollout(config)}: the policy would never move; lower it, or train longer"
        )
    return total - held_steps
