"""The base class of an engine that wraps another engine and passes on all calls except sampling."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from megatron_rl.observability.prometheus.live import EngineReading
from megatron_rl.rollout.engines.engine import Engine, SyncReport


class EngineAround:
    """Passes every call of ``Engine`` on to an inner engine, except ``generate`` and ``sample``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def weight_version(self) -> int:
        return self.engine.weight_version

    @property
    def lacks_weights(self) -> bool:
        return self.engine.lacks_weights

    @property
    def lost(self) -> Sequence[str]:
        return self.engine.lost

    @property
    def is_elsewhere(self) -> bool:
        return self.engine.is_elsewhere

    @property
    def progressed_at(self) -> float:
        return self.engine.progressed_at

    def recover(self, lost: Sequence[str]) -> Sequence[str]:
        return self.engine.recover(lost)

    def leave_out(self, names: Collection[str]) -> None:
        self.engine.leave_out(names)

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        return self.engine.load_weights(tensors, version)

    def take_report(self, version: int, failed: Collection[str], lost: Collection[str]) -> None:
        self.engine.take_report(version, failed, lost)

    def readings(self) -> Sequence[EngineReading]:
        return self.engine.readings()

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self, *, tags: Sequence[str]) -> None:
        self.engine.wake(tags=tags)

    def close(self) -> None:
        self.engine.close()
