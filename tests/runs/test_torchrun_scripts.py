"""The scripts of examples/torchrun, run as a user runs them, on the quickstart's model.

Two launchers equal one, and a killed rank changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest
from safetensors import safe_open

from tests.patience import patient
from tests.workers.environment import worker_environment

ROOT = pathlib.Path(__file__).parents[2]
BOUND_S = patient(900.0)
STEPS = 12
pytestmark = [pytest.mark.long, pytest.mark.distributed]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("inputs")
    subprocess.run(
        [sys.executable, "examples/quickstart/prepare.py", "--out", str(folder), "--seed", "0"],
        cwd=ROOT,
        timeout=BOUND_S,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder


@contextlib.contextmanager
def started(script: str, inputs: pathlib.Path, run_dir: pathlib.Path, *overrides: str, **variables: str):
    """Start the script in a session of its own, ended whatever happens; its output goes to a file."""
    command = [
        "bash",
        f"examples/torchrun/{script}",
        "--config",
        "examples/quickstart/quickstart.yaml",
        "--run-dir",
        str(run_dir),
        f"model.hf_path={inputs}/model",
        f"data.train={inputs}/train.jsonl",
        f"train.num_rollouts={STEPS}",
        "train.prompts_per_rollout=16",
        "train.samples_per_mini_batch=64",
        "sft.steps=10",
        "metrics.progress=false",
        *overrides,
    ]
    environment = worker_environment() | {
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "SAVE_EVERY": "3",
    }
    with open(f"{run_dir}.{variables.get('LOCAL_ADDR', 'out')}", "a+", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment | variables, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process, lambda: pathlib.Path(out.name).read_text(encoding="utf-8")
        finally:
            ranks = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for rank in ranks:  # torchrun starts each in a session of its own
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()
            process.wait()


def run(*arguments, **variables) -> str:
    with started(*arguments, **variables) as (process, said):
        assert process.wait(BOUND_S) == 0, said()[-4000:]
        return said()


def weights(run_dir: pathlib.Path) -> dict[str, bytes]:
    (path,) = run_dir.glob("checkpoints/step_*/hf/model.safetensors")
    with safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 (not a dict)


def rl_rows(run_dir: pathlib.Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["rollout"], row["reward/mean"]) for row in rows if row["phase"] == "rl" and "reward/mean" in row]


@pytest.fixture(scope="module")
def one_node(inputs, tmp_path_factory) -> pathlib.Path:
    """Return the folder of an uninterrupted run, PP=2 under one torchrun."""
    run_dir = tmp_path_factory.mktemp("runs") / "one_node"
    run("one_node.sh", inputs, run_dir)
    return run_dir


def test_one_process_runs_to_its_end(inputs, tmp_path):
    run("one_process.sh", inputs, tmp_path / "run", "parallel.pipeline=1")
    assert weights(tmp_path / "run")


def test_two_launchers_equal_one(inputs, one_node, tmp_path):
    common = dict(NNODES="2", PROCESSES="1", HEAD="localhost:29433", RUN_ID="two")
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(started("many_nodes.sh", inputs, tmp_path / "run", **common, LOCAL_ADDR=address))
            for address in ("localhost", "127.0.0.1")
        ]
        for process, said in nodes:
            assert process.wait(BOUND_S) == 0, said()[-4000:]
    assert weights(tmp_path / "run") == weights(one_node)


def test_elastic_restart_equals_uninterrupted(inputs, one_node, tmp_path):
    run_dir = tmp_path / "run"
    latest = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    with started("elastic.sh", inputs, run_dir) as (torchrun, said):
        deadline = time.monotonic() + BOUND_S
        while not (latest.exists() and latest.read_text() not in ("", "0")):
            assert torchrun.poll() is None and time.monotonic() < deadline, said()[-4000:]
            time.sleep(0.05)
        children = [path.read_text().split() for path in pathlib.Path(f"/proc/{torchrun.pid}/task").glob("*/children")]
        os.kill(int(sum(children, [])[-1]), signal.SIGKILL)
        assert torchrun.wait(BOUND_S) == 0, said()[-4000:]
        # by torchrun, or by the rank that lived on, whichever torchrun sees end first
        named = ("Signal 9 (SIGKILL)", "exitcode: -9", "its process ended without a word (killed?)")
        assert any(x in said() for x in named) and "resumed from" in said(), said()[-4000:]
    assert weights(run_dir) == weights(one_node)
    assert rl_rows(run_dir) == rl_rows(one_node)
