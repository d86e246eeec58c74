"""The ``Replica`` (engines/replica.py) that runs a vLLM engine in a process of this rank, on GPUs or on the CPU."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import pathlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import NamedTuple

import numpy as np

from megatron_rl.distributed import child_process, frames
from megatron_rl.distributed.cuda_environment import added_variables
from megatron_rl.rollout.engines.engine import NO_WEIGHTS
from megatron_rl.rollout.engines.replica import (
    Completion,
    GenerateRequest,
    ReplicaFacts,
    ReplicaLost,
    RequestRefused,
    Watch,
)
from megatron_rl.rollout.vllm import routed_experts
from megatron_rl.rollout.vllm.sampling_params import parse_version, sampling_parameters

log = logging.getLogger(__name__)

LAST_LINES = 15
SEND_S = 30  # seconds in which an engine must read at least a byte; it reads in its own thread, at any time


def engine_environment(
    environment: Mapping[str, str], devices: Sequence[str] | None, threads: int | None
) -> dict[str, str]:
    """Return the environment variables of an engine's process, {name: value}.

    They are ``environment`` without the variables that are for the trainer's ranks alone, plus
    settings for vLLM.

    environment: the environment variables of the rank.
    devices: the names of the engine's GPUs; None on a CPU host.
    threads: the number of the engine's threads on a CPU host.
    """
    own = child_process.environment(environment)
    for name in ("VLLM_ALLOW_INSECURE_SERIALIZATION", *added_variables()):  # added_variables are for the trainer alone
        own.pop(name, None)
    own |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in its process itself, since that is separate already
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if devices is not None:
        return {**own, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
    # vLLM would pin the threads of every engine on the host to the same cores.
    own |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads or 1), "TORCHDYNAMO_DISABLE": "1"}
    own.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return own


class EngineLoad(NamedTuple):
    """Holds an engine's numbers of running and of waiting samples, and the used share (0 to 1) of its KV cache."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0


