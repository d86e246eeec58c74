"""On SIGTERM, SIGUSR1 and SIGINT the rollout in progress is trained, all is saved, and every rank leaves with 75.

The same command goes on. Ranks are processes of their own, so that signals reach them as a scheduler's would.
"""

from __future__ import annotations

import contextlib
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from megatron_rl.checkpoint.folder import name_of, verify, whole_checkpoints
from megatron_rl.cli import EXIT_PREEMPTED
from tests.equality.saved_steps import tensors_of
from tests.faults.kill_study import BOUND_S, same_tensors
from tests.runs.command import ROOT, arguments, rows_of, timeless
from tests.workers.environment import TORCHRUN, worker_environment

ROLLOUTS, SIGNALLED_AFTER = 8, 2  # rows of the metrics: the run is in its second rollout or later
GIVEN = (
    "checkpoint.save_every_rollouts=1000",
    f"train.num_rollouts={ROLLOUTS}",
    "optimizer.schedule=cosine",
    "metrics.progress=false",
)


@pytest.fixture(scope="module")
def whole(nursery, arithmetic, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("whole")
    with nursery.ranks(2, arguments(arithmetic, folder / "run", *GIVEN), folder / "ranks") as ranks:
        assert ranks.wait(BOUND_S) == [0, 0], ranks.said()
    return folder / "run"


def wait_for_rows(run_dir: pathlib.Path, still_runs) -> None:
    path, deadline = run_dir / "metrics.jsonl", time.monotonic() + BOUND_S
    while (
        still_runs()
        and time.monotonic() < deadline
        and (not path.exists() or path.read_text().count("\n") < SIGNALLED_AFTER)
    ):
        time.sleep(0.01)


def assert_saved(run_dir: pathlib.Path) -> None:
    """Assert that the state at the start and the one after the last trained rollout are saved.

    All rows up to the latter are saved too.
    """
    found = whole_checkpoints(run_dir / "checkpoints")
    assert len(found) == 2 and found[0] == 0 and 1 <= found[1] < ROLLOUTS, found
    verify(run_dir / "checkpoints" / name_of(found[1]))
    assert len(rows_of(run_dir)) == 2 * found[1]


def assert_same_end(whole: pathlib.Path, other: pathlib.Path) -> None:
    last = pathlib.Path("checkpoints") / name_of(ROLLOUTS)
    assert same_tensors(tensors_of(whole / last), tensors_of(other / last))
    assert [timeless(x) for x in rows_of(whole)] == [timeless(x) for x in rows_of(other)]
    assert (whole / "trace.jsonl").read_text() == (other / "trace.jsonl").read_text()


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("number", "told"),
    [(signal.SIGTERM, (0, 1)), (signal.SIGUSR1, (1,)), (signal.SIGTERM, (0,)), (signal.SIGINT, (0, 1))],
)
def test_a_signal_to_any_rank_saves_and_the_same_command_goes_on(nursery, arithmetic, whole, tmp_path, number, told):
    run_dir = tmp_path / "run"
    command = arguments(arithmetic, run_dir, *GIVEN)
    with nursery.ranks(2, command, tmp_path / "first") as ranks:
        wait_for_rows(run_dir, ranks.run)
        for rank in told:
            ranks.forks[rank].send_signal(number)
        assert ranks.wait(BOUND_S) == [EXIT_PREEMPTED, EXIT_PREEMPTED] == [75, 75], ranks.said()
        assert all(
            f"rank {rank}: {signal.Signals(number).name}: the step in progress is finished" in ranks.said()
            for rank in told
        )
    assert_saved(run_dir)
    with nursery.ranks(2, command, tmp_path / "second") as ranks:
        assert ranks.wait(BOUND_S) == [0, 0], ranks.said()
    assert_same_end(whole, run_dir)


@pytest.mark.long
@pytest.mark.distributed
def test_under_torchrun_a_signal_to_the_launcher_does_the_same(arithmetic, whole, tmp_path):
    """Under torchrun a signal to the launcher does the same as one to a rank.

    The launcher passes on what it is told to handle, and ends with a code of its own.
    """
    run_dir = tmp_path / "run"
    launcher = [sys.executable, "-W", "ignore", "-m", *TORCHRUN, "2"]
    graceful = ["--shutdown-timeout", "600", "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    command = [*launcher, *graceful, "-m", "megatron_rl.train", *arguments(arithmetic, run_dir, *GIVEN)]
    for number, printed in enumerate([tmp_path / "first.txt", tmp_path / "second.txt"]):
        with contextlib.ExitStack() as held:
            out = held.enter_context(printed.open("w"))
            process = subprocess.Popen(
                command, cwd=ROOT, env=worker_environment(), stdout=out, stderr=subprocess.STDOUT
            )
            held.callback(process.wait)
            held.callback(process.kill)
            if number == 0:
                wait_for_rows(run_dir, lambda p=process: p.poll() is None)
                process.send_signal(signal.SIGUSR1)
            code = process.wait(BOUND_S)
        assert (code == 0) == (number == 1), printed.read_text()
        if number == 0:
            assert_saved(run_dir)
    assert_same_end(whole, run_dir)
