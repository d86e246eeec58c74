"""The values that Prometheus reads: the last value of each gauge, sums of counters, and histograms of seconds.

The main thread adds rows of metrics.jsonl, and requests read the values. Both hold one lock, so that
a request sees whole rows. The number of values is bounded: names come from table.py, from its list of
stages, or from the configured evaluation sets and reward functions.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.observability.prometheus.table import BY_KEY, EVAL, Kind, stage_label
from megatron_rl.observability.timer import STEP
from megatron_rl.types import StepKind

# Bounds in seconds: from a step of a tiny model to a rollout of an hour.
BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
MOST_NAMES = 64  # the most evaluation sets, and the most reward functions, that get series
MOST_PASS = 32  # values of k for each evaluation set
OUTSIDE = ("checkpoint", "export")  # stages that no row holds: the timer reports them
_BEFORE = "_before"


@dataclass(slots=True)
class Histogram:
    """Counts observations in seconds by the bounds BUCKETS; the last count is for those above all bounds.

    total: the sum of the observed seconds.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation, unless it is NaN."""
        if seconds == seconds:
            self.counts[bisect.bisect_left(BUCKETS, seconds)] += 1
            self.total += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Holds the configured names of evaluation sets and of reward functions, at most MOST_NAMES of each."""

    sets: frozenset[str]
    functions: frozenset[str]

    @classmethod
    def of(cls, config: Mapping[str, object]) -> Names:
        """Return the names of a configuration's evaluation sets and reward functions.

        config: nested dicts (``config_to_dict``); ``eval`` or ``reward`` may be absent.

        Example: ``{"reward": {"functions": ["math"]}}`` has no set and the function ``math``.
        """
        evaluation, reward = config.get("eval", {}), config.get("reward", {})
        sets = [evaluation["name"]] if evaluation.get("path") else []
        sets += evaluation.get("sets", {})
        functions: Sequence[str] = reward.get("functions", ())
        return cls(sets=frozenset(sets[:MOST_NAMES]), functions=frozenset(functions[:MOST_NAMES]))


class RunValues:
    """Adds up the values of a run's rows of metrics.jsonl, and the seconds of stages. Methods are safe in any thread.

    names: the evaluation sets and reward functions whose values are kept.
    total_steps: the number of steps that the run is to take.
    """

    def __init__(self, names: Names, total_steps: int) -> None:
        self.lock = threading.Lock()
        self.names, self.total_steps = names, total_steps
        self.values: dict[str, float] = {}  # by the key of metrics.jsonl: the last value, or the sum
        self.steps: Counter[str] = Counter()  # by their kind
        self.functions: dict[str, float] = {}
        self.evaluations: dict[tuple[str, str, str], float] = {}  # by the key in EVAL, the set, and k or ""
        self.function_evaluations: dict[tuple[str, str], float] = {}  # by the set and the function
        self.stages: dict[str, Histogram] = {}
        self.step_seconds = Histogram()
        self.started_at = time.time()
        self.last_step_at: float | None = None

    def add(self, row: Mapping[str, object], *, at: float | None = None) -> None:
        """Add the values of one row of metrics.jsonl.

        row: as ``read_metrics`` returns it: NaN and infinities are floats, not texts as in the file.
        at: when the row's step ended, in seconds since 1970; None for a row from before a resume.
        """
        with self.lock:
            self.steps[StepKind(row["step_kind"]).value] += 1
            self.last_step_at = at
            # Values measured before the step come first, so that a later value in the same row replaces them.
            for key in sorted(row, key=lambda name: not name.endswith(_BEFORE)):
                if isinstance(row[key], (int, float)):
                    self._add_value(key, row[key])

    def add_interval(self, stage: str, seconds: float) -> None:
        """Count the duration of a checkpoint or an export, which no row of metrics holds; ignore other stages."""
        if stage in OUTSIDE:
            with self.lock:
                self._observe(stage, seconds)

    def _add_value(self, key: str, value: float) -> None:
        """Add one value of a row if its name is known; ignore it otherwise.

        Known are the names in table.py, those of stages' times, and those of configured evaluation
        sets and reward functions.
        """
        name = key.removesuffix(_BEFORE)
        if name in BY_KEY:
            added = BY_KEY[name].kind is Kind.SUM
            self.values[name] = self.values.get(name, 0.0) + value if added else value
        elif key.startswith("time/"):
            stage = key.removeprefix("time/").removesuffix("_s")
            if stage == STEP:
                self.step_seconds.observe(value)
            elif value:
                self._observe(stage, value)
        elif name.startswith("reward/") and name.removeprefix("reward/") in self.names.functions:
            self.functions[name.removeprefix("reward/")] = value
        elif name.startswith("eval/") and name.count("/") > 1:
            self._add_evaluation(*name.split("/", 2)[1:], value)

    def _observe(self, stage: str, seconds: float) -> None:
        self.stages.setdefault(stage_label(stage), Histogram()).observe(seconds)

    def _add_evaluation(self, of_set: str, key: str, value: float) -> None:
        if of_set not in self.names.sets:
            return
        kind, _, k = key.partition("@")
        if k:
            kind, k = kind + "_se" * k.endswith("_se"), k.removesuffix("_se")
        if key in self.names.functions:
            self.function_evaluations[of_set, key] = value
        elif kind in EVAL and (not k or (k.isascii() and k.isdecimal())):
            place = (kind, of_set, k)
            if place in self.evaluations or sum(x[:2] == place[:2] for x in self.evaluations) < MOST_PASS:
                self.evaluations[place] = value


def cumulative(histogram: Histogram) -> Iterator[tuple[float, int]]:
    """Yield (upper bound in seconds, number of observations up to it); the last bound is infinity.

    Example: two observations of 0.02 s give 0 at 0.01 s, and 2 at each later bound.
    """
    count = 0
    for bound, number in zip((*BUCKETS, float("inf")), histogram.counts, strict=True):
        count += number
        yield bound, count
