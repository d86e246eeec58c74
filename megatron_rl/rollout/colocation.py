"""The turns of trainer and engine on a device that they share, and the order in which it changes hands.

trainer ── offload the trainer's state, wake the engine's weights ──▶ weights ── wake keys and values ──▶ engine
   ▲                                                                     │                                  │
   └──────────────────────── engine sleeps, then the trainer's state returns ◀──────────────────────────────┘

Weights are sent in the state ``weights`` (or ``engine``), rollouts are made in ``engine``; the trainer's own weights
stay on the device throughout.
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
    """Hands a device from trainer to engine and back.

    offload: moves the trainer's gradients and optimizer state off the device; None where nothing is shared.
    restore: moves them back; None where nothing is shared.
    ended:   called with the turn that ends, before the device leaves or returns to the trainer (to note peak memory).
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
        """Let the engine take weights; do nothing if it has the device already. Not a collective."""
        if self.turn is DeviceOwner.TRAINER:
            self._leave()
            if self.offload is not None:
                self.offload()
                self.engine.wake(tags=["weights"])
            self.turn = DeviceOwner.WEIGHTS

    def to_engine(self) -> None:
        """Let the engine generate."""
        self.to_weights()
        if self.turn is DeviceOwner.WEIGHTS:
            if self.offload is not None:
                self.engine.wake(tags=["kv_cache"])
            self.turn = DeviceOwner.ENGINE

    def to_trainer(self) -> None:
        """Give the device back to the trainer."""
        if self.turn is not DeviceOwner.TRAINER:
            self._leave()
            if self.restore is not None:
                self.engine.sleep()
                self.restore()
            self.turn = DeviceOwner.TRAINER

    def _leave(self) -> None:
        self.ended(self.turn)
