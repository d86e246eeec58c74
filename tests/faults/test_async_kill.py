"""A run with rollouts ahead that is killed, or told to leave, while a thread generates, ends with the same bits.

It does so when it is started again. The machinery is the study's own (kill_study.py); its table of kills is made by
``python -m tests.faults.kill_study --layout streaming``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import time

import pytest

from megatron_rl.checkpoint.folder import name_of, verify, whole_checkpoints
from megatron_rl.cli import EXIT_PREEMPTED
from tests.faults.kill_study import (
    BOUND_S,
    EPOCH,
    WORLD,
    Kill,
    Whole,
    arguments_of,
    attempt,
    differences,
    generates,
    kill_once,
    make_inputs,
    study,
    whole_run,
)
from tests.patience import until
from tests.runs.command import rows_of, trained_prompts
from tests.workers.nursery import Nursery, Ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """A run that went to its end, with the inputs and arguments to make another one like it."""

    nursery: Nursery
    inputs: pathlib.Path
    whole: Whole


@pytest.fixture(scope="module")
def streaming(nursery, tmp_path_factory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("streaming")
    inputs = make_inputs(nursery, folder / "inputs")
    return Undisturbed(nursery=nursery, inputs=inputs, whole=whole_run(nursery, inputs, folder / "whole", "streaming"))


def firsts_of(run_dir: pathlib.Path) -> list[dict]:
    """Return the first row of each rollout."""
    return [row for row in rows_of(run_dir) if "async/staleness_max" in row]


def orphans() -> list[int]:
    """Return the reward workers on this host whose rank is gone."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            *words, parent, _ = path.read_bytes().split(b"\0")
        except (OSError, ValueError):  # it ended meanwhile, or says nothing
            continue
        if b"megatron_rl.reward.worker" in words and not pathlib.Path("/proc", os.fsdecode(parent)).exists():
            found.append(int(path.parent.name))
    return found


def assert_no_orphans() -> None:
    assert until(lambda: not orphans())  # a reward worker is killed with its rank


@pytest.mark.distributed
def test_a_run_ahead_that_is_killed_ends_with_the_same_bits(streaming, tmp_path):
    """A run ahead that is killed ends with the same bits.

    SIGKILL goes to one rank when half of the run's rows are written; the undisturbed run is stale, replays and asks
    again.
    """
    rows = firsts_of(streaming.whole.folder / "run")
    assert [row["async/staleness_max"] for row in rows] == [0.0, *[2.0] * (len(rows) - 1)]
    assert rows[-1]["reroll/issued"] > 2 and sum(row["replay/replaced"] for row in rows) > 2
    command = [str(tmp_path / "notes"), *arguments_of(streaming.inputs, tmp_path / "run", "streaming")]
    half, path = len(rows_of(streaming.whole.folder / "run")) // 2, tmp_path / "run" / "metrics.jsonl"
    kill = Kill(seconds=streaming.whole.seconds / 2, ranks=(0,))
    outcome = kill_once(
        kill,
        streaming.nursery,
        command,
        tmp_path,
        streaming.whole,
        when=lambda: path.exists() and path.read_text().count("\n") >= half,
    )
    assert outcome is not None and outcome.differs == () and outcome.codes == (-signal.SIGKILL, 1), outcome
    assert_no_orphans()


@pytest.mark.distributed
def test_a_signal_while_a_thread_generates_saves_what_is_ahead(streaming, tmp_path):
    """A signal while a thread generates saves the rollout ahead.

    SIGTERM goes to one rank: all leave with 75, with a checkpoint off schedule that holds the rollout ahead, and the
    same command goes on.
    """
    notes, run_dir = tmp_path / "notes", tmp_path / "run"
    command = [str(notes), *arguments_of(streaming.inputs, run_dir, "streaming", "checkpoint.save_every_rollouts=1000")]
    with attempt(streaming.nursery, command, tmp_path / "first") as ranks:
        wait_for_generation(ranks, run_dir, notes)
        ranks.forks[1].send_signal(signal.SIGTERM)
        assert ranks.wait(BOUND_S) == [EXIT_PREEMPTED] * WORLD == [75] * WORLD, ranks.said()
    start, saved = whole_checkpoints(run_dir / "checkpoints")
    folder = run_dir / "checkpoints" / name_of(saved)
    verify(folder)
    feed = json.loads((folder / "state.json").read_text())["feed"]
    assert start == 0 and list(feed["jobs"]) == [str(saved)] and feed["next_rollout"] == saved + 1, feed
    assert len(firsts_of(run_dir)) == saved
    with attempt(streaming.nursery, command, tmp_path / "second") as ranks:
        assert ranks.wait(BOUND_S) == [0] * WORLD, ranks.said()
    assert differences(streaming.whole.folder, tmp_path) == []
    assert_no_orphans()


def wait_for_generation(ranks: Ranks, run_dir: pathlib.Path, notes: pathlib.Path) -> None:
    """Wait until a rollout was trained and rank 1 has begun to generate one ahead."""
    path, ends_at = run_dir / "metrics.jsonl", time.monotonic() + BOUND_S
    while not (path.exists() and path.read_text().count("\n") > 2 and generates(notes, 1)):
        assert ranks.run() and time.monotonic() < ends_at, f"not within {BOUND_S} s\n{ranks.said()}"
        time.sleep(0.005)


@pytest.mark.long(seconds=120)
@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "seed"), [("streaming", 11), ("prefetch", 12)])
def test_eight_kills_of_a_run_ahead(nursery, tmp_path, layout, seed):
    """Eight kills of a run ahead change nothing.

    Every attempt is bounded by the study (BOUND_S). Without replay an epoch's prompts are all trained, each once.
    """
    whole, outcomes = study(nursery, 8, seed, layout, tmp_path)
    assert len(outcomes) == 8 and not any(outcome.differs for outcome in outcomes), outcomes
    assert any(outcome.ahead for outcome in outcomes) and any(outcome.resumed for outcome in outcomes), outcomes
    if layout == "prefetch":
        assert sorted(trained_prompts(whole.folder / "run")) == sorted(f"{row}@0" for row in range(EPOCH))
    assert_no_orphans()
