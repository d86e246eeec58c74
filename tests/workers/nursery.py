"""Forks workers, or ranks of a run, from a process that has imported everything, in milliseconds and not in seconds.

    with Nursery() as nursery:
        with nursery.ranks(2, ["--config", …], folder) as ranks:      # megatron_rl.train, as a launcher would start it
            codes = ranks.wait(60.0)
        code, output = nursery.run_script(path, "--help")             # a tool, as python would

Importing them takes longer than most runs of the tests. A fork has what was imported and nothing else: no thread, no
process group, no random state of another test; it leads a session of its own.

Protocol, one stream socket, strictly in turn: a request is a line of JSON (``start`` with up to three descriptors) and
its answer another: {"start": …} → {"pid"}; {"poll": pid} → {"code": null while it runs, else as ``subprocess`` counts
it}. When the socket closes, every fork that is left is killed and the nursery ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence

from tests.patience import HANG_S, patient
from tests.workers.environment import worker_environment

START_S = 300.0  # importing takes 8 s; on a loaded host with a cold disk it has taken a minute
FAMILIES = (
    *("qwen2", "qwen3", "llama", "mistral", "phi3", "olmo2", "olmo3", "gemma3"),
    *("mixtral", "qwen3_moe", "glm4_moe", "gpt_oss", "llama4", "deepseek_v3"),
)
IMPORTED = (
    "megatron_rl.distributed.platform",  # before anything of Megatron-Core
    *("megatron_rl.trainer.run", "megatron_rl.train", "megatron_rl.critic.server", "tests.equality.rig"),
    # what a run imports when it comes to it; each fork would take a fifth of a second of its own for that
    *(f"megatron_rl.trainer.{name}" for name in ("build", "preference", "supervised", "evaluation", "completions")),
    *(f"megatron_rl.trainer.{name}" for name in ("reference_policy", "run_checkpoints", "corrections")),
    *(f"megatron_rl.trainer.advantages.{name}" for name in ("critic", "kl_in_reward")),
    *("megatron_rl.observability.report", "megatron_rl.rollout.engines.embedded", "tests.workers.worker"),
    *("tensorboard.compat.proto.event_pb2", "math_verify"),
    *(f"transformers.models.auto.{name}_auto" for name in ("modeling", "tokenization")),
    *(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES),
)
ONLY_TORCH = ("torch", "torch.distributed")
RANK_OF_A_RUN = "megatron_rl.train:command_line"


class Fork:
    """Stands for a process that a nursery has forked, with the names that ``subprocess.Popen`` has."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.nursery, self.pid, self.returncode = nursery, pid, None

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self.nursery.ask({"poll": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float = 10.0) -> int:
        """Return its exit code; raise subprocess.TimeoutExpired after ``timeout`` seconds."""
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
            time.sleep(0.005)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and what it started: it leads a session of its own."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # so short a time after its start that it leads none yet
                os.killpg(self.pid, signal.SIGKILL)
            os.kill(self.pid, signal.SIGKILL)
            self.wait(patient(HANG_S))


class Nursery:
    """The client's side of a nursery; every fork finds the modules ``imported`` imported."""

    def __init__(self, imported: Sequence[str] = IMPORTED) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.workers.nursery", str(theirs.fileno()), *imported],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=worker_environment(),
            )
        self._socket = ours
        self._socket.settimeout(patient(START_S))
        self._answers = ours.makefile("rb")

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the nursery and every fork of it."""
        self._answers.close()
        self._socket.close()
        try:
            self.process.wait(timeout=patient(HANG_S))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def ask(self, request: dict, descriptors: Sequence[int] = ()) -> dict:
        """Send a request and return its answer; raise RuntimeError where the nursery is gone."""
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], list(descriptors))
            line = self._answers.readline()
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        if not line:
            code = self.process.wait(timeout=patient(HANG_S))
            raise RuntimeError(f"the nursery of forks ended with code {code} while it was asked {request}")
        return json.loads(line)

    def start(
        self,
        function: str,
        arguments: Sequence[object] = (),
        *,
        printed: pathlib.Path | int,
        stdin: int | None = None,
        pipe: int | None = None,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = (),
    ) -> Fork:
        """Fork a process that calls ``module:function`` with JSON arguments and ends when it returns.

        printed: file, or descriptor, of its stdout and stderr. stdin: a descriptor; none reads nothing. pipe: a
        descriptor that the function gets as its first argument. environment: added to the nursery's. program: its
        ``sys.argv[1:]``.
        """
        request = {"function": function, "arguments": list(arguments), "environment": dict(environment or {})}
        request |= {"program": list(program), "pipe": pipe is not None}
        request |= {"path": [folder or os.getcwd() for folder in sys.path]}
        with contextlib.ExitStack() as held:
            output = printed if isinstance(printed, int) else held.enter_context(open(printed, "wb")).fileno()
            read = held.enter_context(open(os.devnull, "rb")).fileno() if stdin is None else stdin
            given = [read, output] if pipe is None else [read, output, pipe]
            return Fork(self, self.ask({"start": request}, given)["pid"])

    def run_script(self, program: pathlib.Path | str, *arguments: str, timeout_s: float = 600.0) -> tuple[int, str]:
        """Run a Python file or a module as ``python`` would; return (exit code, what it printed)."""
        with tempfile.NamedTemporaryFile() as printed:
            function = "tests.workers.nursery:run_program"
            fork = self.start(function, [str(program)], printed=printed.fileno(), program=arguments)
            try:
                code = fork.wait(patient(timeout_s))
            finally:
                fork.kill()
            return code, pathlib.Path(printed.name).read_text()

    @contextlib.contextmanager
    def ranks(
        self,
        world: int,
        arguments: Sequence[str],
        folder: pathlib.Path,
        function: str = RANK_OF_A_RUN,
        given: Sequence[object] = (),
    ) -> Iterator[Ranks]:
        """Start the ranks of one ``python -m megatron_rl.train ARGUMENT…``, which end with the context.

        function: called in their place, with ``given``. folder: of the files that they print to.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        folder.mkdir(parents=True, exist_ok=True)
        printed = [folder / f"rank{rank}.txt" for rank in range(world)]
        forks: list[Fork] = []
        try:
            for rank, path in enumerate(printed):
                place = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                forks.append(self.start(function, given, printed=path, environment=place, program=arguments))
            yield Ranks(forks, printed)
        finally:
            for fork in forks:
                fork.kill()


