"""Real runs that are scraped while they run, at their end and after a resume, by prometheus_client's own parsers."""

import contextlib
import pathlib
import re
import shutil
import subprocess
from unittest import mock

import pytest
from prometheus_client import CollectorRegistry

from megatron_rl.cli import EXIT_CONFIG, EXIT_FAILED, EXIT_PREEMPTED
from megatron_rl.config import MetricsConfig
from megatron_rl.errors import ConfigError
from megatron_rl.observability.prometheus.server import MetricsServer
from megatron_rl.observability.prometheus.table import BY_KEY, TABLE, Kind
from tests.patience import HANG_S, patient
from tests.runs.command import (
    SAVED,
    SHARDED_KL,
    WARM,
    arguments,
    assert_same_run,
    command_line,
    copied_until,
    firsts_of,
    rows_of,
    told_to_leave,
)
from tests.scraping import GRAFANA, OPENMETRICS, Samples, ask, dashboard_expressions, sample, samples_of

SHAPE = (*SAVED, "parallel.pipeline=2", *WARM)
# Of the dashboard, what a run without these has not: a vLLM process, a KL, a GPU, held-out prompts.
ELSEWHERE = {
    *("megatron_rl_engine_requests_waiting", "megatron_rl_engine_peak_requests_running"),
    *("megatron_rl_engine_peak_requests_waiting", "megatron_rl_engine_kv_cache_usage_ratio"),
    *("megatron_rl_engine_peak_kv_cache_usage_ratio", "megatron_rl_mfu_ratio", "megatron_rl_kl_nats"),
    *("megatron_rl_eval_reward_mean", "megatron_rl_eval_pass_ratio"),
}


def scraped(rank: int, world: int, given: list[str]) -> tuple[int, str, dict[str, object]]:
    """Run the command line; return what rank 0 answered at its first row, in a rollout, and before it ended."""
    from megatron_rl.observability.metrics import MetricsWriter
    from megatron_rl.observability.prometheus.sink import PrometheusSink
    from megatron_rl.rollout.engines.embedded import TransformersEngine

    ports, found = [], {}
    start, decode, close, follow = (
        MetricsServer.start, TransformersEngine._decode, MetricsWriter.close, PrometheusSink.follow)  # fmt: skip

    def note(server):
        ports.append(server.server_port)
        start(server)

    def once(name, **headers):
        if ports and name not in found:
            found[name] = ask(ports[0], **headers)[2]

    def in_rollout(engine, *rest):
        once("in a rollout")
        return decode(engine, *rest)

    def at_start(sink, live):
        follow(sink, live)
        once("at the start")

    def at_end(writer, **how):
        once("at the end")
        once("at the end, openmetrics", Accept=OPENMETRICS)
        close(writer, **how)

    with contextlib.ExitStack() as patches:
        for owner, name, new in ((MetricsServer, "start", note), (TransformersEngine, "_decode", in_rollout),
                                 (PrometheusSink, "follow", at_start), (MetricsWriter, "close", at_end)):
            patches.enter_context(mock.patch.object(owner, name, new))
        code, said = command_line(rank, world, given)
    if ports:
        with contextlib.suppress(OSError):
            found["after the end"] = ask(ports[0])[2]
    return code, said, found


def answers(pool, folder: pathlib.Path, inputs: pathlib.Path, *overrides: str) -> dict[str, Samples]:
    """Run on two ranks with metrics served; return the samples of each scrape. Nothing answers after the end."""
    given = arguments(inputs, folder, *overrides, "metrics.prometheus_port=0")
    results = pool.run(2, scraped, given, timeout_s=240)
    assert [code for code, *_ in results] == [0, 0], results
    (_, _, found), (_, _, others) = results
    assert not others and "after the end" not in found
    return {name: samples_of(text) for name, text in found.items()}


def check_rows(samples: Samples, rows: list[dict]) -> None:
    """Compare a scrape with metrics.jsonl: gauges with the last value, counters with the sum, histograms with times."""
    for each in TABLE:
        values = [float(row[each.key]) for row in rows if each.key in row]
        found = samples.get((each.full_name, ()))
        if each.kind is Kind.SUM:
            total = 0.0
            for value in values:  # in the order of the rows, as it was added up
                total += value
            assert found == total, each
        elif values:
            assert found == values[-1], each
        else:
            assert found in (None, 0.0), each
    for kind in ("REAL", "GHOST", "HELD"):
        assert sample(samples, "steps_total", kind=kind) == sum(row["step_kind"] == kind for row in rows)
    for stage in {key[5:-2] for row in rows for key in row if key.startswith("time/")} - {"step"}:
        seconds = [row[f"time/{stage}_s"] for row in rows if row.get(f"time/{stage}_s")]
        if seconds:
            assert sample(samples, "stage_seconds_count", stage=stage) == len(seconds)
            assert sample(samples, "stage_seconds_sum", stage=stage) == pytest.approx(sum(seconds), rel=1e-12)
    assert sample(samples, "step_seconds_count") == len(rows)


