"""The values of a run between its steps, in the form in which a scrape gets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """Holds the known facts of one engine; None for a fact that the engine does not report.

    number: its place in ``rollout.servers``; None for the rank's own engine, whose number is the
        rank.
    is_up: whether it serves, as far as its rank knows.
    weight_version: the version of its weights; below 0 if it holds no whole set.
    restarts: how often it was started again, or served again after a loss.
    running, waiting: its samples that are being computed, and those that wait for room.
    kv_cache_usage: the used share of its KV cache, from 0 to 1.
    most_running, most_waiting, most_kv_cache_usage: the most of each, since it last had no request.

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
    """Holds a run's current values, as the first rank sees them.

    facts: labels that stay the same during a run: model family, degrees of parallelism, engine.
    stage, stage_s: the main thread's stage, and the seconds since it began.
    rollouts_under_way: rollouts that were started and not taken.
    groups: the number of these rollouts' groups on this rank that were asked for, are generated,
        are scored.
    sent_version: the version of the weights last sent to the engines; below 0 before the first
        sync.
    weight_syncs, weight_sync_s: the number of syncs since the start, and their seconds.
    checkpoint_at: when the last checkpoint became whole, in seconds since 1970; None if there is
        none.
    engines: by their numbers; other ranks' engines as of the end of the last rollout.
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
