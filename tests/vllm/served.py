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

from megatron_rl.rollout.vllm.process_replica import ProcessReplica
from megatron_rl.rollout.vllm.replica import GenerateRequest
from tests.patience import patient, until
from tests.runs.command import command_line
from tests.unit.rollout.misbehaving_server import unused_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_S = patient(240.0)  # 15 to 80 s where nothing else runs
ANSWER_S = patient(120.0)
KEY = "sesame-of-the-tests"
VERSION = -1  # as the server says of the weights in its files
MAX_TOKENS = 512
EOS = 0
# Every one of these would change the samples if the server applied it.
GENERATION_CONFIG = {
    "eos_token_id": [EOS, 7],
    "temperature": 0.1,
    "top_k": 1,
    "top_p": 0.3,
    "repetition_penalty": 1.7,
    "max_new_tokens": 3,
}
VLLM = (
    "rollout.engine=vllm",
    "run.deadline_s=150",
    "rollout.start_s=120",
    "rollout.request_s=60",
    "metrics.dense_every_rollouts=1",
    "metrics.dense_samples=64",
    "optimizer.lr=1e-3",
)
GAP = 1e-4  # float32, the same weights in two implementations


def engines_of(driver: int) -> list[int]:
    """Return the engine processes whose argument names a rank of ours: children of the pool's workers."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            rank = int(words[-2]) if b"megatron_rl.rollout.vllm.process_main" in words else 0
            parent = (
                int((path.parents[1] / str(rank) / "stat").read_text().rpartition(")")[2].split()[1]) if rank else 0
            )
        except (OSError, ValueError):
            continue
        if parent == driver:
            found.append(int(path.parent.name))
    return found


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


class Served:
    """Servers of tools/serve_vllm.py, ``replicas`` of them; ``options`` are vLLM's."""

    def __init__(self, model_folder: pathlib.Path, folder: pathlib.Path, *options: str, replicas: int = 2) -> None:
        self.port, self.log = unused_port(replicas), folder / "tool.log"
        command = [
            sys.executable,
            str(ROOT / "tools" / "serve_vllm.py"),
            "--model",
            str(model_folder),
            "--port",
            str(self.port),
            "--replicas",
            str(replicas),
            "--api-key-env",
            "KEY_OF_THE_TESTS",
            "--log-dir",
            str(folder),
            "--grace-s",
            "5",
            "--",
            "--enforce-eager",
            "--dtype",
            "float32",
            "--block-size",
            "32",
            "--max-num-seqs",
            "32",
            "--no-enable-chunked-prefill",
            "--max-num-batched-tokens",
            "4096",
            *options,
        ]
        environment = {
            **os.environ,
            "KEY_OF_THE_TESTS": KEY,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        with open(self.log, "w") as output:
            self.process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        self.urls = [f"http://127.0.0.1:{self.port + index}" for index in range(replicas)]

    def starts(self, index: int) -> list[int]:
        """Return the process of each start of a server: the small parent that ends all of it."""
        return [int(pid) for pid in re.findall(rf"server {index}: starting, process (\d+)", self.log.read_text())]

    def log_of(self, index: int) -> str:
        return (self.log.parent / f"server{index}.log").read_text()

    def kill(self, index: int, victim: str) -> None:
        """Send kill -9 to a server's API process, or to its engine's."""
        api, *others = psutil.Process(self.starts(index)[-1]).children(recursive=True)
        engine = next(x for x in others if "EngineCore" in x.name() or "EngineCore" in " ".join(x.cmdline()))
        (engine if victim == "engine" else api).send_signal(signal.SIGKILL)

    def end(self) -> None:
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
            return int(
                float(re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)[1])
            )


def wait_for(what: str, condition, bound_s: float = 60.0) -> None:
    assert until(condition, bound_s), f"{what} did not come within {bound_s} s"
