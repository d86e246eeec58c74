"""Models with a value head: PPO's critic (critic.py), linked to ranks of its own by client.py and server.py
(``critic.placement``), and a reward model (reward_model.py).
"""

from __future__ import annotations

from megatron_rl.config import Config
from megatron_rl.critic.client import RemoteCritic
from megatron_rl.critic.critic import Critic
from megatron_rl.critic.link import PolicyCriticLink
from megatron_rl.critic.reward_model import RewardModel

__all__ = ["Critic", "RemoteCritic", "RewardModel", "build_critic"]


def build_critic(config: Config, total_steps: int, link: PolicyCriticLink | None) -> Critic | RemoteCritic | None:
    """Build the run's critic, after its policy; None for an estimator without one.

    total_steps: the number of its optimizer steps in the whole run.
    link: the link to a separate critic's ranks; None where the policy's ranks hold the critic.
    """
    if not config.has_critic:
        return None
    return Critic(config, total_steps=total_steps) if link is None else RemoteCritic(link, total_steps=total_steps)
