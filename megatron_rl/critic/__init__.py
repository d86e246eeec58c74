"""PPO's critic: critic/critic.py on the ranks that hold it, critic/client.py and critic/server.py where those are not
the policy's (``critic.placement``)."""

from __future__ import annotations

from megatron_rl.config import Config
from megatron_rl.critic.client import RemoteCritic
from megatron_rl.critic.critic import Critic
from megatron_rl.critic.link import PolicyCriticLink

__all__ = ["Critic", "RemoteCritic", "build_critic"]


def build_critic(config: Config, total_steps: int, bridge: PolicyCriticLink | None) -> Critic | RemoteCritic | None:
    """The run's, after its policy was built; None for an estimator without one. total_steps: its optimizer steps, in
    all.
    bridge: to the ranks of a separate one.
    """
    if not config.has_critic:
        return None
    return Critic(config, total_steps=total_steps) if bridge is None else RemoteCritic(bridge, total_steps=total_steps)
