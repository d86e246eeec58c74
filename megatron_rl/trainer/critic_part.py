"""The critic as a part of a run: its methods for the loop, and the start of separate critic ranks."""

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
    """Trains the model that gives each token a baseline. Methods are collectives unless they say otherwise."""

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
    """Trains PPO's critic, on the policy's ranks or on separate ranks.

    starts_as_policy: whether the critic takes the policy's weights before RL
        (``critic.init=policy``).
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
    """Return the models that this rank holds: the policy, and the critic unless separate ranks hold it."""
    if critic is None:
        return [policy]
    from megatron_rl.critic import RemoteCritic

    return [policy] if isinstance(critic, RemoteCritic) else [policy, critic]


def serve_critic(config: Config) -> bool | None:
    """Serve a separate critic if this process belongs to it; return None for any other process.

    Returns whether the critic came to its regular end. Raises ConfigError for a separate critic
    outside a job of several ranks.
    """
    if not config.separate_critic_ranks:
        return None
    from megatron_rl.critic.link import holds_critic
    from megatron_rl.critic.server import serve

    return serve(config) if holds_critic(config.separate_critic_ranks) else None


@contextlib.contextmanager
def joined_critic(num_critic: int, deadline_s: float) -> Iterator[PolicyCriticLink | None]:
    """Join the policy's world and yield its link to the separate critic's world; None without separate ranks.

    num_critic: the number of separate critic ranks; 0 for none. A failure within the block ends the
        other world's waits.
    """
    if not num_critic:
        yield None
        return
    from megatron_rl.critic.link import joined

    with joined(num_critic, deadline_s, of_critic=False) as link:
        yield link
