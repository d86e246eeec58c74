"""Models with a value head: PPO's critic (critic.py), linked to ranks of its own by client.py and server.py
(``critic.placement``), and a reward model (reward_model.py).
"""

from __future__ import annotations

from megatron_rl.critic.client import RemoteCritic
from megatron_rl.critic.critic import Critic
from megatron_rl.critic.reward_model import RewardModel

__all__ = ["Critic", "RemoteCritic", "RewardModel"]
