"""The turns of trainer and engine on a device that they share, and the order in which it changes hands.

trainer ── offload the trainer's state, wake the engine's weights ──▶ weights ── wake keys and
values ──▶ engine
   ▲                                                                     │                                  │
   └──────────────────────── engine sleeps, then the trainer's state returns ◀──────────────────────────────┘

Weights are sent in the state ``weights`` (or ``engine``), rollouts are made in ``engine``; the
trainer's own weights stay on the device throughout.

An engine over several devices has its workers on those of other ranks, and one rank commands it. So
each arrow is two phases that all ranks end together: no engine wakes before every rank's state is
away, and no rank's state returns before every engine sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from megatron_rl.rollout.engines.engine import Engine


class DeviceOwner(Enum):
    TRAINER = "trainer"
    WEIGHTS = "weights"
    ENGINE = "engine"


class DeviceShare(Protocol):
    """Leaves a device to the engine: a model of the trainer, with its gradients and optimizer state."""

    def offload(self) -> object: ...

    def restore(self) -> object: ...


class ColocatedDevice:
    """Hands the devices of all ranks from trainer to engine and back. Its moves are collectives.

    models:   the trainer's on the device; none if the engine has a device of its own.
    together: calls a function on every rank and returns once all have ended it; raises on every
        rank where one raised.
    ended:    called with the turn that ends, before the device leaves or returns to the trainer (to
              note peak memory).
    """

    def __init__(
        self,
        engine: Engine,
        models: Sequence[DeviceShare],
        together: Callable[[Callable[[], object]], None],
        ended: Callable[[DeviceOwner], None],
    ) -> None:
        self.engine, self.models, self.ended = engine, models, ended
        self._together = together
        self.turn = DeviceOwner.TRAINER

    def to_weights(self) -> None:
        """Let the engine take weights; do nothing if it has the device already."""
        if self.turn is DeviceOwner.TRAINER:
            self.ended(self.turn)
            if self.models:
                self._together(lambda: [model.offload() for model in self.models])
                self._together(lambda: self.engine.wake(tags=["weights"]))
            self.turn = DeviceOwner.WEIGHTS

    def to_engine(self) -> None:
        """Let the engine generate."""
        self.to_weights()
        if self.turn is DeviceOwner.WEIGHTS:
            if self.models:
                self._together(lambda: self.engine.wake(tags=["kv_cache"]))
            self.turn = DeviceOwner.ENGINE

    def to_trainer(self) -> None:
        """Give the device back to the trainer."""
        if self.turn is not DeviceOwner.TRAINER:
            self.ended(self.turn)
            if self.models:
                self._together(self.engine.sleep)
                self._together(lambda: [model.restore() for model in self.models])
            self.turn = DeviceOwner.TRAINER
