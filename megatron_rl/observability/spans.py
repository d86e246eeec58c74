"""The spans of a run for an OpenTelemetry collector: one span per rollout, with a child span for each stage.

A stage is a part of a step, such as "update". The spans are made of the intervals of the step's
timer (observability/timer.py), so that a stage's spans last as long as ``time/<stage>_s`` of
metrics.jsonl. Importing this module needs the OpenTelemetry packages of the extra `otel`.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator

from megatron_rl.observability.completions import Completion
from megatron_rl.observability.otlp import OtlpExporter
from megatron_rl.observability.prometheus.live import ReadLive
from megatron_rl.observability.timer import STEP

log = logging.getLogger(__name__)

CLOSE_S = 10.0  # for unsent spans when the run ends
ITERATION = "rollout_iteration"
UPDATE = "update"
BETWEEN = ("eval", "export", "checkpoint")  # stages that follow a rollout's last row
# The attributes of a stage's span, by their names in metrics.jsonl.
FACTS = {
    UPDATE: (
        *("step", "step_kind", "skip/tokens_executed", "skip/tokens_dropped", "skip/samples_dropped"),
        *("skip/microbatches_dropped", "train/applied"),
    ),
    "rollout": ("rollout/tokens",),
    "reward": ("reward/mean",),
    "weight_sync": ("perf/weight_sync_bytes", "weight_version"),
}


class Interval(NamedTuple):
    """Holds one interval of the timer: a stage, its start by ``time.perf_counter``, and its seconds."""

    stage: str
    started_s: float
    seconds: float

    @property
    def ended_s(self) -> float:
        return self.started_s + self.seconds


class OwnIds(IdGenerator):
    """Generates the ids of spans and traces from the operating system's random numbers.

    OpenTelemetry's own generator uses Python's global random state, which the run saves and
    restores.
    """

    def generate_span_id(self) -> int:
        return 1 + secrets.randbelow(2**64 - 1)

    def generate_trace_id(self) -> int:
        return 1 + secrets.randbelow(2**128 - 1)

    def is_trace_id_random(self) -> bool:
        return True


class SpanSink:
    """Makes spans of the timer's intervals, with attributes from rows of metrics; a thread sends them in batches.

    run_name: the attribute ``megatron_rl.run`` of every span.
    endpoint: as in ``otlp.traces_url``.

    Each rollout has a trace of its own, whose root span is the rollout. The root span lasts until
    the rollout's last stage ends, evaluation and checkpoint included. It is sent when the next
    rollout begins or the run ends. A supervised step has a trace of its own too, and so has a stage
    before the first rollout.

    Raises ValueError for an environment variable of OpenTelemetry that cannot be read, OSError for
    a certificate.
    """

    def __init__(self, run_name: str, endpoint: str | None) -> None:
        self._exporter = OtlpExporter(endpoint)
        named = OTELResourceDetector().detect().attributes  # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
        ours = {"service.name": "megatron_rl", "megatron_rl.run": run_name}
        self._provider = TracerProvider(
            resource=Resource.create({**ours, **named}), id_generator=OwnIds(), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("megatron_rl")
        self._unix_ns = time.time_ns() - time.perf_counter_ns()  # the timer's zero in Unix time
        self._pending: list[Interval] = []
        self._root: trace.Span | None = None
        self._rollout, self._ended_s, self._num_made = 0, 0.0, 0

    def measured(self, stage: str, started_s: float, seconds: float) -> None:
        """Keep an interval of the timer until the row of its step is written."""
        self._pending.append(Interval(stage, started_s, seconds))

    def write(self, step: int, scalars: Mapping[str, float], row: Mapping[str, object]) -> None:
        """Make spans of the stages measured since the previous row; do nothing if no step has ended since then.

        step: the row's optimizer step.
        row: the row of metrics.jsonl.

        A span's parent is the root span of the rollout that the row belongs to. For a stage that ended
        before the row's step began, it is the root span of the previous row's rollout.
        """
        whole = next((each for each in reversed(self._pending) if each.stage == STEP), None)
        if whole is None:
            return
        stages = [each for each in self._pending if each.stage != STEP]
        self._pending = []
        self._add([each for each in stages if each.ended_s <= whole.started_s], {})
        rollout = row.get("rollout")
        if rollout is None or rollout != self._rollout or self._root is None:
            self._end_root()
            name = ITERATION if rollout is not None else f"{row['phase']}_step"
            self._rollout = rollout or 0
            facts = {key: row[key] for key in ("rollout", "phase", "skip/zero_advantage_ratio") if key in row}
            self._root = self._start(name, whole, Context(), {"first_step": step, **facts})
        self._root.set_attribute("last_step", step)
        self._ended_s = max(self._ended_s, whole.ended_s)
        self._add([each for each in stages if each.ended_s > whole.started_s], row)

    def show(self, step: int, source: str, completions: Sequence[Completion]) -> None:
        """Do nothing: spans hold no text of a prompt or a completion."""

    def follow(self, live: ReadLive) -> None:
        """Do nothing: this sink sends no values between steps."""

    def close(self, files: Sequence[object], *, failed: bool) -> None:
        """Make the remaining spans, send them within CLOSE_S seconds, and log how many spans were not sent.

        If a rollout has stages but no row yet, it gets a root span too.

        failed: whether the run ended with an error, which the last root span then reports.
        """
        stages, self._pending = [each for each in self._pending if each.stage != STEP], []
        first = next((i for i, each in enumerate(stages) if each.stage not in BETWEEN), len(stages))
        self._add(stages[:first], {})
        if stages[first:]:
            self._end_root()
            self._root = self._start(ITERATION, stages[first], Context(), {"rollout": self._rollout + 1})
            self._add(stages[first:], {})
        if failed and self._root is not None:
            self._root.set_status(trace.StatusCode.ERROR)
        self._end_root()
        sender = threading.Thread(target=self._provider.shutdown, name="otel-close", daemon=True)
        sender.start()
        sender.join(CLOSE_S)
        missing = self._num_made - self._exporter.num_taken
        if missing:
            log.warning("%d of %d spans did not reach %s", missing, self._num_made, self._exporter.shown)

    def _add(self, stages: Sequence[Interval], row: Mapping[str, object]) -> None:
        """Make a span of each interval, as a child of the open root span if there is one.

        row: the row whose metrics become attributes of the spans.
        """
        parent = Context() if self._root is None else trace.set_span_in_context(self._root, Context())
        for each in stages:
            facts = {key: row[key] for key in FACTS.get(each.stage, ()) if key in row}
            self._end(self._start(each.stage, each, parent, facts), each)
            self._ended_s = max(self._ended_s, each.ended_s)

    def _start(self, name: str, at: Interval, parent: Context, facts: Mapping[str, object]) -> trace.Span:
        span = self._tracer.start_span(name, parent, attributes=facts, start_time=self._at_ns(at.started_s))
        self._num_made += span.get_span_context().trace_flags.sampled
        return span

    def _end(self, span: trace.Span, at: Interval) -> None:
        span.end(self._at_ns(at.started_s) + round(at.seconds * 1e9))

    def _end_root(self) -> None:
        if self._root is not None:
            self._root.end(self._at_ns(self._ended_s))
            self._root = None

    def _at_ns(self, host_s: float) -> int:
        """Return ``host_s``, a moment of ``time.perf_counter``, as nanoseconds of Unix time."""
        return self._unix_ns + round(host_s * 1e9)
