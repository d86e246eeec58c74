"""Whose turn it is on a device that trainer and engine share, and the order in which it changes hands.

trainer ── offload the trainer's state, wake the engine's weights ──▶ weights ── wake keys and values ──▶ engine
   ▲                                                                     │                                  │
   └──────────────────────── engine sleeps, then the trainer's state returns ◀──────────────────────────────┘

Weights are sent in ``weights`` (or ``engine``), rollouts are made in ``engine``; the trainer's own weights stay
throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from megatron_rl.rollout.engine import Engine


class DeviceOwner(Enum):
    TRAINER = "trainer"
    WEIGHTS = "weights"
    ENGINE = "engine"


class ColocatedDevice:
    """offload, restore: the trainer's gradients and optimizer state off the device and back; both None where nothing is
    shared.

    enter: told of every change of turn, after it, with the turn that ended (for the memory that it held at most).
    """

    def __init__(
        self,
        engine: Engine,
        offload: Callable[[], object] | None,
        restore: Callable[[], None] | None,
        ended: Callable[[DeviceOwner], None],
    ) -> None:
        self.engine, self.offload, self.restore, self.ended = engine, offload, restore, ended
        self.turn = DeviceOwner.TRAINER

    def to_weights(self) -> None:
        """The engine can take weights; not a collective, and nothing where it has the device already."""
        if self.turn is DeviceOwner.TRAINER:
            self._leave()
            if self.offload is not None:
                self.offload()
                self.engine.wake(tags=["weights"])
            self.turn = DeviceOwner.WEIGHTS

    def to_engine(self) -> None:
        """The engine can generate."""
        self.to_weights()
        if self.turn is DeviceOwner.WEIGHTS:
            if self.offload is not None:
                self.engine.wake(tags=["kv_cache"])
            self.turn = DeviceOwner.ENGINE

    def to_trainer(self) -> None:
        """The trainer has the device again."""
        if self.turn is not DeviceOwner.TRAINER:
            self._leave()
            if self.restore is not None:
                self.engine.sleep()
                self.restore()
            self.turn = DeviceOwner.TRAINER

    def _leave(self) -> None:
        self.ended(self.turn)
