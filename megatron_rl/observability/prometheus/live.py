"""The values of a run that change between two steps, such as the current stage, for the answers to Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """Holds the known values of one inference engine; None for a value that the engine does not report.

    number: its index in ``rollout.servers``; None for the rank's own engine, whose number is the
        rank.
    is_up: whether it serves, as far as its rank knows.
    weight_version: the version of its weights; below 0 if it holds no whole set.
    restarts: how often it came back after a failure: started again by the run, or reachable again.
    running: the number of samples that it computes now.
    waiting: the number of samples in its queue, which it does not compute yet.
    kv_cache_usage: the used share of its KV cache, from 0 to 1.
    most_running, most_waiting, most_kv_cache_usage: the largest of these values since it last had
        no request.

    Example: ``EngineReading(number=None, is_up=True, weight_version=7, restarts=0, running=64,
    waiting=12, kv_cache_usage=0.97)``.
    """

    number: int | None
    is_up: bool
    weight_version: int
    restarts: int
    running: int | None = None
    waiting: int | None = None
    kv_cache_usage: float | None = None
    most_running: int | None = None
    most_waiting: int | None = None
    most_kv_cache_usage: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveValues:
    """Holds a run's current values, as the first rank knows them.

    facts: {label: value} that stays the same during a run: model family, degrees of parallelism,
        engine.
    stage, stage_s: the part of the run in which the main thread is, such as "update", and the
        seconds since it began.
    rollouts_under_way: the number of rollouts that were started and that the trainer has not taken
        yet.
    groups: {"asked", "generated" and "scored": the number of these rollouts' groups that this rank
        was given, has generated and has scored}.
    sent_version: the version of the weights last sent to the engines; below 0 before the first
        sync.
    weight_syncs, weight_sync_s: the number of weight syncs since the start, and their seconds.
    checkpoint_at: when the last checkpoint was complete, in seconds since 1970; None if there is
        none.
    engines: {engine's number: its values}; the values of other ranks' engines date from the end of the
        last rollout.
    """

    facts: Mapping[str, str]
    stage: str
    stage_s: float
    rollouts_under_way: int = 0
    groups: Mapping[str, int] = field(default_factory=dict)
    sent_version: int | None = None
    weight_syncs: int = 0
    weight_sync_s: float = 0.0
    checkpoint_at: float | None = None
    engines: Mapping[int, EngineReading] = field(default_factory=dict)


ReadLive = Callable[[], LiveValues]
