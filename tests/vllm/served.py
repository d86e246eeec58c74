"""vLLM behind HTTP, and settings of whole runs on it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Collection, Iterator
from concurrent.futures import Future

import psutil
import pytest

from megatron_rl.rollout.engines.replica import GenerateRequest
from megatron_rl.rollout.vllm.process_replica import ProcessReplica
from tests.patience import patient, until
from tests.runs.command import command_line
from tests.unit.rollout.misbehaving_server import unused_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_S = patient(240.0)  # 15 to 80 s where nothing else runs
ANSWER_S = patient(120.0)
KEY = "sesame-of-the-tests"
BASE = ("rollout.engine=vllm", "run.deadline_s=150", "rollout.start_s=120", "rollout.request_s=60", "optimizer.lr=1e-3")
VLLM = (*BASE, "metrics.dense_every_rollouts=1", "metrics.dense_samples=64")
SERVER_OPTIONS = ["--enforce-eager", "--dtype=float32", "--block-size=32", "--max-num-seqs=32"]
SERVER_OPTIONS += ["--no-enable-chunked-prefill", "--max-num-batched-tokens=4096"]
GAP = 1e-4  # float32, the same weights in two implementations


def engines_of(driver: int) -> list[int]:
    """Return the engine processes of the ranks that a process has started."""
    started = psutil.Process(driver).children(recursive=True)
    return [x.pid for x in started if "megatron_rl.rollout.vllm.process_main" in x.cmdline()]


@contextlib.contextmanager
def engines_killed_at_work(moments: Collection[int]) -> Iterator[list[int]]:
    """Send SIGKILL to this process's engine under its first request by the k-th weights, for each k of ``moments``.

    The engine is stopped before the request, so that it owes an answer when it ends. Yields the processes killed.
    """
    submit, versions, killed = ProcessReplica.submit, [], []

    def submit_and_kill(replica: ProcessReplica, request: GenerateRequest) -> Future:
        version = replica.weight_version
        dies = version not in versions and len(versions) + 1 in moments
        if version not in versions:
            versions.append(version)
        if not dies:
            return submit(replica, request)
        os.kill(replica.pid, signal.SIGSTOP)
        future = submit(replica, request)
        os.kill(replica.pid, signal.SIGKILL)
        killed.append(replica.pid)
        return future

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessReplica, "submit", submit_and_kill)
        yield killed


def run_killing_engines(rank: int, world: int, given: list[str], moments: tuple[int, ...]) -> tuple[int, str, int]:
    """Run the command line, and kill its engine at work by the weights of ``moments``; return also how often."""
    with engines_killed_at_work(moments) as killed:
        return *command_line(rank, world, given), len(killed)


def starts_of(log: pathlib.Path, index: int) -> list[int]:
    return [int(pid) for pid in re.findall(rf"server {index}: starting, process (\d+)", log.read_text())]


def kill(log: pathlib.Path, index: int, victim: str) -> None:
    """Send kill -9 to the API process of a server that a supervisor's log names, or to its engine's."""
    api, *others = psutil.Process(starts_of(log, index)[-1]).children(recursive=True)
    engine = next(x for x in others if "EngineCore" in x.name() or "EngineCore" in " ".join(x.cmdline()))
    (engine if victim == "engine" else api).send_signal(signal.SIGKILL)


class Served:
    """Servers of `megatron-rl serve-vllm`, ``replicas`` of them; ``options`` are vLLM's. Ends them with its block."""

    def __init__(self, model_folder: pathlib.Path, folder: pathlib.Path, *options: str, replicas: int = 2) -> None:
        self.port, self.log = unused_port(replicas), folder / "tool.log"
        command = [sys.executable, "-m", "megatron_rl.commands.serve_vllm", "--model", str(model_folder)]
        command += ["--port", str(self.port), "--replicas", str(replicas), "--log-dir", str(folder)]
        command += ["--api-key-env", "KEY_OF_THE_TESTS", "--grace-s", "5", "--", *SERVER_OPTIONS, *options]
        environment = {**os.environ, "KEY_OF_THE_TESTS": KEY, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        environment |= dict.fromkeys(("TORCHDYNAMO_DISABLE", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"), "1")
        with open(self.log, "w") as output:
            self.process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        self.urls = [f"http://127.0.0.1:{self.port + index}" for index in range(replicas)]
        self.trained = False  # whether a run has sent other weights than those of the files

    def starts(self, index: int) -> list[int]:
        """Return the process of each start of a server: the small parent that ends all of it."""
        return starts_of(self.log, index)

    def log_of(self, index: int) -> str:
        return (self.log.parent / f"server{index}.log").read_text()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        processes: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        self.process.wait(60)
        _, left = psutil.wait_procs(processes, timeout=10)
        for process in left:
            process.kill()
        assert not left, f"the supervisor left {left} behind"

    def requests_running(self, index: int) -> int:
        request = urllib.request.Request(f"{self.urls[index]}/metrics", headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            said = answer.read().decode()
        return int(float(re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", said, re.MULTILINE)[1]))


def wait_for(what: str, condition, bound_s: float = 60.0) -> None:
    assert until(condition, bound_s), f"{what} did not come within {bound_s} s"
