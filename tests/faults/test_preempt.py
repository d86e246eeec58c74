"""On a signal the rollout in progress is trained, all is saved, every rank leaves with 75, and the command goes on."""

import contextlib
import pathlib
import signal
import subprocess
import sys

import pytest

from megatron_rl.checkpoint.folder import name_of, verify, whole_checkpoints
from megatron_rl.cli import EXIT_PREEMPTED
from tests.faults.kill_study import BOUND_S, assert_same_end
from tests.patience import until
from tests.runs.command import ROOT, arguments, ended, rows_of, told_to_leave
from tests.workers.environment import TORCHRUN, worker_environment

ROLLOUTS, SIGNALLED_AFTER = 8, 2  # rows of the metrics: the run is in its second rollout or later
GIVEN = (
    "checkpoint.save_every_rollouts=1000", f"train.num_rollouts={ROLLOUTS}", "optimizer.schedule=cosine",
    "metrics.progress=false",
)


@pytest.fixture(scope="module")
def whole(pool, arithmetic, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    ended(pool, 2, arguments(arithmetic, folder, *GIVEN))
    return folder


def assert_saved(run_dir: pathlib.Path) -> None:
    """Assert that the start and the last trained rollout are saved, with all rows up to the latter."""
    found = whole_checkpoints(run_dir / "checkpoints")
    assert len(found) == 2 and found[0] == 0 and 1 <= found[1] < ROLLOUTS, found
    verify(run_dir / "checkpoints" / name_of(found[1]))
    assert len(rows_of(run_dir)) == 2 * found[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "told"),
    [(signal.SIGTERM, (0, 1)), (signal.SIGUSR1, (1,)), (signal.SIGTERM, (0,)), (signal.SIGINT, (0, 1))],
)
def test_a_signal_to_any_rank_saves_and_the_same_command_goes_on(pool, arithmetic, whole, tmp_path, number, told):
    command = arguments(arithmetic, tmp_path, *GIVEN)
    ended(pool, 2, command, 3, number, told, run=told_to_leave, code=EXIT_PREEMPTED)
    assert_saved(tmp_path)
    ended(pool, 2, command)
    assert_same_end(whole, tmp_path, ROLLOUTS)


@pytest.mark.long
@pytest.mark.distributed
def test_under_torchrun_a_signal_to_the_launcher_does_the_same(arithmetic, whole, tmp_path):
    """The launcher passes on what it is told to handle, and ends with a code of its own."""
    run_dir = tmp_path / "run"
    launcher = [sys.executable, "-W", "ignore", "-m", *TORCHRUN, "2"]
    graceful = ["--shutdown-timeout", "600", "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    command = [*launcher, *graceful, "-m", "megatron_rl.train", *arguments(arithmetic, run_dir, *GIVEN)]
    rows, printed = run_dir / "metrics.jsonl", tmp_path / "printed"
    for signalled in (True, False):
        with contextlib.ExitStack() as held:
            out = held.enter_context(printed.open("w"))
            given = dict(cwd=ROOT, env=worker_environment(), stdout=out, stderr=subprocess.STDOUT)
            process = held.enter_context(subprocess.Popen(command, **given))
            held.callback(process.kill)
            if signalled:
                assert until(lambda: rows.exists() and rows.read_text().count("\n") >= SIGNALLED_AFTER)
                process.send_signal(signal.SIGUSR1)
            code = process.wait(BOUND_S)
        assert (code != 0) == signalled, printed.read_text()
        if signalled:
            assert "rank 0: SIGUSR1: the step in progress is finished" in printed.read_text()
            assert_saved(run_dir)
    assert_same_end(whole, run_dir, ROLLOUTS)
