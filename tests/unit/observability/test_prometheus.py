"""Metrics as Prometheus reads them: values, names, bounds of series and connections, keys, the port."""

import collections
import json
import logging
import math
import re
import socket
import sys
import threading
import time

import pytest
from prometheus_client import CollectorRegistry

from megatron_rl.config import Config, MetricsConfig
from megatron_rl.errors import ConfigError
from megatron_rl.observability.metrics import METRICS_FILE, MetricsWriter
from megatron_rl.observability.prometheus import server as serving
from megatron_rl.observability.prometheus.collector import ENGINE_GAUGES
from megatron_rl.observability.prometheus.live import EngineReading, LiveValues
from megatron_rl.observability.prometheus.server import MetricsServer
from megatron_rl.observability.prometheus.table import TABLE, Kind, stage_label
from megatron_rl.observability.prometheus.values import BUCKETS
from tests.patience import until
from tests.scraping import GRAFANA, OPENMETRICS, ask, dashboard_expressions, sample, samples_of, scrape

CONFIG = {"reward": {"functions": ["mine:score"]}, "eval": {"path": "x", "name": "held out", "sets": {}}}
ENGINE = dict(number=None, is_up=True, weight_version=7, restarts=2, running=5, waiting=1, kv_cache_usage=0.5)
LIVE = LiveValues(facts={"model_family": "qwen2", "tensor": "2"}, stage="rollout", stage_s=3.5, rollouts_under_way=2,
                  groups={"asked": 8, "generated": 3, "scored": 1}, sent_version=7, weight_syncs=4,
                  weight_sync_s=0.5, checkpoint_at=100.0, engines={
                      0: EngineReading(**ENGINE, most_running=6, most_waiting=2, most_kv_cache_usage=0.75),
                      3: EngineReading(number=None, is_up=False, weight_version=-1, restarts=0)})


def row(step: int, kind: str = "REAL", **metrics: float) -> dict[str, object]:
    named = {key.replace("__", "/"): value for key, value in metrics.items()}
    return {"step": step, "step_kind": kind, "phase": "rl", "weight_version": step, "rollout": 1} | named


@pytest.fixture
def opened(tmp_path, caplog, monkeypatch):
    """Return a function that opens a writer whose metrics are served, and its port; all are closed at the end."""
    monkeypatch.setattr(serving, "LOOK_S", 0.01)
    writers = []

    def open_one(resumed=None, **settings):
        with caplog.at_level(logging.INFO, "megatron_rl.observability.prometheus.sink"):
            config = MetricsConfig(**{"prometheus_port": 0, **settings})
            writer = MetricsWriter(tmp_path / "a run", config, 10, True, resumed, config=CONFIG)
        writers.append(writer)
        return writer, int(re.findall(r"metrics for Prometheus: http://[^ ]*:(\d+)/metrics", caplog.text)[-1])

    yield open_one
    for writer in writers:
        writer.close()


def test_values_are_those_of_the_rows(opened):
    """A gauge is the last value, a counter the sum; both formats say the same, and every name has HELP and TYPE."""
    writer, port = opened()
    held = {"eval/held out/mean@1": 0.5, "eval/held out/pass@2": 0.75, "eval/held out/mean@1_se": 0.1,
            "eval/held out/mine:score": 0.25, "eval/held out/mean@1_before": 0.125, "reward/mine:score": 1 / 3}
    writer.write(row(3, skip__tokens_executed=100, reward__mean=0.1, time__rollout_s=2.0, time__step_s=4.0) | held)
    writer.write(row(4, "GHOST", skip__tokens_executed=20, time__update_s=0.02, time__rollout_s=0.0, time__step_s=0.5))
    writer.measured("checkpoint", 0.0, 70.0)
    writer.measured("update", 0.0, 0.02)  # which its row holds
    found = scrape(port)
    expected = {"step": 4, "weight_version": 4, "rollouts_total": 1, "tokens_executed_total": 120, "reward_mean": 0.1,
                "unreal_steps_total": 1, "planned_steps": 10, "progress_ratio": 0.4, "step_seconds_count": 2,
                "step_seconds_sum": 4.5}
    assert {name: sample(found, name) for name in expected} == expected
    assert [sample(found, "steps_total", kind=kind) for kind in ("REAL", "GHOST", "HELD")] == [1, 1, 0]
    assert sample(found, "function_reward_mean", function="mine:score") == 1 / 3
    of_set = {"set": "held out"}
    assert sample(found, "eval_reward_mean", **of_set, k="1") == 0.5  # and not the one before the step
    assert sample(found, "eval_pass_ratio", **of_set, k="2") == 0.75
    assert sample(found, "eval_function_reward_mean", **of_set, function="mine:score") == 0.25
    counts = {stage: sample(found, "stage_seconds_count", stage=stage) for stage in ("rollout", "update", "checkpoint")}
    assert counts == {"rollout": 1, "update": 1, "checkpoint": 1}  # no time is no stage
    for bound in BUCKETS:
        le = f"{bound:g}" if bound % 1 else f"{bound:.1f}"
        assert sample(found, "stage_seconds_bucket", stage="checkpoint", le=le) == (bound >= 70)
    status, kind, text = ask(port, Accept=OPENMETRICS)
    assert status == 200 and kind.startswith("application/openmetrics-text; version=1.0.0")
    assert _timeless(samples_of(text)) == _timeless(found)
    plain = ask(port)[2]
    named = {name for line in plain.splitlines() if line[0] != "#" for name in re.findall(r"^\w+", line)}
    for name in named:
        bare = re.sub(r"_(bucket|sum|count)$", "", name) if "_seconds_" in name else name
        assert f"# HELP {bare} " in plain and f"# TYPE {bare} " in plain, name


