"""The critic as a part of a run: what the loop asks of it, and where a job has ranks of its own for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.config import Config
from megatron_rl.observability.timer import StepTimer
from megatron_rl.trainer.update import Update

if TYPE_CHECKING:
    from megatron_rl.backend.backend import MegatronBackend
    from megatron_rl.critic import Critic, RemoteCritic
    from megatron_rl.critic.link import PolicyCriticLink


class CriticPart(Protocol):
    """Trains what gives a baseline of each token. Methods are collectives unless they say otherwise."""

    def begin(self, policy: MegatronBackend) -> None:
        """Prepare for RL's first rollout."""
        ...

    def train(self, update: Update) -> dict[str, float]:
        """Take the critic's steps of a rollout and return their metrics; {} without a critic."""
        ...


class NoCritic:
    """Stands for the critic of a run without one."""

    def begin(self, policy: MegatronBackend) -> None:
        pass

    def train(self, update: Update) -> dict[str, float]:
        return {}


class TrainedCritic:
    """Trains PPO's critic, on the policy's ranks or on ranks of its own.

    starts_as_policy: whether it takes the policy's weights before RL (``critic.init=policy``).
    """

    def __init__(self, critic: Critic | RemoteCritic, timer: StepTimer, *, starts_as_policy: bool) -> None:
        self.critic, self.timer, self.starts_as_policy = critic, timer, starts_as_policy

    def begin(self, policy: MegatronBackend) -> None:
        if self.starts_as_policy:
            self.critic.take_weights(policy.export())

    def train(self, update: Update) -> dict[str, float]:
        with self.timer.measure("critic"):
            return self.critic.train(update.batch, update.targets.returns, update.targets.values)


def models_here(policy: TrainableModel, critic: Critic | RemoteCritic | None) -> list[TrainableModel]:
    """Return the models that this rank holds: the policy, and a critic that no other ranks hold."""
    if critic is None:
        return [policy]
    from megatron_rl.critic import RemoteCritic

    return [policy] if isinstance(critic, RemoteCritic) else [policy, critic]


def serve_critic(config: Config) -> bool | None:
    """Serve a separate critic if this process belongs to it; return whether it came to its end, else None.

    Raises ConfigError for a separate critic outside a job of several ranks.
    """
    if not config.separate_critic_ranks:
        return None
    from megatron_rl.critic.link import holds_critic
    from megatron_rl.critic.server import serve

    return serve(config) if holds_critic(config.separate_critic_ranks) else None


@contextlib.contextmanager
def joined_critic(num_critic: int, deadline_s: float) -> Iterator[PolicyCriticLink | None]:
    """Join the policy's world and yield its link to a separate critic's; None if the job is one world.

    num_critic: the ranks of the separate critic; 0: there are none.
    A failure within the block ends the other world's waits.
    """
    if not num_critic:
        yield None
        return
    from megatron_rl.critic.link import joined

    with joined(num_critic, deadline_s, of_critic=False) as link:
        yield link
