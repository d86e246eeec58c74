"""The metrics of rollouts, added up over all ranks and jobs until they become one line of the metrics file.

A job is the generation of one rollout, or of further groups for a rollout.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_rl.rollout.job import RolloutJob

if TYPE_CHECKING:
    from megatron_rl.observability.prometheus.live import EngineReading


class RolloutMetrics:
    """Adds up counts, bytes and seconds of rollouts and of weight syncs.

    has_turns: whether samples may have several turns, so that turns are counted.
    ends_early: whether samples may end early (``reward.decided``), so that these are counted.
    has_delta: whether a sync may send only the weights that changed.
    take_counts: a callable that returns metric name → count on this rank since its last call. The
        counts are added up over ranks and jobs.
    derive: a callable from metric name → value to further metrics that are computed from them, such as
        ratios of counts.
    read_engines: a callable that returns one EngineReading for each engine of this rank, for
        monitoring. None: no monitoring.
    """

    def __init__(
        self,
        *,
        has_turns: bool,
        has_delta: bool,
        ends_early: bool = False,
        take_counts: Callable[[], Mapping[str, int]] = dict,
        derive: Callable[[Mapping[str, float]], Mapping[str, float]] = dict,
        read_engines: Callable[[], Sequence[EngineReading]] | None = None,
    ) -> None:
        self._has_turns, self._has_delta, self._take_counts = has_turns, has_delta, take_counts
        self._ends_early = ends_early
        self._derive, self._read_engines = derive, read_engines
        self.engines: Sequence[Sequence[Mapping[str, object]]] = ()  # readings [rank][engine], at the last job's end
        self._values: dict[str, float] = {}
        # of the jobs noted since ``take``
        self._turns = self._samples = self._truncated = self._decided = self._repeats = 0
        self.waited_s = 0.0  # seconds of waiting for weights and rollouts since ``take``
        self._last_end = time.perf_counter()  # when ``take`` was last called
        self.totals = {
            "tokens": 0.0,
            "generation_s": 0.0,
            "waited_s": 0.0,
            "syncs": 0,
            "sync_s": 0.0,
            "sync_bytes": 0.0,
        }

    def note_sync(self, sent: Sequence[Sequence]) -> None:
        """Add the size and the time of one weight sync.

        sent: for each rank a list of fields of its SyncReport: [failed, lost, num_bytes, seconds,
            sent_bytes, changed_share].
        """
        num_bytes, seconds = max(part[2] for part in sent), max(part[3] for part in sent)
        self.waited_s += seconds
        self.totals["syncs"] += 1
        self.totals["sync_s"] += seconds
        self.totals["sync_bytes"] += num_bytes
        self._values["perf/weight_sync_bytes"] = float(num_bytes)
        self._values["perf/weight_sync_bytes_per_second"] = num_bytes / max(seconds, 1e-9)
        if self._has_delta:
            self._values["perf/weight_sync_sent_bytes"] = float(max(part[4] for part in sent))
            if shares := [part[5] for part in sent if part[5] is not None]:
                self._values["perf/weight_sync_changed_share"] = max(shares)

    def note_wait(self, seconds: float) -> None:
        self.waited_s += seconds
        self.totals["waited_s"] += seconds

    def note_peak_memory(self, phase: str, num_bytes: int) -> None:
        self._values[f"perf/{phase}_peak_memory_bytes"] = float(num_bytes)

    def counts_of(self, job: RolloutJob) -> dict:
        """Return name → value of a job on this rank, such as its tokens and seconds. JSON can hold every value."""
        return {
            "tokens": job.num_tokens(),
            "generation_s": job.generation_s,
            "turns": job.num_turns(),
            "samples": job.num_samples(),
            "truncated": job.num_ended_by("length"),
            "decided": job.num_ended_by("decided"),
            "repeats": job.num_repeats(),
            "ended_s": list(job.ended_s.values()),
            "further": dict(self._take_counts()),
            "engines": [] if self._read_engines is None else [dataclasses.asdict(x) for x in self._read_engines()],
        }

    def note_job(self, ranks: Sequence[Mapping]) -> None:
        """Add a job whose groups were all collected. ``ranks``: the result of ``counts_of`` on each rank."""
        tokens, now = self._sum("rollout/tokens", sum(rank["tokens"] for rank in ranks)), time.perf_counter()
        seconds = self._sum("perf/rollout_generation_s", max(rank["generation_s"] for rank in ranks))
        self._sum("perf/rollout_tail_s", tail_s([end for rank in ranks for end in rank["ended_s"]]))
        for rank in ranks:
            for name, count in rank["further"].items():
                self._sum(name, count)
        self._values |= self._derive(self._values)
        self.engines = [rank["engines"] for rank in ranks]
        self._turns += sum(rank["turns"] for rank in ranks)
        self._samples += sum(rank["samples"] for rank in ranks)
        self._truncated += sum(rank["truncated"] for rank in ranks)
        self._decided += sum(rank["decided"] for rank in ranks)
        self._repeats += sum(rank["repeats"] for rank in ranks)
        if self._has_turns:
            self._values["rollout/turns_mean"] = self._turns / max(1, self._samples)
        if self._ends_early:
            self._values["rollout/decided_share"] = self._decided / max(1, self._samples)
        self._values |= {
            "rollout/truncated_share": self._truncated / max(1, self._samples),
            "rollout/repeat_share": self._repeats / max(1, self._samples),
            "perf/rollout_tokens_per_second": tokens / max(seconds, 1e-9),
            "perf/rollout_wait_share": min(1.0, self.waited_s / max(now - self._last_end, 1e-9)),
        }

    def _sum(self, name: str, value: float) -> float:
        self._values[name] = self._values.get(name, 0.0) + value
        return self._values[name]

    def take(self) -> dict[str, float]:
        """Return metric name → value since the last call, and reset the metrics."""
        values, self._values = self._values, {}
        self._turns = self._samples = self._truncated = self._decided = self._repeats = 0
        self.totals["tokens"] += values.get("rollout/tokens", 0.0)
        self.totals["generation_s"] += values.get("perf/rollout_generation_s", 0.0)
        self.waited_s, self._last_end = 0.0, time.perf_counter()
        return values

    def summary(self, run_s: float) -> str:
        """Return one line about rollouts and weight syncs, for the log at a run's end.

        run_s: the duration of the whole run in seconds.
        """
        t = self.totals
        return (
            f"rollouts: {t['tokens']:,.0f} tokens, {t['tokens'] / max(t['generation_s'], 1e-9):,.0f} a second; "
            f"weights sent {t['syncs']} times, {t['sync_s'] / max(t['syncs'], 1):.3f} s and "
            f"{t['sync_bytes'] / max(t['sync_s'], 1e-9) / 1e9:.2f} GB/s each; "
            f"{(t['waited_s'] + t['sync_s']) / max(run_s, 1e-9):.0%} of {run_s:,.0f} s waited for the two"
        )


def tail_s(ends_s: Sequence[float]) -> float:
    """Return the seconds from when three quarters of a rollout's groups had ended until its last group ended.

    ends_s: when each group ended, in seconds since the rollout's start, in any order. If it is
        empty, 0 is returned.
    """
    ordered = sorted(ends_s)
    return ordered[-1] - ordered[-(-3 * len(ordered) // 4) - 1] if ordered else 0.0