def _timeless(samples):
    moving = re.compile(r"process_|megatron_rl_.*_age_seconds")
    return {key: value for key, value in samples.items() if not moving.match(key[0])}


def test_what_holds_between_steps_is_served(opened):
    """Stage, queue, engines, checkpoint; engines that do not say how full they are have no such sample."""
    writer, port = opened()
    writer.follow(lambda: LIVE)
    found = scrape(port)
    stages = {dict(labels)["stage"]: value for (name, labels), value in found.items() if name == "megatron_rl_stage"}
    assert stages.pop("rollout") == 1 and not any(stages.values()) and "other" in stages
    assert sample(found, "run_info", run="a run", **LIVE.facts) == 1
    assert sample(found, "stage_age_seconds") == 3.5 and sample(found, "rollout_groups", state="generated") == 3
    assert sample(found, "checkpoint_age_seconds") == pytest.approx(time.time() - 100, abs=60)
    assert sample(found, "engine_restarts_total", engine="0") == 2
    assert [sample(found, "engine_up", engine=number) for number in ("0", "3")] == [1, 0]
    assert sample(found, "engine_peak_kv_cache_usage_ratio", engine="0") == 0.75
    assert ("megatron_rl_engine_requests_running", (("engine", "3"),)) not in found


def test_odd_keys_make_no_series(opened):
    """5,000 keys that the table lacks, of each kind, change nothing but a set's bounded values of k."""
    writer, port = opened()
    writer.write(row(1))
    before = scrape(port)
    odd = {f"{kind}{i}{end}": 1.0 for i in range(1000) for kind, end in (
        ("odd/", ""), ("reward/f", ""), ("eval/set", "/mean@1"), ("eval/held out/f", ""), ("train/\n\"}{", ""))}
    writer.write(row(2) | odd | {f"eval/held out/pass@{i}": 1.0 for i in range(1000)})
    writer.write(row(3) | {f"time/odd{i}_s": 1.0 for i in range(1000)})
    grown = set(scrape(port)) - set(before)
    assert len([key for key in grown if key[0] == "megatron_rl_eval_pass_ratio"]) == 32
    stages = {labels for name, labels in grown if name.startswith("megatron_rl_stage_seconds_c")}
    assert stages == {(("stage", "other"),)}
    assert len(grown) < 32 + 25


def test_values_that_are_not_finite_are_spelled_as_prometheus_does(opened):
    writer, port = opened()
    writer.write(row(1, train__grad_norm=math.inf, train__loss=math.nan, train__kl=-math.inf, time__step_s=math.nan))
    text = ask(port)[2]
    for line in ("gradient_norm +Inf", "loss NaN", "kl_nats -Inf", "step_seconds_count 0.0"):
        assert f"\nmegatron_rl_{line}\n" in text
    samples_of(text)


def test_a_run_that_goes_on_counts_on(opened, tmp_path):
    """Counters begin with the rows up to the checkpoint; the age of the last step with the new start."""
    writer, _ = opened()
    writer.write(row(1, skip__tokens_dropped=7, time__step_s=1.5))
    writer.write(row(2, "GHOST", skip__tokens_dropped=5, time__step_s=0.5))
    state = writer.state()
    writer.write(row(3, skip__tokens_dropped=1000))
    writer.close()
    rows = (tmp_path / "a run" / METRICS_FILE).read_text().splitlines(keepends=True)
    (tmp_path / "a run" / METRICS_FILE).write_text("".join(rows[:2]))  # as a checkpoint after step 2 cuts it back
    again, port = opened(state)
    found = scrape(port)
    assert [sample(found, name) for name in ("tokens_dropped_total", "step", "unreal_steps_total")] == [12, 2, 1]
    assert sample(found, "step_seconds_sum") == 2.0 and sample(found, "last_step_age_seconds") < 1000
    assert ("megatron_rl_last_step_timestamp_seconds", ()) not in found
    again.write(row(3, skip__tokens_dropped=1))
    assert sample(scrape(port), "tokens_dropped_total") == 13


