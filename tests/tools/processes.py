"""Runs a tool on ranks that are forked from the nursery, as torchrun would start them; says what still runs."""

import contextlib
import os
import pathlib
import signal
import subprocess

import psutil

from tests.patience import patient
from tests.workers.nursery import Nursery

# A run takes 3 to 15 s on two idle cores; no collective of one waits longer than run.deadline_s.
BOUND_S = 600.0


def run_on_ranks(nursery: Nursery, world: int, folder: pathlib.Path, tool: object, *given: str) -> tuple[int, str]:
    """Run a tool on ``world`` ranks, of which nothing is left running; return the worst exit code and the output."""
    file = "tests.workers.nursery:run_program"
    with nursery.ranks(world, given, folder / "ranks", function=file, given=[str(tool)]) as ranks:
        codes = ranks.wait(patient(BOUND_S))
        assert None not in codes, ranks.said()
        return max(codes, key=abs), ranks.said()


def end(launcher: subprocess.Popen) -> None:
    """Kill a launcher that leads a session and all its descendants: its workers lead sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()


def alive(pid: int) -> bool:
    """Return whether a process runs; one that was killed and that nobody has waited for does not."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
