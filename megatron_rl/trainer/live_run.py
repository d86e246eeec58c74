"""A reader of a run's current values, for the thread that serves them as Prometheus metrics.

No method waits or takes a lock of the run. The main thread writes during a read, so a value may be
a moment old, and two values may stem from two moments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.run_state import ResumePoint
from megatron_rl.config import Config
from megatron_rl.distributed.watchdog import Watchdog
from megatron_rl.observability.prometheus.live import EngineReading, LiveValues
from megatron_rl.rollout.queue import RolloutQueue


@dataclass(kw_only=True, eq=False)
class LiveRun:
    """Reads a run's current values; each call returns them as a LiveValues (observability/prometheus/live.py).

    facts: labels that stay the same during the run (``facts_of``).
    rank: this process's rank.
    resumed_at: when the checkpoint that the run resumed from was saved, in seconds since 1970; None
        if the run did not resume.
    queue: the queue of rollouts; None while engines start.
    """

    facts: Mapping[str, str]
    rank: int
    watchdog: Watchdog
    checkpoints: CheckpointManager
    resumed_at: float | None
    queue: RolloutQueue | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        backend: TrainableModel,
        watchdog: Watchdog,
        checkpoints: CheckpointManager,
        resume_point: ResumePoint | None,
    ) -> LiveRun:
        """Return a LiveRun made of the objects that a run has before its engines start."""
        return cls(
            facts=facts_of(config, backend),
            rank=backend.topology.rank,
            watchdog=watchdog,
            checkpoints=checkpoints,
            resumed_at=None if resume_point is None else resume_point.folder.stat().st_mtime,
        )

    def __call__(self) -> LiveValues:
        """Return the run's current values."""
        stage, seconds = self.watchdog.doing
        values = LiveValues(
            facts=self.facts,
            stage=stage,
            stage_s=seconds,
            checkpoint_at=self.checkpoints.saved_at or self.resumed_at,
        )
        if self.queue is None:
            return values
        jobs, manager = list(self.queue.jobs.values()), self.queue.manager
        totals = manager.metrics.totals
        return dataclasses.replace(
            values,
            rollouts_under_way=len(jobs),
            groups={
                "asked": sum(len(job.mine) for job in jobs),
                "generated": sum(len(job.rollouts) for job in jobs),
                "scored": sum(len(job.scores) for job in jobs),
            },
            sent_version=manager.sent_version,
            weight_syncs=totals["syncs"],
            weight_sync_s=totals["sync_s"],
            engines=dict(self._engines(self.queue)),
        )

    def _engines(self, queue: RolloutQueue) -> Iterator[tuple[int, EngineReading]]:
        """Yield (engine's number, its current values) for each known engine.

        The values of this rank's engines are read now. Those of other ranks' engines date from the
        end of the last rollout.
        """
        for rank, engines in enumerate(queue.manager.metrics.engines):
            for reading in engines:
                number = rank if reading["number"] is None else reading["number"]
                yield number, EngineReading(**{**reading, "running": None, "waiting": None, "kv_cache_usage": None})
        for reading in queue.manager.engine.readings():
            yield self.rank if reading.number is None else reading.number, reading


def facts_of(config: Config, backend: TrainableModel) -> dict[str, str]:
    """Return a run's constant labels as {label: text}: model family, parallel degrees, engine and dtype."""
    topology = backend.topology
    engine = "none" if not config.generates else "servers" if config.rollout.servers else config.rollout.engine
    return {
        "model_family": backend.shape.family,
        "world_size": str(topology.world_size),
        "tensor": str(topology.tensor_size),
        "pipeline": str(topology.pipeline_size),
        "context": str(topology.context_size),
        "expert": str(topology.expert_size),
        "data": str(topology.data_size),
        "engine": engine,
        "dtype": config.model.dtype,
    }