def test_a_key_is_asked_for_and_never_told(opened, monkeypatch, caplog):
    """Each key of the variable opens /metrics, others do not; /healthz needs none, and no line of the log has one."""
    monkeypatch.setenv("SCRAPE_KEYS", "first-secret, zweiter-schlüssel")
    _, port = opened(prometheus_key_env="SCRAPE_KEYS")
    for given in ("Bearer first-secret", "bearer  first-secret", "Bearer zweiter-schlüssel".encode().decode("latin-1")):
        assert ask(port, Authorization=given)[0] == 200, given
    for given in ("Bearer wrong", "first-secret", "Basic first-secret", "Bearer ", "Bearer first-secret,"):
        status, _, text = ask(port, Authorization=given)
        assert status == 401 and "secret" not in text
    assert ask(port)[0] == 401 and ask(port, "/healthz")[::2] == (200, "ok\n")
    assert "secret" not in caplog.text and "with a key" in caplog.text
    monkeypatch.delenv("SCRAPE_KEYS")
    with pytest.raises(ConfigError, match="metrics.prometheus_key_env=SCRAPE_KEYS .* holds no key"):
        opened(prometheus_key_env="SCRAPE_KEYS")


def test_only_these_two_paths_are_answered_and_only_by_own_names(opened):
    _, port = opened()
    assert [ask(port, path)[0] for path in ("/metrics?name[]=x", "/healthz", "/", "/metrics/")] == [
        200, 200, 404, 404]  # fmt: skip
    assert ask(port, method="POST")[0] == ask(port, method="PUT")[0] == 501
    assert [ask(port, Host=host)[0] for host in (f"localhost:{port}", "[::1]", "run.example", "127.0.0.1.example")] == [
        200, 200, 403, 403]  # fmt: skip
    assert ask(port, Accept="application/openmetrics-text; version=x\x01")[0] == 200


def test_a_taken_port_is_named_at_the_start(opened, tmp_path):
    """The error names the setting, the port and the way out, and leaves the folder's records as they are."""
    _, port = opened()
    for address in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(ConfigError, match=rf"metrics.prometheus_port={port}: .* 0 for any free one"):
            MetricsWriter(tmp_path, MetricsConfig(prometheus_port=port, prometheus_address=address), 1, True)
    with pytest.raises(ConfigError, match="metrics.prometheus_address='no such host'"):
        MetricsWriter(tmp_path, MetricsConfig(prometheus_port=0, prometheus_address="no such host"), 1, True)
    assert not (tmp_path / METRICS_FILE).exists()


@pytest.mark.parametrize("settings, said", [
    (dict(prometheus_address="::"), "prometheus_address='::' has no effect: metrics.prometheus_port=null"),
    (dict(prometheus_key_env="KEY"), "prometheus_key_env='KEY' has no effect: metrics.prometheus_port=null"),
    (dict(prometheus_port=1, prometheus_address=" "), "prometheus_address=' ' is no address"),
    (dict(prometheus_port=65536), "metrics.prometheus_port=65536 must be at least 0 and at most 65535, or null"),
])  # fmt: skip
def test_settings_that_cannot_be_served_are_refused(settings, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        Config(metrics=MetricsConfig(**settings))


def test_the_port_is_free_after_the_run_and_after_an_error(opened, tmp_path, monkeypatch):
    """Whether the run ends, fails, or cannot open its records or another sink: the port can be taken again."""
    writer, port = opened()
    assert ask(port)[0] == 200
    writer.__exit__(RuntimeError, RuntimeError("a step failed"), None)
    _, again = opened(prometheus_port=port)
    assert again == port
    free = MetricsServer(CollectorRegistry(), "127.0.0.1", 0, ())
    number = free.server_port
    free.close()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / METRICS_FILE).mkdir()  # is no file
    settings, state = MetricsConfig(prometheus_port=number), {"ghost_steps": 0, "last_step": -1}
    with pytest.raises(OSError):
        MetricsWriter(tmp_path / "b", settings, 1, True, state)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb cannot be imported"):
        MetricsWriter(tmp_path / "c", MetricsConfig(prometheus_port=number, wandb_project="p"), 1, True)
    MetricsServer(CollectorRegistry(), "127.0.0.1", number, ()).close()