class Ranks:
    """The processes of one run, and the files that they print to."""

    def __init__(self, forks: Sequence[Fork], printed: Sequence[pathlib.Path]) -> None:
        self.forks, self.printed = list(forks), list(printed)

    def wait(self, timeout_s: float, but: Collection[int] = ()) -> list[int | None]:
        """Return every rank's exit code, None for one that runs after ``timeout_s``; ``but`` are not waited for."""
        until = time.monotonic() + timeout_s
        for fork in (fork for rank, fork in enumerate(self.forks) if rank not in but):
            with contextlib.suppress(subprocess.TimeoutExpired):
                fork.wait(max(0.0, until - time.monotonic()))
        return [fork.poll() for fork in self.forks]

    def run(self) -> bool:
        """Return whether every rank still runs."""
        return all(fork.poll() is None for fork in self.forks)

    def said(self) -> str:
        return "\n".join(f"--- rank {rank}:\n{path.read_text()}" for rank, path in enumerate(self.printed))


def run_program(program: str) -> None:
    """Run a file as the main module, its folder first on the search path; or a module, as ``python -m`` would."""
    sys.argv[0] = program
    if not program.endswith(".py"):
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, os.path.dirname(program))
    runpy.run_path(program, run_name="__main__")


def run_fork(request: dict, descriptors: Sequence[int]) -> None:
    """Become what the request asks for; never return."""
    code = 1
    try:
        os.setsid()
        for descriptor, place in zip((*descriptors[:2], descriptors[1]), (0, 1, 2), strict=True):
            os.dup2(descriptor, place)
        os.environ.update(request["environment"])
        sys.path.extend(folder for folder in request["path"] if folder not in sys.path)
        sys.argv[1:] = request["program"]
        module, name = request["function"].split(":")
        function = importlib.import_module(module)
        for part in name.split("."):
            function = vars(function)[part]
        pipe = [descriptors[2]] if request["pipe"] else []
        function(*pipe, *request["arguments"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 (a fork must not go on as its parent)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Server:
    """The nursery's own side: one request after the other."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.running: set[int] = set()

    def serve(self) -> None:
        buffer, descriptors = b"", []
        while True:
            data, arrived, _, _ = socket.recv_fds(self.control, 1 << 16, 3)
            descriptors += arrived
            if not data:
                break
            buffer += data
            while b"\n" in buffer:
                line, buffer = buffer.split(b"\n", 1)
                answer = self.answer(json.loads(line), descriptors)
                descriptors = []
                self.control.sendall(json.dumps(answer).encode() + b"\n")
        for pid in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def answer(self, request: dict, descriptors: list[int]) -> dict:
        if "poll" in request:
            ended, status = os.waitpid(request["poll"], os.WNOHANG)
            self.running.discard(ended)
            return {"code": os.waitstatus_to_exitcode(status) if ended else None}
        pid = os.fork()
        if not pid:
            self.control.close()
            run_fork(request["start"], descriptors)
        self.running.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        return {"pid": pid}


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    sys.argv = ["fork"]
    gc.collect()
    gc.freeze()  # the forks' collections pass over what was imported: a tenth of the time, and its pages stay shared
    Server(control).serve()


if __name__ == "__main__":
    main()
