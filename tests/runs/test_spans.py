"""Runs that tell an OpenTelemetry collector where their time goes, and one whose collector is not there."""

import socket
from collections import Counter

import pytest

from megatron_rl.observability.spans import FACTS
from tests.collector import Sent, collector
from tests.pairwise import quick
from tests.runs.command import WARM, assert_same_run, rows_of

NS = 1e-9  # a span's times are whole nanoseconds
STAGES = "parallel.pipeline=2"
PLAIN = {"two epochs": ("train.epochs_per_rollout=2",),
         "ghost steps": ("reward.functions=[tests.reward_functions:constant]",),
         "a rollout ahead": ("rollout.producer.mode=prefetch", "train.num_rollouts=3"),
         "in parts": ("rollout.producer.mode=streaming", "rollout.producer.min_groups=2")}


def stage_seconds(rows: list[dict]) -> dict[str, float]:
    """Return the sum of every ``time/<stage>_s`` over the rows, whole steps left out."""
    totals = Counter()
    for row in rows:
        stages = {key for key in row if key.startswith("time/")} - {"time/step_s"}
        totals.update({key.removeprefix("time/").removesuffix("_s"): row[key] for key in stages})
    return {stage: seconds for stage, seconds in totals.items() if seconds}


def check_rollout(root: Sent, children: list[Sent], rows: list[dict]) -> None:
    """Compare a rollout's spans with its rows: parents, every stage's seconds, each optimizer step."""
    assert root.parent == b"" and {span.trace for span in children} == {root.trace}
    assert all(root.start_ns <= span.start_ns and span.end_ns <= root.end_ns for span in children)
    seconds = Counter()
    for span in children:
        seconds[span.name] += span.seconds
    between = {name: seconds.pop(name) for name in ("checkpoint", "export") if name in seconds}
    expected = stage_seconds(rows)
    assert set(seconds) == set(expected) and dict(seconds) == pytest.approx(expected, abs=NS * len(children), rel=0)
    updates = [span for span in children if span.name == "update"]
    assert [span.end_ns - span.start_ns for span in updates] == [round(row["time/update_s"] * 1e9) for row in rows]
    facts = [{key: row[key] for key in FACTS["update"] if key in row} for row in rows]
    assert [span.facts for span in updates] == facts
    assert (root.facts["first_step"], root.facts["last_step"]) == (rows[0]["step"], rows[-1]["step"])
    steps_s = sum(row["time/step_s"] for row in rows)
    if between or "eval" in expected:  # which follow the last step
        assert root.seconds >= steps_s + sum(between.values()) + expected.get("eval", 0.0) - NS * len(children)
        assert root.end_ns == max(span.end_ns for span in children)
    else:
        assert root.seconds == pytest.approx(steps_s, abs=NS * (len(rows) + 2), rel=0)


def sent_to(held) -> tuple[str, ...]:
    return (STAGES, "metrics.otel=true", f"metrics.otel_endpoint={held.url}")


def test_spans_last_what_the_rows_say(made, arithmetic, tmp_path):
    """A rollout is a trace of stages as in metrics.jsonl, to a nanosecond; a step of the warm-up is a trace too."""
    extra = (*(*WARM, "train.epochs_per_rollout=2", "checkpoint.save_every_rollouts=1"),
             *(f"eval.path={arithmetic / 'test.jsonl'}", "eval.every_rollouts=1"))
    with collector() as held:
        said, _ = made.into(tmp_path, 2, *extra, *sent_to(held))
    spans, rows = held.spans(), rows_of(tmp_path)
    assert "did not" not in said and {path for path, _, _ in held.requests} == {"/v1/traces"}
    assert {resource["megatron_rl.run"] for resource in held.resources()} == {tmp_path.name}
    assert len({span.number for span in spans}) == len(spans)
    roots = [span for span in spans if span.parent == b""]
    of_root = {root.number: [span for span in spans if span.parent == root.number] for root in roots}
    assert sum(1 + len(children) for children in of_root.values()) == len(spans)
    iterations = [root for root in roots if root.name == "rollout_iteration"]
    assert [root.facts["rollout"] for root in iterations] == [1, 2]
    for root in iterations:
        check_rollout(root, of_root[root.number], [row for row in rows if row.get("rollout") == root.facts["rollout"]])
    assert [sum(x.name == "checkpoint" for x in of_root[root.number]) for root in iterations] == [1, 1]
    assert [x.name for x in of_root[iterations[-1].number]][-2:] == ["export", "checkpoint"]
    for root, row in zip([root for root in roots if root.name == "warmup_step"], rows[:2], strict=True):
        (update,) = [span for span in of_root[root.number] if span.name == "update"]
        assert update.seconds == pytest.approx(row["time/update_s"], abs=NS, rel=0)
        assert root.end_ns - root.start_ns >= round(row["time/step_s"] * 1e9) - 1


@pytest.mark.parametrize("name", quick(PLAIN, "a rollout ahead"))
def test_a_rollout_lasts_its_steps(made, tmp_path, name):
    """Where nothing follows a rollout's steps, its span lasts the sum of ``time/step_s``."""
    with collector() as held:
        made.into(tmp_path, 2, "train.export_last=false", *PLAIN[name], *sent_to(held))
    spans, rows = held.spans(), rows_of(tmp_path)
    kinds = {span.facts["step_kind"] for span in spans if span.name == "update"}
    assert kinds == ({"GHOST"} if name == "ghost steps" else {"REAL"})
    roots = [span for span in spans if span.parent == b""]
    assert {root.name for root in roots} == {"rollout_iteration"}
    assert [root.facts["rollout"] for root in roots] == sorted({row["rollout"] for row in rows})
    for root in roots:
        own = [row for row in rows if row["rollout"] == root.facts["rollout"]]
        check_rollout(root, [span for span in spans if span.parent == root.number], own)


def test_a_collector_that_is_not_there_changes_nothing(made, tmp_path):
    """A run ends with the weights and the rows of one without spans, warns once, and counts what was lost."""
    with socket.socket() as taken:  # bound and not listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        lost, _ = made.into(tmp_path / "lost", 2, STAGES, "metrics.otel=true", f"metrics.otel_endpoint={endpoint}")
    with collector(status=503) as held:
        refused, _ = made.into(tmp_path / "refused", 2, *sent_to(held))
    num_spans = len(held.spans())
    assert num_spans > 10
    for name, said in (("lost", lost), ("refused", refused)):
        assert_same_run(made(2, STAGES), tmp_path / name)
        assert said.count("did not take spans, and the run goes on without them") == 1
        assert f"{num_spans} of {num_spans} spans did not reach http://127.0.0.1" in said