def test_slow_and_silent_clients_hold_nothing(opened, monkeypatch):
    """Twice as many silent connections as are kept do not keep a scrape waiting, and all end by themselves."""
    writer, port = opened()
    threads = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * serving.MOST_CONNECTIONS)]
    for each in silent[::2]:
        each.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
    assert ask(port)[0] == 200
    monkeypatch.setattr(serving, "REQUEST_S", 0.05)  # from now on: nobody asks any more
    assert until(lambda: threading.active_count() <= threads), "a thread of a silent client stays"
    assert all(_ended(each) for each in silent)
    # a client that stays silent until the run's end does not hold that either
    monkeypatch.setattr(serving, "REQUEST_S", 1e6)
    monkeypatch.setattr(serving, "GOODBYE_S", 0.05)
    last = socket.create_connection(("127.0.0.1", port))
    assert until(lambda: threading.active_count() > threads)
    writer.close()
    assert _ended(last) and until(lambda: threading.active_count() < threads)
    with pytest.raises(OSError):
        ask(port)


def _ended(connection: socket.socket) -> bool:
    """Return whether the server ended a connection, perhaps after an answer to a request that broke off."""
    connection.settimeout(60)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        return True
    return True


def test_the_table_names_every_metric_once():
    keys, names = [each.key for each in TABLE], [each.full_name for each in TABLE]
    assert len(set(keys)) == len(keys) and len(set(names)) == len(names)
    # base units, and no counter without its suffix (prometheus.io/docs/practices/naming)
    odd = re.compile(r"_(ms|s|share|percent|mb|kb|count)$")
    assert not [name for name in names if odd.search(name) or not re.fullmatch(r"megatron_rl_[a-z][a-z0-9_]*", name)]
    assert all(each.full_name.endswith("_total") == (each.kind is not Kind.GAUGE) for each in TABLE)
    assert stage_label("between stages") == "between" and stage_label("loss") == "loss" and stage_label("x") == "other"


def test_the_documents_name_only_what_is_served(opened):
    """Every megatron_rl_ metric of the page and of the alerts is one that a run with all features serves."""
    writer, port = opened()
    everything = {each.key: 1.0 for each in TABLE if each.key not in ("step", "weight_version", "rollout")}
    held = {f"eval/held out/{key}": 1.0 for key in (
        "mean@1", "mean@1_se", "pass@1", "mine:score", "truncated_share", "response_tokens_mean", "excluded", "errors",
        "error_share")}  # fmt: skip
    writer.write(row(1) | everything | held | {"time/step_s": 1.0, "time/update_s": 1.0, "reward/mine:score": 1.0})
    writer.follow(lambda: LIVE)
    served = {name for name, _ in scrape(port)}
    served |= {name.removesuffix("_bucket") for name in served}  # a histogram's own name
    assert {each.full_name for each in TABLE} <= served
    assert {f"megatron_rl_{name}" for _, name, _ in ENGINE_GAUGES} <= served
    pages = [(GRAFANA.parents[1] / "docs" / "monitoring.md").read_text(), (GRAFANA / "alerts.yml").read_text()]
    pages += [(GRAFANA / "README.md").read_text(), *(expression for _, expression in dashboard_expressions())]
    named = {name for page in pages for name in re.findall(r"\bmegatron_rl_\w+(?![\w/.])", page)}
    assert len(named) > 60 and not {x for x in named if not x.endswith("_")} - served


def test_the_dashboard_can_be_imported():
    """Panels have numbers of their own, places that do not overlap, and data sources and variables by name."""
    board = json.loads((GRAFANA / "megatron_rl.json").read_text())
    assert board["schemaVersion"] >= 36 and board["uid"] and board["title"]
    variables = {each["name"]: each["type"] for each in board["templating"]["list"]}
    assert variables == {"datasource": "datasource", "run": "query", "instance": "query"}
    panels = board["panels"]
    assert max(collections.Counter(panel["id"] for panel in panels).values()) == 1
    cells = collections.Counter()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells.update((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"]))
    assert max(cells.values()) == 1
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows == ["Progress", "Signal and skip", "Time by stage", "Rollouts and engines", "Learning", "Health"]
    sources = {json.dumps(panel["datasource"]) for panel in panels if panel["type"] != "row"}
    assert sources == {'{"type": "prometheus", "uid": "${datasource}"}'}


def test_every_expression_is_promql():
    """Of the dashboard and of the alerts, by a parser of the language."""
    promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed (the extra dev)")
    import yaml

    rules = yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"][0]["rules"]
    for title, expression in [*dashboard_expressions(), *((each["alert"], each["expr"]) for each in rules)]:
        selected = []
        promql.walk(promql.parse(expression), selected.append)
        assert any(isinstance(each, promql.VectorSelector) for each in selected), title
