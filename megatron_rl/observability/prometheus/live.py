"""The values of a run between its steps, as the parts of a run give them to a scrape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """Holds what is known of one engine. None: it does not say.

    number: its place in ``rollout.servers``; None for the rank's own one, whose number is the rank.
    is_up: it serves, as far as its rank knows.
    weight_version: of the weights that it holds; below 0 if it holds no whole set.
    restarts: how often it was started again, or served again after a loss.
    running, waiting: its samples that are computed, and those that wait for room.
    kv_cache_usage: used share of its keys and values, from 0 to 1.
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
    """Holds a run's values of now, as the first rank sees them.

    facts: what stays the same during a run, as labels: model family, degrees of parallelism, engine.
    stage, stage_s: the main thread's stage, and the seconds since it began.
    rollouts_under_way: rollouts that were started and not taken.
    groups: of these rollouts, this rank's groups that were asked for, are generated, are scored.
    sent_version: of the weights that the engines were sent last; below 0 before the first sync.
    weight_syncs, weight_sync_s: syncs since the start, and their seconds.
    checkpoint_at: seconds since 1970 at which the last checkpoint was whole; None if there is none.
    engines: by their numbers; of other ranks as they were at the end of the last rollout.
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
