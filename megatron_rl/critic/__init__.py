"""PPO's critic: model.py on the ranks that hold it, remote.py and service.py where those are not the policy's (``critic.placement``)."""

from __future__ import annotations

from megatron_rl.config import Config
from megatron_rl.critic.bridge import Bridge
from megatron_rl.critic.model import Critic
from megatron_rl.critic.remote import RemoteCritic

__all__ = ["Critic", "RemoteCritic", "build_critic"]


def build_critic(config: Config, total_steps: int, bridge: Bridge | None) -> Critic | RemoteCritic | None:
    """The run's, after its policy was built; None for an estimator without one. total_steps: its optimizer steps, in all.
    bridge: to the ranks of a separate one.
    """
    if not config.has_critic:
        return None
    return Critic(config, total_steps=total_steps) if bridge is None else RemoteCritic(bridge, total_steps=total_steps)
