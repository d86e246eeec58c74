"""The turns in which trainer and engine use a device that they share, and what happens at each change of turn.

The trainer's state is its gradients and optimizer state. The changes, from turn → to turn:

    trainer → weights    the trainer's state is offloaded, then the engine's memory for weights wakes
    weights → engine     the engine's memory for keys and values wakes
    weights → trainer    the engine sleeps, then the trainer's state returns
    engine  → trainer    the engine sleeps, then the trainer's state returns

To wake memory is to allocate it again after a sleep. Weights are sent to the engine in the turn
``weights`` (or ``engine``). Rollouts are made in the turn ``engine``. The trainer's own weights
stay on the device throughout.

An engine over several devices has workers on the devices of other ranks, and one rank commands it.
So all ranks end each phase of a change together. No engine wakes before every rank's state is
offloaded, and no rank's state returns before every engine sleeps.
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
    """Moves a trainer's gradients and optimizer state off a device that it shares with the engine, and back.

    ``offload()`` moves them off the device. ``restore()`` brings them back.
    """

    def offload(self) -> object: ...

    def restore(self) -> object: ...


class ColocatedDevice:
    """Hands the devices of all ranks from the trainer to the engine and back. Its methods are collectives.

    models: the trainer's models on the device. Empty if the engine has its own device.
    together: a callable that every rank calls with a function of its own. It runs the function, and
        returns once all ranks have run theirs. If one raised, ``together`` raises on every rank.
    ended: a callable that records a turn's peak memory; it takes the DeviceOwner whose turn ends.
        It is called before the trainer gives the device away or gets it back.
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
        """Offload the trainer's models, and wake the engine's memory for weights.

        Does nothing if the engine already has the device.
        """
        if self.turn is DeviceOwner.TRAINER:
            self.ended(self.turn)
            if self.models:
                self._together(lambda: [model.offload() for model in self.models])
                self._together(lambda: self.engine.wake(tags=["weights"]))
            self.turn = DeviceOwner.WEIGHTS

    def to_engine(self) -> None:
        """Wake the engine's memory for weights, and then for keys and values, so that the engine can generate."""
        self.to_weights()
        if self.turn is DeviceOwner.WEIGHTS:
            if self.models:
                self._together(lambda: self.engine.wake(tags=["kv_cache"]))
            self.turn = DeviceOwner.ENGINE

    def to_trainer(self) -> None:
        """Put the engine to sleep, and bring the trainer's models back. Does nothing if the trainer has the device."""
        if self.turn is not DeviceOwner.TRAINER:
            self.ended(self.turn)
            if self.models:
                self._together(self.engine.sleep)
                self._together(lambda: [model.restore() for model in self.models])
            self.turn = DeviceOwner.TRAINER
