"""Rewards: functions of completions and dataset columns, and the policy for those that fail."""

from megatron_rl.reward.function import Reward, RewardFailure

__all__ = ["Reward", "RewardFailure"]
