"""The supervisor of vLLM servers: starts one per replica, restarts servers that die, and ends all when it ends.

A restarted server holds the weights of its model files. The trainer sees that the weight version is
gone, and sends its weights again.
"""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.errors import ConfigError
from megatron_rl.rollout.engines.replica import ReplicaLost, RequestRefused
from megatron_rl.rollout.vllm.http import NotListening, Server, ServerFailed

POLL_S = 0.2
HEALTH_S = 5.0
WATCH_S = 2.0  # seconds between two checks of a server that was ready
LAST_LINES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """Holds one server's command line, environment, address and log file."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    host: str
    port: int
    log_path: pathlib.Path

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Holds the limits of restarts and waits. Times are in seconds.

    restarts: the maximum of restarts within ``window_s``, of all servers together.
    ready_s: time from a server's start until /health answers.
    grace_s: time from SIGTERM to SIGKILL.
    sick_s: time for which a server that was ready may fail /health before it is restarted.
    """

    restarts: int = 5
    window_s: float = 600.0
    ready_s: float = 900.0
    grace_s: float = 15.0
    sick_s: float = 10.0


@dataclass(slots=True, eq=False)
class _Running:
    spec: ServerSpec
    process: subprocess.Popen
    started: float
    ready: threading.Event = field(default_factory=threading.Event)
    gone: threading.Event = field(default_factory=threading.Event)
    sick: str = ""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, api_key: str | None, key_setting: str, allow_no_key: bool) -> None:
    """Raise ConfigError if servers would be open to the network without a key.

    host: the address at which the servers listen.
    key_setting: the setting that names the key's environment variable, for the message.
    allow_no_key: whether the user insists on servers without a key.
    """
    if not is_loopback(host) and not api_key and not allow_no_key:
        raise ConfigError(
            f"--host {host} opens the servers to the network, where anyone could replace the model's weights, and no "
            f"API key is set; put one into the environment variable that {key_setting} names, bind to 127.0.0.1, or "
            "insist with --allow-no-key"
        )


def visible_devices(environment: Mapping[str, str], folder: pathlib.Path = pathlib.Path("/dev")) -> list[str]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES lists them. Empty on a CPU host.

    folder: the folder of device files, which is read if CUDA_VISIBLE_DEVICES is not set.
    """
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [
            name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")
        ]
    return [
        str(x)
        for x in sorted(int(path.name[6:]) for path in folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    ]


def split_devices(devices: Sequence[str], replicas: int, per_replica: int) -> list[list[str] | None]:
    """Return one list of GPU names for each replica, in order; on a CPU host, None for each replica.

    devices: the names of all visible GPUs; empty on a CPU host.
    per_replica: the number of GPUs of each replica.

    Raises ConfigError if there are too few GPUs.
    """
    if not devices:
        return [None] * replicas
    if per_replica > len(devices):
        raise ConfigError(
            f"--tensor-parallel-size {per_replica} is more than the {len(devices)} GPUs that are visible "
            f"({', '.join(devices)}), and a server does not span hosts; lower it to at most {len(devices)}, widen "
            "CUDA_VISIBLE_DEVICES, or take a host whose GPUs hold the model"
        )
    if replicas * per_replica > len(devices):
        raise ConfigError(
            f"{replicas} servers with --tensor-parallel-size {per_replica} want {replicas * per_replica} GPUs, "
            f"{len(devices)} are visible ({', '.join(devices)}); lower one of the two, or widen CUDA_VISIBLE_DEVICES"
        )
    return [list(devices[i * per_replica : (i + 1) * per_replica]) for i in range(replicas)]


def check_free(host: str, port: int) -> None:
    """Raise ConfigError if a program already listens at the port. That program would be mistaken for the server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} of {host} cannot be taken ({error.strerror}); stop the program that holds it, or "
                "choose another --port"
            ) from error


