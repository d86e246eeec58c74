"""Rewards: functions of completions and dataset columns, in this process or in workers, and the policy for those that
fail."""

from megatron_rl.reward.reward import Reward, RewardFailure

__all__ = ["Reward", "RewardFailure"]
