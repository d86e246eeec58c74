"""The metric families that Prometheus reads, made at each request from a run's rows and its current values.

A family is a metric's name and help with its samples, one for each tuple of labels.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import time
from collections.abc import Iterable, Iterator, Mapping

import torch
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import megatron_rl
from megatron_rl.observability.prometheus.live import EngineReading, LiveValues, ReadLive
from megatron_rl.observability.prometheus.table import (
    EVAL,
    EVAL_FUNCTION,
    FUNCTION,
    OTHER_STAGE,
    PREFIX,
    STAGES,
    TABLE,
    Kind,
    stage_label,
)
from megatron_rl.observability.prometheus.values import Histogram, RunValues, cumulative
from megatron_rl.types import StepKind

GROUPS = ("asked", "generated", "scored")
# For engines: the field of EngineReading, the name and the help. A field of None gives no sample.
ENGINE_GAUGES = (
    ("is_up", "engine_up", "Whether the engine serves, as far as its rank knows."),
    ("weight_version", "engine_weight_version", "Version of the weights that the engine holds; below 0: none."),
    ("running", "engine_requests_running", "Samples that the first rank's engine computes now."),
    ("waiting", "engine_requests_waiting", "Samples that wait for room in the first rank's engine now."),
    ("kv_cache_usage", "engine_kv_cache_usage_ratio", "Share of the first rank's engine's KV cache in use now."),
    ("most_running", "engine_peak_requests_running", "Most samples computed since the engine last had none."),
    ("most_waiting", "engine_peak_requests_waiting", "Most samples waiting since the engine last had none."),
    ("most_kv_cache_usage", "engine_peak_kv_cache_usage_ratio", "Largest share of its KV cache in use since then."),
)


def gauge(name: str, words: str, value: float | None) -> GaugeMetricFamily:
    """Return a gauge called ``name`` with the help ``words``; it has no sample if ``value`` is None."""
    family = GaugeMetricFamily(PREFIX + name, words)
    if value is not None:
        family.add_metric((), value)
    return family


def counter(name: str, words: str, value: float) -> CounterMetricFamily:
    """Return a counter called ``name`` with the help ``words``; the names of its samples end in ``_total``."""
    return CounterMetricFamily(PREFIX + name, words, value=value)


def labelled(name: str, words: str, labels: Iterable[str], samples: Mapping[tuple[str, ...], float]) -> Metric:
    """Return a gauge with one sample for each tuple of label values.

    name, words: the metric's name and its help line.
    labels: the labels' names.
    samples: {label values: value}.
    """
    family = GaugeMetricFamily(PREFIX + name, words, labels=tuple(labels))
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


def info(name: str, words: str, facts: Mapping[str, str]) -> Metric:
    """Return a gauge ``<name>_info`` of value 1 with the help ``words`` and labels ``facts``."""
    return labelled(f"{name}_info", words, facts, {tuple(facts.values()): 1})


def histogram(name: str, words: str, by_label: Mapping[tuple[str, ...], Histogram], label: tuple[str, ...]) -> Metric:
    """Return a histogram metric with one histogram for each tuple of label values.

    name, words: the metric's name and its help line.
    by_label: {label values: histogram}.
    label: the labels' names.
    """
    family = HistogramMetricFamily(PREFIX + name, words, labels=label)
    for values, each in by_label.items():
        family.add_metric(values, [(floatToGoString(bound), count) for bound, count in cumulative(each)], each.total)
    return family


class RunCollector(Collector):
    """Gives prometheus_client the metric families of a run.

    values: the values from the run's rows of metrics.jsonl.
    run_name: the name of the run's folder.
    live: an attribute: the function that returns the current values, or None until the run has set up
        its trainer.
    """

    def __init__(self, values: RunValues, run_name: str) -> None:
        self.values, self.run_name = values, run_name
        self.live: ReadLive | None = None
        self._build = {
            "version": megatron_rl.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "megatron_core": importlib.metadata.version("megatron-core"),
        }

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family that has a sample, each name once, in the same order at every call."""
        yield from (family for family in self._families() if family.samples)

    def _families(self) -> Iterator[Metric]:
        live = None if self.live is None else self.live()
        yield info("build", "Releases that the run is made of.", self._build)
        facts = {} if live is None else live.facts
        yield info(
            "run", "The run: its name, its model, and its degrees of parallelism.", {"run": self.run_name, **facts}
        )
        with self.values.lock:
            families = [*self._of_table(), *self._of_evaluations(), *self._of_time()]
        yield from families
        if live is not None:
            yield from of_live(live)

    def _of_table(self) -> Iterator[Metric]:
        values = self.values
        steps = CounterMetricFamily(
            f"{PREFIX}steps", "Optimizer steps of the whole run, by their kind.", labels=("kind",)
        )
        for kind in StepKind:
            steps.add_metric((kind.value,), values.steps[kind.value])
        yield steps
        for each in TABLE:
            if each.kind is Kind.GAUGE:
                yield gauge(each.name, each.help, values.values.get(each.key))
            else:  # a counter begins at 0, so that its first increase is seen
                yield counter(each.name, each.help, values.values.get(each.key, 0.0))
        yield labelled(*FUNCTION, ("function",), {(name,): value for name, value in values.functions.items()})

    def _of_evaluations(self) -> Iterator[Metric]:
        values = self.values
        for kind, (name, words) in EVAL.items():
            of_kind = {place[1:]: value for place, value in values.evaluations.items() if place[0] == kind}
            if kind in ("mean", "mean_se", "pass"):
                yield labelled(name, words, ("set", "k"), of_kind)
            else:
                yield labelled(name, words, ("set",), {(of_set,): value for (of_set, _), value in of_kind.items()})
        yield labelled(*EVAL_FUNCTION, ("set", "function"), values.function_evaluations)

    def _of_time(self) -> Iterator[Metric]:
        values, now = self.values, time.time()
        step = values.values.get("step", 0.0)
        planned = max(values.total_steps, step)
        yield gauge("planned_steps", "Optimizer steps that the run is to take.", planned)
        yield gauge("progress_ratio", "Share of these steps that are taken.", step / planned if planned else 1.0)
        yield gauge("start_timestamp_seconds", "When this process began to serve metrics.", values.started_at)
        at = values.last_step_at
        yield gauge("last_step_timestamp_seconds", "When the last optimizer step of this process ended.", at)
        since = values.started_at if at is None else at
        yield gauge(
            "last_step_age_seconds", "Seconds since that step, or since the start if there is none.", now - since
        )
        yield histogram("step_seconds", "Seconds of an optimizer step, all its stages.", {(): values.step_seconds}, ())
        by_stage = {(stage,): each for stage, each in values.stages.items()}
        yield histogram("stage_seconds", "Seconds of a stage within an optimizer step.", by_stage, ("stage",))


