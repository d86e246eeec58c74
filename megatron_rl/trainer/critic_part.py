"""The critic's calls in the training loop, a stand-in for runs without one, and the start of separate critic ranks."""

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
    """Trains PPO's critic, which predicts a value at each token. Methods are collectives unless they say otherwise."""

    def begin(self, policy: MegatronBackend) -> None:
        """Copy the policy's weights into the critic if ``critic.init=policy``; called before the first rollout."""
        ...

    def train(self, update: Update) -> dict[str, float]:
        """Take the critic's optimizer steps on a rollout and return their metrics by name; {} without a critic."""
        ...


class NoCritic:
    """Stands in for the critic in a run without one; its methods do nothing."""

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
    """Serve a separate critic until the run ends, if this process is one of its ranks; else return None at once.

    Returns True if the run reached its end, and False if it was preempted. Raises ConfigError for a
    separate critic outside a job of several ranks.
    """
    if not config.separate_critic_ranks:
        return None
    from megatron_rl.critic.link import holds_critic
    from megatron_rl.critic.server import serve

    return serve(config) if holds_critic(config.separate_critic_ranks) else None


@contextlib.contextmanager
def joined_critic(num_critic: int, deadline_s: float) -> Iterator[PolicyCriticLink | None]:
    """Join the process group of the policy's ranks, and yield the link to the separate critic's ranks.

    Without separate critic ranks it joins nothing and yields None. If the ``with`` block raises, the
    critic's ranks stop waiting for requests.

    num_critic: the number of separate critic ranks; 0 for none.
    deadline_s: ``run.deadline_s``, the longest wait for another rank.
    """
    if not num_critic:
        yield None
        return
    from megatron_rl.critic.link import joined

    with joined(num_critic, deadline_s, of_critic=False) as link:
        yield link
