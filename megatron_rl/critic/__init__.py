"""Models with a value head: PPO's critic (critic.py) and a reward model (reward_model.py).

Under ``critic.placement=separate`` the critic runs on ranks of its own. client.py is the policy's
side of the link to them (link.py), and server.py the critic's side.
"""

from __future__ import annotations

from megatron_rl.critic.client import RemoteCritic
from megatron_rl.critic.critic import Critic
from megatron_rl.critic.reward_model import RewardModel

__all__ = ["Critic", "RemoteCritic", "RewardModel"]
