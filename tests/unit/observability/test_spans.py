"""Checks observability/spans.py and otlp.py: what is sent, to whom, and what a run feels of it."""

import contextlib
import os
import pathlib
import random
import sys
import threading

import pytest

from megatron_rl.config import MetricsConfig
from megatron_rl.errors import ConfigError
from megatron_rl.observability import spans as spans_module
from megatron_rl.observability.metrics import MetricsWriter
from megatron_rl.observability.otlp import OtlpExporter, traces_url
from megatron_rl.observability.timer import StepTimer
from tests.collector import Collector, Sent, collector


@pytest.fixture(autouse=True)
def no_variables(monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def writing(folder: pathlib.Path, held: Collector) -> MetricsWriter:
    return MetricsWriter(folder, MetricsConfig(otel=True, otel_endpoint=held.url), 2, True)


def timer_of(writer: MetricsWriter) -> StepTimer:
    return StepTimer(lambda stage: contextlib.nullcontext(), writer.measured)


def take_step(writer: MetricsWriter, timer: StepTimer, step: int, rollout: int, kind: str = "REAL") -> dict:
    """Measure two stages and write their row."""
    for stage in ("plan", "update"):
        with timer.measure(stage):
            pass
    row = {"step": step, "step_kind": kind, "phase": "rl", "rollout": rollout, "skip/tokens_executed": 3}
    return writer.write({**row, "train/applied": 1.0, **timer.take()})


def tree(spans: list[Sent]) -> list[tuple[str, str]]:
    """Return each span's name with its parent's."""
    names = {span.number: span.name for span in spans}
    return [(span.name, names.get(span.parent, "")) for span in spans]


def test_stages_between_rollouts_follow_the_one_before(tmp_path):
    """A checkpoint lies in the rollout that it follows; before the first one it is a trace of its own."""
    with collector() as held:
        with writing(tmp_path, held) as writer:
            timer = timer_of(writer)
            for rollout in (1, 2):
                with timer.follow("checkpoint"):
                    pass
                timer.restart()
                take_step(writer, timer, rollout, rollout, kind="GHOST")
            timer.report("eval", 0.0)
        spans = held.spans()
    first, second = ([("rollout_iteration", ""), *((stage, "rollout_iteration") for stage in ("plan", "update", last))]
                     for last in ("checkpoint", "eval"))
    assert tree(spans) == [("checkpoint", ""), *first, *second]
    assert [span.facts["step_kind"] for span in spans if span.name == "update"] == ["GHOST", "GHOST"]
    assert not any(span.failed for span in spans) and len({span.trace for span in spans}) == 3


def test_a_run_that_failed_shows_the_stages_of_its_last_rollout(tmp_path):
    with collector() as held:
        with pytest.raises(RuntimeError), writing(tmp_path, held) as writer:
            timer = timer_of(writer)
            take_step(writer, timer, 1, 1)
            with timer.follow("checkpoint"):
                pass
            timer.restart()
            with timer.measure("reward"):
                pass
            with timer.measure("plan"):
                raise RuntimeError
        roots = [span for span in held.spans() if span.parent == b""]
        last = [("rollout_iteration", ""), ("reward", "rollout_iteration")]
        assert tree(held.spans())[-3:] == [("checkpoint", "rollout_iteration"), *last]
    assert [(root.facts["rollout"], root.failed) for root in roots] == [(1, False), (2, True)]


@pytest.mark.parametrize("status", [200, 503])
def test_pythons_random_state_stays_the_runs(tmp_path, status):
    """Ids and tries draw from no state that a checkpoint holds, whether a collector takes the spans or not."""
    random.seed(7)
    before = random.getstate()
    with collector(status) as held:
        with writing(tmp_path, held) as writer:
            take_step(writer, timer_of(writer), 1, 1)
        assert len(held.spans()) == 3
    assert random.getstate() == before


def test_a_collector_that_does_not_answer_ends_with_a_count(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(spans_module, "CLOSE_S", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    with collector() as held:
        held.may_answer.clear()
        with writing(tmp_path, held) as writer:
            take_step(writer, timer_of(writer), 1, 1)
        assert f"3 of 3 spans did not reach {held.url}" in caplog.text
        assert "otel-close" in {thread.name for thread in threading.enumerate()}  # which nobody waits for
        assert held.spans() == []


def test_the_packages_own_exporter_sends_the_same(monkeypatch):
    """Path, headers of the variables and body are those of ``opentelemetry-exporter-otlp-proto-http``."""
    theirs = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    with collector() as held:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{held.url}/base/")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x,team=a")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "authorization=Bearer%20y,other=b")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        provider = TracerProvider(shutdown_on_exit=False)
        for exporter in (theirs.OTLPSpanExporter(), OtlpExporter(None)):
            provider.add_span_processor(SimpleSpanProcessor(exporter))
        provider.get_tracer("x").start_span("one", attributes={"a/b": 1.5, "c": "d"}).end()
        (path, headers, body), ours = held.requests
        provider.shutdown()
    assert ours[0] == path == "/base/v1/traces" and ours[2] == body
    names = ("authorization", "other", "team", "content-type", "content-encoding")
    assert [ours[1].get(name) for name in names] == [headers.get(name) for name in names]
    assert (ours[1]["authorization"], ours[1]["content-encoding"]) == ("Bearer y", "gzip")


def test_the_setting_is_an_address_needs_the_switch_and_goes_before_the_variables(monkeypatch):
    for endpoint in ("host:4318", "ftp://host", "http://", "http://host:99999", "http://h/?a=b", "[", ""):
        with pytest.raises(ConfigError, match="metrics.otel_endpoint=.* is no address"):
            MetricsConfig(otel=True, otel_endpoint=endpoint)
    with pytest.raises(ConfigError, match="metrics.otel_endpoint=.* metrics.otel is false"):
        MetricsConfig(otel_endpoint="http://host:4318")
    assert traces_url(None) == "http://localhost:4318/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:1/")
    assert traces_url(None) == "http://a:1/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://b:2/x")
    assert traces_url(None) == "http://b:2/x" and traces_url("http://c:3") == "http://c:3/v1/traces"


def test_the_variables_of_the_resource_hold(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=a")
    with collector() as held:
        with writing(tmp_path / "run", held) as writer:
            take_step(writer, timer_of(writer), 1, 1)
        (resource,) = held.resources()
    named = {key: resource[key] for key in ("service.name", "team", "megatron_rl.run")}
    assert named == {"service.name": "mine", "team": "a", "megatron_rl.run": "run"}


@pytest.mark.parametrize(("name", "value", "said"), [
    ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "OTEL_EXPORTER_OTLP_COMPRESSION='zip' is not gzip"),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "u:secret@host:1", "address '.*' is not http://host:port"),
    ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "soon"),
])
def test_a_variable_that_cannot_be_read_is_one_sentence(tmp_path, monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"metrics.otel=true: OpenTelemetry does not start: .*{said}") as raised:
        MetricsWriter(tmp_path, MetricsConfig(otel=True), 1, True)
    assert "secret" not in str(raised.value)


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    for module in ("spans", "otlp"):
        monkeypatch.delitem(sys.modules, f"megatron_rl.observability.{module}")
    for module in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r'metrics.otel=true .* pip install "megatron_rl\[otel\]"'):
        MetricsWriter(tmp_path, MetricsConfig(otel=True), 1, True)
