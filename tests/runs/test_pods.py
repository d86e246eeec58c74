"""A run of two pods by their environment alone, on one host: told to leave, and started again by another controller.

tests/kubernetes/check.py has them on networks of their own.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.patience import patient, until
from tests.runs.command import ROOT, assert_same_run
from tests.tools.processes import end
from tests.workers.environment import worker_environment

BOUND_S = patient(900.0)
pytestmark = [pytest.mark.long(seconds=90), pytest.mark.distributed]


@contextlib.contextmanager
def started(inputs: pathlib.Path, run_dir: pathlib.Path, log: pathlib.Path, **variables: str):
    """Start a pod's process in a session of its own, ended whatever happens; its output goes to a file."""
    command = [
        *(sys.executable, "-m", "megatron_rl.commands.pod", "--config", "examples/quickstart/quickstart.yaml"),
        *(f"model.hf_path={inputs}/model", f"data.train={inputs}/train.jsonl", "train.num_rollouts=8"),
        *("train.prompts_per_rollout=16", "train.samples_per_mini_batch=64", "sft.steps=5", "metrics.progress=false"),
    ]
    own = worker_environment() | {"RUN_DIR": str(run_dir), "SAVE_EVERY": "2"} | variables
    own["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    with log.open("a+") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=own, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process, lambda: log.read_text()
        finally:
            end(process)


def test_a_run_that_was_told_to_leave_and_went_on_equals_an_uninterrupted_one(arithmetic, tmp_path) -> None:
    """Two pods of a PyTorchJob leave with its code for another start; as an Indexed Job they go on to the end."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    with started(arithmetic, whole, tmp_path / "whole.log", PROCESSES="2") as (alone, said):
        assert alone.wait(BOUND_S) == 0, said()[-4000:]

    def pods(stack: contextlib.ExitStack, *each: dict[str, str]) -> list:
        return [
            stack.enter_context(started(arithmetic, run_dir, tmp_path / f"{number}.log", **variables))
            for number, variables in enumerate(each)
        ]

    latest = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    operator = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "localhost", "WORLD_SIZE": "2",
                "PET_MASTER_PORT": "29471", "MASTER_ADDR": "localhost", "MASTER_PORT": "29471",
                "EXIT_AGAIN": "143"}  # fmt: skip
    with contextlib.ExitStack() as stack:
        both = pods(stack, *(operator | {"RANK": str(node), "PET_NODE_RANK": str(node)} for node in (0, 1)))
        (head, said), (other, _) = both
        until(lambda: head.poll() is not None or latest.exists() and latest.read_text() not in ("", "0"), 900.0)
        assert head.poll() is None, said()[-4000:]
        os.kill(other.pid, signal.SIGTERM)
        assert [process.wait(BOUND_S) for process, _ in both] == [143, 143], said()[-4000:]
    indexed = {"NNODES": "2", "PROCESSES": "1", "HEAD": "localhost", "PORT": "29473"}
    with contextlib.ExitStack() as stack:
        both = pods(stack, *(indexed | {"JOB_COMPLETION_INDEX": str(node)} for node in (0, 1)))
        assert [process.wait(BOUND_S) for process, _ in both] == [0, 0], both[0][1]()[-4000:]
        assert "resumed from" in both[0][1]()
    assert_same_run(whole, run_dir)