def test_a_scraped_run_is_the_same_and_tells_its_rows(pool, made, arithmetic, tmp_path):
    """A run that goes on with metrics served equals the whole one without, to the bit; scrapes equal metrics.jsonl.

    Its counters begin with the checkpoint's rows. In a rollout the stage is seen, the end can be scraped when
    checkpoint and report are written, and what the dashboard asks for is there.
    """
    whole = made(2, *SHAPE, "train.num_rollouts=2")
    part, rows = copied_until(whole, tmp_path / "run", 1), rows_of(whole)
    found = answers(pool, part, arithmetic, *SHAPE, "train.num_rollouts=2")
    check_rows(found["at the start"], [row for row in rows if row.get("rollout", 1) == 1])
    assert sample(found["in a rollout"], "stage", stage="rollout") == 1
    assert sample(found["in a rollout"], "engine_requests_running", engine="0") == 16  # half of 8 prompts' 32 samples
    assert sample(found["in a rollout"], "rollouts_under_way") == 1
    check_rows(found["at the end"], rows_of(part))
    check_rows(found["at the end, openmetrics"], rows_of(part))
    end = found["at the end"]
    assert sample(end, "progress_ratio") == 1 and sample(end, "planned_steps") == len(rows)
    assert 0 <= sample(end, "checkpoint_age_seconds") < patient(HANG_S)
    facts = dict(model_family="qwen2", world_size="2", tensor="1", pipeline="2", context="1", expert="1", data="1")
    assert sample(end, "run_info", run="run", engine="transformers", dtype="float32", **facts) == 1
    assert [sample(end, "engine_up", engine=number) for number in "01"] == [1, 1]
    assert sample(end, "sent_weight_version") == firsts_of(whole)[-1]["rollout/weight_version_min"]
    names = {name for name, _ in end} | {"up"}  # which Prometheus adds
    asked = {name for _, expression in dashboard_expressions() for name in metrics_in(expression)}
    assert asked - names == ELSEWHERE
    assert_same_run(whole, part)


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:megatron_rl|process)_\w+|\bup\b", expression))


@pytest.mark.long(seconds=15)
def test_every_metric_of_a_run_has_a_name(pool, arithmetic, tmp_path):
    """A run with a KL, a sharded optimizer, held-out prompts, replay and a rollout ahead: no key is lost."""
    held_out = (f"eval.path={arithmetic / 'test.jsonl'}", "eval.every_rollouts=1")
    extra = (*SHARDED_KL, *held_out, "rollout.producer.mode=prefetch", "replay.capacity_groups=8",
             "train.num_rollouts=3", "optimizer.schedule=constant")
    found = answers(pool, tmp_path, arithmetic, *extra)["at the end"]
    rows = rows_of(tmp_path)
    check_rows(found, rows)
    lost = {key for row in rows for key in row if "/" in key and key.removesuffix("_before") not in BY_KEY}
    assert {key.split("/")[0] for key in lost} == {"time", "eval", "reward"} and not [
        key for key in lost if key.startswith("reward/") and ":" not in key]  # fmt: skip
    last = [row for row in rows if "eval/test/mean@1" in row][-1]
    assert sample(found, "eval_reward_mean", set="test", k="1") == last["eval/test/mean@1"]
    assert sample(found, "eval_pass_ratio", set="test", k="1") == last["eval/test/pass@1"]
    assert sample(found, "kl_nats") == rows[-1]["train/kl"]


@pytest.mark.long(seconds=10)
@pytest.mark.parametrize("how", ["error", "signal"])
def test_the_port_is_free_however_a_run_ends(pool, made, tmp_path, how):
    """After a reward that fails, and after a SIGTERM with a checkpoint saved; the process lives on."""
    port = free_port()
    ends = {"error": dict(code=EXIT_FAILED), "signal": dict(run=told_to_leave, more=(3,), code=EXIT_PREEMPTED)}[how]
    failing = ("reward.functions=[tests.reward_functions:broken]",) if how == "error" else ()
    made.into(tmp_path, 2, *SHAPE, *failing, f"metrics.prometheus_port={port}", **ends)
    MetricsServer(CollectorRegistry(), "127.0.0.1", port, ()).close()


def free_port() -> int:
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0, ())
    server.close()
    return server.server_port


def dry_port(rank: int, world: int, port: int) -> str:
    """Return what a dry run says of a port; "" if it can be taken."""
    from megatron_rl.trainer.dry_run import check_port

    try:
        check_port(MetricsConfig(prometheus_port=port))
    except ConfigError as error:
        return f"{error}"
    return ""


def test_a_dry_run_and_a_start_refuse_a_taken_port(pool, made, tmp_path):
    """Both name it; the start before any step, on both ranks, and the folder has no rows."""
    taken = MetricsServer(CollectorRegistry(), "127.0.0.1", 0, ())
    words = f"metrics.prometheus_port={taken.server_port}: 127.0.0.1:{taken.server_port} cannot be listened on"
    said = "".join(made.into(tmp_path, 2, f"metrics.prometheus_port={taken.server_port}", code=EXIT_CONFIG))
    assert words in said and "name another" in said and "Traceback" not in said
    assert not (tmp_path / "metrics.jsonl").exists()
    assert words in pool.run(1, dry_port, taken.server_port, timeout_s=60)[0]
    taken.close()
    assert pool.run(1, dry_port, taken.server_port, timeout_s=60) == [""]


@pytest.mark.process
@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on PATH (Debian's package prometheus has it)")
@pytest.mark.parametrize("what", ["check config prometheus.yml", "test rules alerts_test.yml"])
def test_promtool_takes_what_the_example_holds(what):
    """Prometheus' own tool parses the configuration and the rules, and sees every alert fire."""
    done = subprocess.run(["promtool", *what.split()], cwd=GRAFANA, capture_output=True, text=True, timeout=patient(60),
                          check=False)
    assert done.returncode == 0, done.stdout + done.stderr
