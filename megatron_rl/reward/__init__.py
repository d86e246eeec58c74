"""Rewards: functions of completions and dataset columns, called here or in workers, and the policy on failures."""

from megatron_rl.reward.function import required_columns
from megatron_rl.reward.reward import Reward, RewardFailure

__all__ = ["Reward", "RewardFailure", "required_columns"]
