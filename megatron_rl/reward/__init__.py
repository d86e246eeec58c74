"""Rewards: functions of completions and dataset columns, called in this process or in worker processes."""

from megatron_rl.reward.reward import Reward, RewardFailure, opened_reward

__all__ = ["Reward", "RewardFailure", "opened_reward"]
