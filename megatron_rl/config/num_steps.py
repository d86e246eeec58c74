"""How many optimizer steps a configuration takes: of a rollout, of a run, of policy and critic. Arithmetic alone."""

from __future__ import annotations

from megatron_rl.config import Config
from megatron_rl.errors import ConfigError


def steps_per_rollout(config: Config) -> int:
    """Optimizer steps of a whole rollout, ghosts included."""
    samples = config.train.prompts_per_rollout * config.rollout.samples_per_prompt
    per_epoch = (
        1
        if config.skip.steps == "merge" and config.skip.mode != "off"
        else -(-samples // (config.train.samples_per_mini_batch or samples))
    )
    return config.train.epochs_per_rollout * per_epoch


def critic_steps_per_rollout(config: Config) -> int:
    """Of the critic's optimizer, which merges nothing."""
    samples = config.train.prompts_per_rollout * config.rollout.samples_per_prompt
    size = config.critic.samples_per_mini_batch or config.train.samples_per_mini_batch or samples
    return config.critic.epochs_per_rollout * -(-samples // size)


def total_rl_steps(config: Config, num_prompts: int) -> int:
    """Optimizer steps of the RL phase, ghosts included; at least, where it ends with the data: prompts that are asked
    again add some."""
    given = config.train
    rollouts = (
        given.num_rollouts if given.epochs is None else -(-given.epochs * num_prompts // given.prompts_per_rollout)
    )
    return rollouts * steps_per_rollout(config)


def moving_rl_steps(config: Config, num_prompts: int) -> int:
    """Those of them that may move the policy, where its schedule ends. Raises ConfigError where the critic's warm-up
    leaves none."""
    held = config.critic.warmup_rollouts * steps_per_rollout(config) if config.has_critic else 0
    total = total_rl_steps(config, num_prompts)
    if held >= total > 0:
        raise ConfigError(
            f"critic.warmup_rollouts={config.critic.warmup_rollouts} rollouts train the critic alone, and the run has "
            f"{total // steps_per_rollout(config)}: the policy would never move; lower it, or train longer"
        )
    return total - held
