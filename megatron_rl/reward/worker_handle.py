"""A rank's handle on one reward worker: process, socket, task and deadline. No call waits for an answer."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from megatron_rl.distributed.child_process import environment
from megatron_rl.distributed.frames import Inbox, encode
from megatron_rl.distributed.subreaper import END
from megatron_rl.reward.task_queue import Task

log = logging.getLogger(__name__)

START_S = 120.0  # for a worker's start, until it has imported its functions
SUSPECT_S = 5.0  # if a task of several samples takes longer, its samples are also tried alone
CLOSE_S = 2.0  # for a worker without a task to end by itself
REAP_S = 10.0  # for a killed process to be gone; it takes longer only if the kernel holds it
# The environment variables of the rank that a worker gets: none that may hold a key (docs/security.md).
ALLOWED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TERM|TMPDIR|TEMP|TMP|XDG_CACHE_HOME|PYTHON\w*|VIRTUAL_ENV|"
    r"CONDA_PREFIX|LD_LIBRARY_PATH|LD_PRELOAD|MALLOC_\w+|\w+_NUM_THREADS|CUDA_HOME|CUDA_VISIBLE_DEVICES|HF_HOME|"
    r"HF_HUB_CACHE|HF_DATASETS_CACHE|HF_HUB_OFFLINE|HF_DATASETS_OFFLINE|TRANSFORMERS_OFFLINE|TOKENIZERS_PARALLELISM|"
    r"SSL_CERT_FILE|SSL_CERT_DIR|MEGATRON_RL_\w+"
)


class Gone(ConnectionError):
    """Signals that a worker has ended, or that it sent bytes that are no message."""


class WorkerProcess:
    """Runs one worker process and gives it one task at a time.

    functions: the names of the reward functions that the worker imports.
    deadline_s: the maximum of seconds for a task.
    variables: names of environment variables of the rank that the worker gets in addition to
        ALLOWED, the variables that hold no secret.
    completions: ``reward.completions``, "text" or "messages".
    pid: the worker's process id once the worker is ready. Before that, the process id of its
        subreaper, the process between rank and worker.
    deadline: the time on time.monotonic by which the start or the task must end; None if idle.
    suspect_at: the time on time.monotonic at which the task has taken so long that each of its
        samples is also tried in a task of its own. None if there is no such time, or if it has
        passed.
    task_id: the id that the answer to the task must carry.
    """

    def __init__(self, functions: Sequence[str], deadline_s: float, variables: Sequence[str], completions: str) -> None:
        self.deadline_s = deadline_s
        self.ready = False
        self.task: Task | None = None
        self.task_id: int | None = None
        self.deadline: float | None = time.monotonic() + START_S
        self.suspect_at: float | None = None
        self._inbox = Inbox()
        self._outbox = bytearray()
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        ours, theirs = socket.socketpair()
        descriptors = [theirs.fileno(), self._stacks.fileno()]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.reward.worker", *map(str, descriptors), str(os.getpid())],
                env=environment(
                    {name: value for name, value in os.environ.items() if ALLOWED.fullmatch(name) or name in variables}
                ),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                # A session of its own: a terminal's Ctrl-C is for the ranks alone, which save first. The
                # subreaper kills the worker's children.
                start_new_session=True,
            )
        self.pid = self._process.pid
        ours.setblocking(False)
        self.socket = ours
        path = [folder or os.getcwd() for folder in sys.path]  # so that the worker finds what this process would find
        setup = {"functions": list(functions), "completions": completions, "path": path, "deadline_s": deadline_s}
        self._post(setup)

    @property
    def idle(self) -> bool:
        return self.ready and self.task is None

    @property
    def events(self) -> int:
        """Return the selector's mask of what the pool waits for: reading, and writing if bytes wait to be sent."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)

    def give(self, task: Task, task_id: int, message: Mapping[str, object]) -> None:
        now = time.monotonic()
        self.task, self.task_id, self.deadline = task, task_id, now + self.deadline_s
        if len(task.samples) > 1 and self.deadline_s > SUSPECT_S:
            self.suspect_at = now + SUSPECT_S
        self._post({"id": task_id, **message})

    def take_back(self) -> Task | None:
        task, self.task, self.task_id, self.deadline, self.suspect_at = self.task, None, None, None, None
        return task

    def flush(self) -> None:
        """Send as many waiting bytes as the socket takes now.

        Raises nothing if the worker has ended, since the next ``read`` raises Gone.
        """
        try:
            while self._outbox:
                del self._outbox[: self.socket.send(self._outbox)]
        except BlockingIOError:
            return
        except OSError:
            self._outbox.clear()

    def read(self) -> list[dict]:
        """Return the messages that have come. Raises Gone if there are none and the worker has ended."""
        messages: list[dict] = []
        why = "it closed its socket"
        try:
            while piece := self.socket.recv(1 << 20):
                messages += self._inbox.take(piece)
        except BlockingIOError:
            return messages
        except (OSError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
        if messages:
            return messages  # the next call finds the end of the stream again
        raise Gone(why)

    def stacks(self) -> str:
        """Return the stack traces of the worker's threads, as text.

        The worker writes them once the fraction STACK_AT (reward/worker.py) of the time up to the
        task's deadline has passed. Before that, the text is empty.
        """
        self._stacks.seek(0)
        return self._stacks.read().decode(errors="replace").strip()

    def end(self) -> str:
        """Kill the worker and all processes that it started. Return in words how the worker ended, now or earlier."""
        self.socket.close()  # so that nothing that it sent before is ever read
        code = self._process.returncode
        if code is None:
            self._process.send_signal(END)
            try:
                code = self._process.wait(REAP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # the kernel kills the worker with its subreaper
                log.warning(
                    "reward worker %d was killed and still exists after %g s: the kernel holds it", self.pid, REAP_S
                )
        self._stacks.close()
        return _how(code)

    def leave(self) -> None:
        """Ask a worker without a task to end by itself. `end` must follow."""
        self.socket.close()

    def wait(self, until: float) -> None:
        """Wait until the worker has ended by itself, or until the time ``until`` on time.monotonic.

        The process stays a zombie, since `end` needs its process id.
        """
        with contextlib.suppress(OSError):  # a kernel before 5.3 has no pidfd: then nothing waits
            descriptor = os.pidfd_open(self._process.pid)
            try:
                ended = select.poll()  # not select.select, which refuses a descriptor above 1023
                ended.register(descriptor, select.POLLIN)
                ended.poll(1000 * max(0.0, until - time.monotonic()))
            finally:
                os.close(descriptor)

    def _post(self, message: Mapping[str, object]) -> None:
        self._outbox += encode(message)
        self.flush()


def _how(code: int | None) -> str:
    if code is None:
        return "it could not be killed"
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}{': out of memory?' if code == -signal.SIGKILL else ''}"
    return f"signal {-code}"