class ProcessReplica:
    """Starts and drives an engine in a process of its own. It is a ``Replica``.

    A thread receives the messages that the process sends. The process writes its output to
    ``log_path``. Errors quote the last lines of that file.
    """

    ours = True

    def __init__(
        self, engine_arguments: Mapping[str, object], environment: Mapping[str, str], log_path: pathlib.Path
    ) -> None:
        self.arguments = dict(engine_arguments)
        self.environment = dict(environment)
        self.log_path = log_path
        self.name = "the embedded vLLM engine"
        self.weight_version = NO_WEIGHTS
        self.progressed_at = -math.inf
        self.load = self.peak = EngineLoad()
        self._process: subprocess.Popen | None = None
        self._connection: socket.socket | None = None
        self._ready: Future[ReplicaFacts] = Future()
        self._requests: dict[str, Future] = {}
        self._watches: dict[str, Watch] = {}
        self._answers: dict[int, Future] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        # An engine that hangs reads nothing, and a send to its full socket would wait for ever. So sends have a
        # time limit. Receives have none.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.rollout.vllm.process_main", str(theirs.fileno()), str(os.getpid())],
                env=self.environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so a terminal's Ctrl-C reaches only the ranks, which save first
            )
        # Reset the state, read the process's frames in a thread, and send it the engine's arguments.
        theirs.close()
        self.load = EngineLoad()
        self.name = f"the embedded vLLM engine (process {self._process.pid} of {socket.gethostname()})"
        self.weight_version = NO_WEIGHTS
        self._ready = Future()

        def connect() -> None:
            self._connection, self._requests, self._answers, self._watches = ours, {}, {}, {}

        threading.Thread(
            target=self._read, args=(ours, self._process, self._ready), daemon=True, name="vllm-frames"
        ).start()
        # ``connect`` runs under the lock, so no other thread can send a frame first.
        self._send({"kind": "start", "engine": self.arguments}, first=connect)

    def wait_ready(self, timeout_s: float) -> ReplicaFacts:
        try:
            return self._ready.result(timeout_s)
        except FutureTimeout:
            raise ReplicaLost(
                f"{self.name} was not ready after {timeout_s:.0f} s; raise rollout.start_s, or read "
                f"{self.log_path}:\n{self.last_lines()}"
            ) from None

    def check_tokenizer(self, encode: Callable[[str], list[int]], texts: Sequence[str]) -> None:
        """Do nothing: the engine has no tokenizer that could differ from the trainer's."""

    def submit(self, request: GenerateRequest) -> Future[list[Completion]]:
        future: Future[list[Completion]] = Future()
        header = {"kind": "generate", "request_id": request.request_id, "sampling": sampling_parameters(request)}
        if request.watch is not None:
            header["look_every_tokens"] = request.watch.every_tokens
        token_ids = np.array(request.token_ids, dtype=np.int64)
        try:
            self._send(header, {"token_ids": token_ids}, first=lambda: self._note(request, future))
        except ReplicaLost as error:
            _settle(future, error)
        return future

    def _note(self, request: GenerateRequest, future: Future) -> None:
        if not self._requests:
            self.peak = EngineLoad()
        self._requests[request.request_id] = future
        if request.watch is not None:
            self._watches[request.request_id] = request.watch

    def abort(self, request_id: str) -> None:
        self._taken({"request_id": request_id})
        self._send({"kind": "abort", "request_id": request_id})

    def end_sample(self, request_id: str, sample: int) -> None:
        """Have the engine end a running sample (see ``Watched``)."""
        self._send({"kind": "end_sample", "request_id": request_id, "sample": sample})

    def fail(self, request_id: str, error: BaseException) -> None:
        """End a request with an error (see ``Watched``). The engine still computes it until it is aborted."""
        _settle(self._taken({"request_id": request_id}), error)

    def control(self, method: str, arguments: Mapping[str, object], timeout_s: float) -> object:
        future: Future = Future()
        number = next(self._ids)
        header = {"kind": "control", "id": number, "method": method, "arguments": dict(arguments)}
        self._send(header, first=lambda: self._answers.update({number: future}))
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            raise ReplicaLost(f"{self.name} did not answer {method} in {timeout_s:.0f} s") from None

    def give_up(self, cause: str) -> None:
        with self._lock:
            requests, self._requests, self._watches = self._requests, {}, {}
        for request_id, future in requests.items():
            _settle(future, ReplicaLost(f"{self.name}: {cause}"))
            with contextlib.suppress(ReplicaLost):  # an engine that is gone generates nothing
                self._send({"kind": "abort", "request_id": request_id})

    def restart(self) -> None:
        self._end()
        self.start()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            try:
                self._send({"kind": "close"})
                self._process.wait(10)
            except (ReplicaLost, subprocess.TimeoutExpired):
                log.info("%s did not end by itself and is killed", self.name)
        self._end()

    def last_lines(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(lines[-LAST_LINES:])

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
        with self._lock:
            connection, self._connection = self._connection, None
            waiting = [*self._requests.values(), *self._answers.values()]
            self._requests, self._answers, self._watches = {}, {}, {}
        if connection is not None:
            connection.close()
        self.weight_version = NO_WEIGHTS
        for future in waiting:  # done here, since the reading thread may notice the end after the next start
            _settle(future, ReplicaLost(f"{self.name} was ended"))

    def _send(
        self,
        header: Mapping[str, object],
        arrays: Mapping[str, np.ndarray] | None = None,
        *,
        first: Callable[[], None] | None = None,
    ) -> None:
        """Send a message (a header and arrays) to the process. Raises ReplicaLost if the process is gone.

        first: called without arguments before the send, to register the future of the answer. Both
            happen under one lock, so that the process cannot be replaced between them.
        """
        try:
            with self._lock:
                if first is not None:
                    first()
                if self._connection is None:
                    raise frames.Closed("it was ended")
                frames.send(self._connection, header, arrays)
        except OSError as error:
            self._break_off()  # part of the frame may have been sent
            raise ReplicaLost(f"{self.name} is gone ({error}); {self.log_path} ends:\n{self.last_lines()}") from error

    def _break_off(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):  # the other end may be gone
                connection.shutdown(socket.SHUT_RDWR)

    def _read(self, connection: socket.socket, process: subprocess.Popen, ready: Future) -> None:
        """Receive the process's messages until it ends, and deliver each to its future.

        Then set ReplicaLost as the error of all futures that still wait.

        ready: the future of the first message, which describes the engine (``ReplicaFacts``).
        """
        last_error = ""
        try:
            while True:
                header, arrays = frames.receive(connection)
                if header["kind"] == "dead":
                    last_error = f": {header['error']}"
                self._deliver(header, arrays, ready)
        except (OSError, ValueError) as error:
            try:
                code = process.wait(10)
            except subprocess.TimeoutExpired:
                code = f"still running, {error}"
            end = f"{self.name} ended (exit code {code}){last_error}"
            time.sleep(0.05)  # the last lines may not be in the log file yet
            lost = ReplicaLost(f"{end}; {self.log_path} ends:\n{self.last_lines()}")
            with self._lock:
                waiting = (
                    [ready, *self._requests.values(), *self._answers.values()] if self._process is process else [ready]
                )
                if self._process is process:
                    self._connection, self._requests, self._answers, self._watches = None, {}, {}, {}
                    self.weight_version = NO_WEIGHTS
            for future in waiting:
                _settle(future, lost)

    def _deliver(self, header: dict, arrays: dict[str, np.ndarray], ready: Future) -> None:
        match header["kind"]:
            case "ready":
                facts = {
                    name: header[name]
                    for name in (
                        "vllm_version",
                        "vocab_size",
                        "max_model_tokens",
                        "logprobs_mode",
                        "dtype",
                        "routed_experts",
                    )
                }
                _settle(ready, ReplicaFacts(**facts))
            case "progress":
                self.progressed_at = time.monotonic()
                self.load = EngineLoad(header["running"], header["waiting"], header["kv_cache_usage"])
                self.peak = EngineLoad(*map(max, self.peak, self.load))
            case "tokens":
                with self._lock:
                    watch = self._watches.get(header["request_id"])
                if watch is not None:
                    watch.told(self, header["request_id"], header["sample"], header["start"], arrays["token_ids"])
            case "output":
                _settle(self._taken(header), _completions(header, arrays))
            case "refused":
                _settle(
                    self._taken(header),
                    RequestRefused(f"{self.name} refused request {header['request_id']}: {header['error']}"),
                )
            case "answer":
                with self._lock:
                    future = self._answers.pop(header["id"], None)
                _settle(future, header["answer"])
            case "failed":
                with self._lock:
                    future = self._answers.pop(header["id"], None)
                _settle(future, RequestRefused(f"{self.name}: {header['error']}"))

    def _taken(self, header: dict) -> Future | None:
        with self._lock:
            self._watches.pop(header["request_id"], None)
            return self._requests.pop(header["request_id"], None)


def _settle(future: Future | None, result: object) -> None:
    """Set the future's result, or its error if ``result`` is an exception. Do nothing if ``future`` is None."""
    if future is None:
        return
    try:
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
    except InvalidStateError:
        log.debug("an answer came twice: %r", result)


def _completions(header: dict, arrays: dict[str, np.ndarray]) -> list[Completion]:
    lengths = arrays["lengths"]
    ends = np.cumsum(lengths, axis=0)
    experts = routed_experts.of_frame(arrays, len(lengths))
    drafts = header.get("drafts") or [(0, 0)] * len(lengths)
    return [
        Completion(
            token_ids=arrays["token_ids"][ends[k, 0] - lengths[k, 0] : ends[k, 0]],
            logprobs=arrays["logprobs"][ends[k, 1] - lengths[k, 1] : ends[k, 1]],
            finish_reason=reason,
            weight_versions=tuple((parse_version(version), count) for version, count in header["weight_versions"][k]),
            prompt_logprobs=arrays.get("prompt_logprobs"),
            routed_experts=experts[k],
            drafts=tuple(drafts[k]),
            cached_tokens=header["cached_tokens"],
        )
        for k, reason in enumerate(header["reasons"])
    ]
