"""Rewards: functions of completions and dataset columns, called here or in workers, and the policy on failures."""

from megatron_rl.reward.reward import Reward, RewardFailure, opened_reward

__all__ = ["Reward", "RewardFailure", "opened_reward"]
