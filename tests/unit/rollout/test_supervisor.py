"""The supervisor of vLLM servers, with real processes and a stand-in for vLLM."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatron_rl.commands import serve_vllm
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.vllm.server_command import example, server_command, server_environment
from megatron_rl.rollout.vllm.supervisor import check_exposure, is_loopback, split_devices, visible_devices
from tests.patience import HANG_S, patient, until
from tests.unit.rollout.misbehaving_server import unused_port

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).resolve().parents[3]
BOUND_S = patient(HANG_S)


def is_alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Tool:
    """`megatron-rl serve-vllm` as a process, and the files that its stand-in servers leave."""

    def __init__(self, folder: pathlib.Path, arguments: tuple[str, ...], variables: dict[str, str]) -> None:
        self.folder, self.port = folder, unused_port(2)
        self.output = folder / "tool.log"
        own = f"--model M --port {self.port} --module tests.unit.rollout.stand_in_server --grace-s 1".split()
        own += ["--log-dir", str(folder / "logs")]
        command = [sys.executable, "-m", "megatron_rl.commands.serve_vllm", *own, *arguments]
        environment = {**os.environ, "STAND_IN_FOLDER": str(folder), "CUDA_VISIBLE_DEVICES": "", **variables}
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)

    def started(self, index: int = 0) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{self.port + index}-*.json"))]

    def pids(self) -> list[int]:
        return [pid for path in self.folder.glob("*.json") for pid in json.loads(path.read_text())["pids"]]

    def said(self) -> str:
        return self.output.read_text()

    def wait_ready(self, count: int = 1) -> None:
        """Wait until servers were ready so often, those that were started again counted anew."""
        assert until(lambda: self.said().count("ready after") == count), self.said()

    def wait_all_gone(self) -> None:
        assert until(lambda: not any(is_alive(pid) for pid in self.pids())), self.said()

    def end(self, number: int) -> None:
        """Ask it to end, and wait until it has, with every server."""
        self.process.send_signal(number)
        assert self.process.wait(BOUND_S) == 0
        self.wait_all_gone()


@contextlib.contextmanager
def tool(folder: pathlib.Path, *arguments: str, **variables: str) -> Iterator[Tool]:
    running = Tool(folder, arguments, variables)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
        try:
            running.process.wait(BOUND_S)
        finally:
            for pid in [running.process.pid, *running.pids()]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_killed_server_is_started_again_and_all_end_with_the_supervisor(tmp_path):
    with tool(tmp_path, "--replicas", "2") as running:
        running.wait_ready(2)
        api, engine = running.started()[0]["pids"]
        os.kill(api, signal.SIGKILL)
        running.wait_ready(3)
        assert "server 0: ended with exit code 137 (signal 9); restart 1 of 5 in 600 s" in running.said()
        # a process that the killed server left behind would hold the GPU's memory
        assert until(lambda: not is_alive(engine))
        assert len(running.started(0)) == 2 and len(running.started(1)) == 1
        running.end(signal.SIGTERM)
        assert "asked to end: ending all servers" in running.said()


def test_stubborn_servers_end_when_the_supervisor_is_killed_and_after_their_grace(tmp_path):
    with tool(tmp_path, "--replicas", "2", STAND_IN_DIES="stubborn") as running:
        running.wait_ready(2)
        running.process.kill()
        running.process.wait(BOUND_S)
        running.wait_all_gone()
        assert len(running.pids()) == 4
    with tool(tmp_path, STAND_IN_DIES="stubborn") as running:
        running.wait_ready()
        running.end(signal.SIGINT)


def test_restarts_are_bounded_the_log_is_shown_and_a_server_never_healthy_counts_as_dead(tmp_path):
    with tool(tmp_path, "--max-restarts", "2", STAND_IN_DIES="at once") as running:
        assert running.process.wait(BOUND_S) == 1
        said = running.said()
    assert said.count("starting, process") == 3 and "restart 2 of 2 in 600 s" in said
    assert "ended with exit code 3, after 2 restarts in 600 s (--max-restarts 2): ending all servers" in said
    assert f"stand-in server of port {running.port}: no memory left" in said
    with tool(tmp_path, "--max-restarts", "0", "--ready-s", "1", STAND_IN_DIES="never healthy") as running:
        assert running.process.wait(BOUND_S) == 1
        assert "did not answer /health in 1 s, after 0 restarts" in running.said()
        running.wait_all_gone()


def test_a_server_that_lives_and_serves_no_more_is_started_again(tmp_path):
    with tool(tmp_path, "--sick-s", "1") as running:
        running.wait_ready()
        pid, _ = running.started()[0]["pids"]
        (tmp_path / f"{pid}.sick").touch()
        running.wait_ready(2)
        assert "runs, and serves no more" in running.said() and "/health: 503" in running.said()
        assert until(lambda: not is_alive(pid))


def test_what_a_server_is_started_with(tmp_path):
    of_ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
    dropped = sorted((*of_ranks, "VLLM_ALLOW_INSECURE_SERIALIZATION"))
    variables = dict.fromkeys(dropped, "1") | {"KEY_OF_MINE": "sesame", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with tool(tmp_path, "--api-key-env", "KEY_OF_MINE", "--", "--enforce-eager", **variables) as running:
        running.wait_ready()
        (started,) = running.started()
        said = running.said()
    environment, arguments = started["environment"], started["arguments"]
    assert not set(dropped) & set(environment) and f"not passed on to the servers: {', '.join(dropped)}" in said
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and environment["VLLM_API_KEY"] == "sesame"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1" and arguments[-1] == "--enforce-eager"
    assert not any("sesame" in argument for argument in arguments) and "sesame" not in said


def test_a_host_open_to_the_network_wants_a_key_and_a_port_is_not_taken_twice(capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tool takes the signals of its process
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for given, words in (
            ("--host 0.0.0.0", ("--host 0.0.0.0 opens the servers to the network", "--allow-no-key")),
            ("--api-key-env NOT_SET_ANYWHERE", ("--api-key-env NOT_SET_ANYWHERE names", "empty or not set")),
            ("-- --pipeline_parallel_size 2", ("--pipeline_parallel_size '2'", "does not span hosts")),
            ("-- -pp 1 --data-parallel-size=4", ("--data-parallel-size '4'", "raise --replicas")),
            ("-- -tp 2", ("-tp '2' behind the --", "--tensor-parallel-size stands before the --")),
            (f"--port {port}", (f"port {port} of 127.0.0.1", "(Address already in use)", "another --port")),
        ):
            assert serve_vllm.main(["--model", "M", *given.split()]) == 2
            said = capsys.readouterr().err
            assert all(word in said for word in words), said
    check_exposure("0.0.0.0", "sesame", "--api-key-env", False)
    check_exposure("0.0.0.0", None, "--api-key-env", True)
    check_exposure("127.0.0.1", None, "--api-key-env", False)
    with pytest.raises(ConfigError):
        check_exposure("my-host", "", "--api-key-env", False)
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "my-host", ""))


def test_gpus_are_split_in_order(tmp_path):
    assert split_devices(["0", "1", "2", "3"], 2, 2) == [["0", "1"], ["2", "3"]]
    assert split_devices([], 3, 1) == [None] * 3
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 2 want 4 GPUs, 3 are visible \(4, 5, 7\)"):
        split_devices(["4", "5", "7"], 2, 2)
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 16 is more than the 2 GPUs .*does not span hosts"):
        split_devices(["0", "1"], 1, 16)
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "4, 5"}) == ["4", "5"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == visible_devices({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_devices({}, tmp_path) == ["2", "10"]
    environment, _ = server_environment({}, api_key=None, devices=["2", "10"])
    assert environment == {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": "2,10"}


def test_the_example_is_the_command():
    command = server_command("M", "127.0.0.1", 8000)
    begins = "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model M"
    assert example("M", "127.0.0.1", 8000).startswith(begins)
    assert '{"backend": "megatron_rl"}' in command and "--enable-scale-out" in command
