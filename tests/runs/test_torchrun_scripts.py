"""The scripts of examples/torchrun as a user runs them: two launchers equal one, and a killed rank changes nothing."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.patience import patient, until
from tests.runs.command import ROOT, assert_same_run, same_tensors, weights_of
from tests.tools.processes import end
from tests.workers.environment import worker_environment

BOUND_S = patient(900.0)
STEPS = 12
pytestmark = [pytest.mark.long, pytest.mark.distributed]


@contextlib.contextmanager
def started(script: str, inputs: pathlib.Path, run_dir: pathlib.Path, *overrides: str, **variables: str):
    """Start the script in a session of its own, ended whatever happens; its output goes to a file."""
    command = [
        *("bash", f"examples/torchrun/{script}", "--config", "examples/quickstart/quickstart.yaml", "--run-dir"),
        *(str(run_dir), f"model.hf_path={inputs}/model", f"data.train={inputs}/train.jsonl"),
        *(f"train.num_rollouts={STEPS}", "train.prompts_per_rollout=16", "train.samples_per_mini_batch=64"),
        *("sft.steps=10", "metrics.progress=false", *overrides),
    ]
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = worker_environment() | {"PATH": path, "SAVE_EVERY": "3"}
    with open(f"{run_dir}.{variables.get('LOCAL_ADDR', 'out')}", "a+", encoding="utf-8") as out:
        given = dict(cwd=ROOT, env=environment | variables, start_new_session=True)
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, **given)
        try:
            yield process, lambda: pathlib.Path(out.name).read_text(encoding="utf-8")
        finally:
            end(process)


def run(*arguments, **variables) -> str:
    with started(*arguments, **variables) as (process, said):
        assert process.wait(BOUND_S) == 0, said()[-4000:]
        return said()


@pytest.fixture(scope="module")
def one_node(arithmetic, tmp_path_factory) -> pathlib.Path:
    """Return the folder of an uninterrupted run, PP=2 under one torchrun."""
    run_dir = tmp_path_factory.mktemp("runs") / "one_node"
    run("one_node.sh", arithmetic, run_dir)
    return run_dir


def test_one_process_runs_to_its_end(arithmetic, tmp_path):
    run("one_process.sh", arithmetic, tmp_path / "run", "parallel.pipeline=1")
    assert weights_of(tmp_path / "run")


def test_two_launchers_equal_one(arithmetic, one_node, tmp_path):
    common = dict(NNODES="2", PROCESSES="1", HEAD="localhost:29433", RUN_ID="two")
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(started("many_nodes.sh", arithmetic, tmp_path / "run", **common, LOCAL_ADDR=address))
            for address in ("localhost", "127.0.0.1")
        ]
        for process, said in nodes:
            assert process.wait(BOUND_S) == 0, said()[-4000:]
    assert same_tensors(weights_of(tmp_path / "run"), weights_of(one_node))


def test_elastic_restart_equals_uninterrupted(arithmetic, one_node, tmp_path):
    run_dir = tmp_path / "run"
    latest = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    with started("elastic.sh", arithmetic, run_dir) as (torchrun, said):
        until(lambda: torchrun.poll() is not None or latest.exists() and latest.read_text() not in ("", "0"), 900.0)
        assert torchrun.poll() is None, said()[-4000:]
        children = [path.read_text().split() for path in pathlib.Path(f"/proc/{torchrun.pid}/task").glob("*/children")]
        os.kill(int(sum(children, [])[-1]), signal.SIGKILL)
        assert torchrun.wait(BOUND_S) == 0, said()[-4000:]
        # by torchrun, or by the rank that lived on, whichever torchrun sees end first
        named = ("Signal 9 (SIGKILL)", "exitcode: -9", "its process ended without reporting an error (killed?)")
        assert any(x in said() for x in named) and "resumed from" in said(), said()[-4000:]
    assert_same_run(one_node, run_dir)
