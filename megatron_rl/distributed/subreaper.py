"""A subreaper: a small process between a rank and its worker, which ends everything that the worker started (Linux).

If a worker gets SIGKILL, its children live on. If its process group gets SIGKILL, children with a
session of their own live on. So the worker is the child of a subreaper, which the kernel makes the
parent of every orphan below it. The subreaper ends all of them, and then itself, when the worker or
the rank has ended, or when the rank sends END.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Collection
from typing import NoReturn

import psutil

from megatron_rl.distributed.child_process import adopt_orphans, end_with_parent, signal_at_parents_end

END = signal.SIGHUP
PATIENCE_S = 5.0  # longest wait until killed processes are gone; the kernel may hold some


def go_on_in_a_child(parent: int, descriptors: Collection[int]) -> None:
    """Fork, and return only in the child, which becomes the worker; this process becomes its subreaper.

    parent: process id of the rank, which started this process.
    descriptors: the worker's pipes and sockets. The subreaper closes its copies, so that readers get
        end-of-file once the worker has exited.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {END, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})
    adopt_orphans()
    signal_at_parents_end(END)
    if os.getppid() != parent:
        os._exit(1)
    subreaper = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.setsid()  # then a signal to the worker's group does not reach the subreaper
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        end_with_parent(subreaper)
        return
    for descriptor in descriptors:
        os.close(descriptor)
    _keep(worker)


def _keep(worker: int) -> NoReturn:
    ended: dict[int, int] = {}
    while worker not in ended and signal.sigwait({END, signal.SIGCHLD}) != END:
        _reap(ended)
    _end_descendants(ended)
    code = os.waitstatus_to_exitcode(ended.get(worker, 0))
    if code < 0:  # end by the worker's signal, so that the rank sees how the worker ended
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL takes no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))


def _reap(ended: dict[int, int]) -> bool:
    """Collect every child that has ended; return whether another child is left.

    ended: process id → wait status; the ended children are added to it.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        ended[pid] = status


def _end_descendants(ended: dict[int, int]) -> None:
    until = time.monotonic() + PATIENCE_S
    while _reap(ended) and time.monotonic() < until:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                process.kill()
        time.sleep(0.005)