class Supervisor:
    """Starts and restarts the servers. ``run`` must be called in the main thread, since it handles signals.

    ``stop`` may be called in any thread. ``say``: called with each line of news for the user.
    """

    def __init__(self, specs: Sequence[ServerSpec], limits: Limits, say: Callable[[str], None]) -> None:
        self.specs, self.limits, self.say = tuple(specs), limits, say
        self._stopped = False  # not an Event: a signal's handler may interrupt a wait that holds the Event's lock
        self._running: list[_Running] = []
        self._restarts: collections.deque[float] = collections.deque()

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> int:
        """Run the servers until they are asked to end (return 0) or die too often (return 1).

        ``stop``, SIGTERM, SIGINT or SIGHUP asks them to end. All child processes end before the call
        returns.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self.stop())
        for spec in self.specs:
            check_free(spec.host, spec.port)
        try:
            self._running = [self._start(spec) for spec in self.specs]
            while not self._stopped:
                time.sleep(POLL_S)
                for index, running in enumerate(self._running):
                    cause = self._cause_to_restart(running)
                    if cause is None:
                        continue
                    self._end([running])
                    if not self._may_restart(running.spec, cause):
                        return 1
                    self._running[index] = self._start(running.spec)
            self.say("asked to end: ending all servers")
            return 0
        finally:
            self._end(self._running)

    def _start(self, spec: ServerSpec) -> _Running:
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "megatron_rl.rollout.vllm.server_process",
            str(os.getpid()),
            str(self.limits.grace_s),
            *spec.command,
        ]
        # No preexec_fn: this process has threads. The child could wait for a lock that a thread held at the fork.
        with open(spec.log_path, "ab") as output:
            process = subprocess.Popen(
                command,
                env=dict(spec.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so a terminal's Ctrl-C reaches only this process, which ends the servers
            )
        running = _Running(spec, process, time.monotonic())
        self.say(f"{spec.name}: starting, process {process.pid}, {spec.url}, log {spec.log_path}")
        threading.Thread(target=self._watch_health, args=(running,), daemon=True, name=f"health-{spec.name}").start()
        return running

    def _watch_health(self, running: _Running) -> None:
        """Record when a server first answers /health. From then on mark it as sick if /health fails for ``sick_s``.

        A sick server is restarted, since a server whose engine died may hold its requests for ever.
        A late answer does not count as a failure: the server may only be busy.
        """
        server = Server(running.spec.url, api_key=None, key_setting="--api-key-env")  # /health needs no key
        bad_since: float | None = None
        while not running.gone.wait(POLL_S if not running.ready.is_set() else WATCH_S):
            try:
                server.call("GET", "/health", timeout_s=HEALTH_S)
            except (NotListening, ServerFailed) as error:
                bad_since = bad_since or time.monotonic()
                if running.ready.is_set() and time.monotonic() - bad_since > self.limits.sick_s:
                    running.sick = f"runs, and serves no more: {error}"
                continue
            except (ReplicaLost, RequestRefused):
                continue
            bad_since = None
            if not running.ready.is_set():
                running.ready.set()
                self.say(
                    f"{running.spec.name}: ready after {time.monotonic() - running.started:.1f} s, {running.spec.url}"
                )

    def _cause_to_restart(self, running: _Running) -> str | None:
        code = running.process.poll()
        if code is not None:
            return f"ended with exit code {code}" + (f" (signal {code - 128})" if code > 128 else "")
        if running.sick:
            return running.sick
        if not running.ready.is_set() and time.monotonic() - running.started > self.limits.ready_s:
            return f"did not answer /health in {self.limits.ready_s:g} s"
        return None

    def _may_restart(self, spec: ServerSpec, cause: str) -> bool:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > self.limits.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self.limits.restarts:
            self.say(
                f"{spec.name}: {cause}, after {len(self._restarts)} restarts in {self.limits.window_s:g} s "
                f"(--max-restarts {self.limits.restarts}): ending all servers. "
                f"{spec.log_path} ends:\n{last_lines(spec.log_path)}"
            )
            return False
        self._restarts.append(now)
        self.say(
            f"{spec.name}: {cause}; restart {len(self._restarts)} of {self.limits.restarts} in "
            f"{self.limits.window_s:g} s"
        )
        return True

    def _end(self, running: Sequence[_Running]) -> None:
        for server in running:
            server.gone.set()
            if server.process.poll() is None:
                server.process.terminate()
        ends_at = time.monotonic() + self.limits.grace_s + 5.0  # server_process.py kills the server after grace_s
        for server in running:
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed below
                server.process.wait(max(0.0, ends_at - time.monotonic()))
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait(5)


def last_lines(path: pathlib.Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 64 * 1024))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-LAST_LINES:])
    except OSError as error:
        return f"(no log: {error})"