def of_live(live: LiveValues) -> Iterator[Metric]:
    """Yield the metrics whose values change between two steps, such as the current stage."""
    stage = stage_label(live.stage)
    stages = {(name,): float(name == stage) for name in (*STAGES, OTHER_STAGE)}
    yield labelled("stage", "Whether the first rank's main thread is in this stage now.", ("stage",), stages)
    yield gauge("stage_age_seconds", "Seconds since that stage began.", live.stage_s)
    yield gauge("rollouts_under_way", "Rollouts that were started and not taken.", live.rollouts_under_way)
    yield labelled(
        "rollout_groups",
        "Groups of these rollouts that the first rank was dealt, has generated, has scored.",
        ("state",),
        {(name,): live.groups.get(name, 0) for name in GROUPS},
    )
    yield gauge(
        "sent_weight_version", "Version of the weights that engines were sent last; below 0: none.", live.sent_version
    )
    yield counter("weight_syncs", "Weight syncs of this process.", live.weight_syncs)
    yield counter("weight_sync_seconds", "Seconds of these syncs.", live.weight_sync_s)
    at = live.checkpoint_at
    yield gauge("checkpoint_timestamp_seconds", "When the last checkpoint was whole.", at)
    yield gauge("checkpoint_age_seconds", "Seconds since then.", None if at is None else time.time() - at)
    yield from of_engines(live.engines)


def of_engines(engines: Mapping[int, EngineReading]) -> Iterator[Metric]:
    """Yield the metrics of the inference engines' values, with the engine's number as label.

    engines: {engine's number: its values}.
    """
    restarts = CounterMetricFamily(
        f"{PREFIX}engine_restarts", "How often the engine came back after it was lost.", labels=("engine",)
    )
    readings = {str(number): dataclasses.asdict(engine) for number, engine in sorted(engines.items())}
    for number, reading in readings.items():
        restarts.add_metric((number,), reading["restarts"])
    yield restarts
    for field, name, words in ENGINE_GAUGES:
        found = {(number,): float(x[field]) for number, x in readings.items() if x[field] is not None}
        yield labelled(name, words, ("engine",), found)


def registry_of(collector: RunCollector) -> CollectorRegistry:
    """Return prometheus_client's registry of the run's metrics and of the process's own figures (``process_*``)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)
    return registry
