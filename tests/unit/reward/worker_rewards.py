"""Reward functions that workers import as ``tests.unit.reward.worker_rewards:<name>``; none imports torch."""

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence


class OfBaseException(BaseException):
    """An exception that is no Exception, like the timeouts of libraries."""


ENDLESS = ("hang", "spin", "wait_for")  # the last until somebody makes a file


def never_ends(function: str, completions: Sequence[str]) -> bool:
    """Say whether a call of ``tests.unit.reward.worker_rewards:<name>`` lasts for ever."""
    if function.endswith(":slow_above_two"):
        return len(completions) > 2
    return function.endswith((":act", ":act_async")) and any(text.partition(" ")[0] in ENDLESS for text in completions)


def _begin(folder: str) -> None:
    """Leave a file of this process in the folder, where one is given."""
    if folder:
        pathlib.Path(folder, str(os.getpid())).touch()


def _act(text: str) -> float | None:
    """Do as the completion's first word says; return its length."""
    word, _, rest = text.partition(" ")
    match word:
        case "none" | "nan":
            return {"none": None, "nan": float("nan")}[word]
        case "raise":
            raise RuntimeError(f"no reward for {text!r}")
        case "base":
            raise OfBaseException(text)
        case "exit":
            sys.exit(3)
        case "os_exit":
            os._exit(0)
        case "interrupt":
            raise KeyboardInterrupt
        case "sleep":
            time.sleep(float(rest))
        case "wait_for":
            while not pathlib.Path(rest).exists():
                time.sleep(0.01)
        case "hang":
            _begin(rest)
            time.sleep(3600)
        case "spin":  # holds the interpreter's lock, as 9**9**9**9 does
            _begin(rest)
            str(9 ** (9**8))
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill_once":
            if not pathlib.Path(rest).exists():
                pathlib.Path(rest).write_text("")
                os.kill(os.getpid(), signal.SIGKILL)
    return float(len(text))


def act(prompts, completions, completion_ids, **columns):
    return [_act(text) for text in completions]


def slow_above_two(completions, **columns):
    """Never end on more than two samples; else return how many there are."""
    if len(completions) > 2:
        time.sleep(3600)
    return [float(len(completions))] * len(completions)


async def act_async(prompts, completions, completion_ids, **columns):
    await asyncio.sleep(0.001)
    return [_act(text) for text in completions]


def everything(prompts, completions, completion_ids, **columns):
    """Return numbers made of every argument, to the bit."""
    rows = zip(prompts, completions, completion_ids, *(columns[key] for key in sorted(columns)), strict=True)
    return [None if ids == [1] else sum(repr(row).encode()) / 7 + sum(ids) ** 0.5 for row in rows for ids in [row[2]]]


def needs_missing(completions, missing, **columns):
    return [0.0] * len(completions)


def one_at_most(completions, **columns):
    return [1.0] * (1 if len(completions) == 1 else 0)


def busy_for_many(completions, **columns):
    """Fail like a service that is busy when several samples come at once, and has time for each of them alone."""
    if len(completions) > 1:
        raise ConnectionError("busy")
    return [1.0]


def _alike(number: Callable[[Sequence[str]], float]) -> Callable[..., list[float]]:
    """Make a reward that gives each sample of a call the same number."""
    return lambda completions, **columns: [float(number(completions))] * len(completions)


process_number = _alike(lambda completions: os.getpid())
has_torch = _alike(lambda completions: "torch" in sys.modules)
is_main_thread = _alike(lambda completions: threading.current_thread() is threading.main_thread())
group_size = _alike(len)
forks = _alike(lambda completions: os.fork())  # the child's number in both processes
leaves_a_child = _alike(lambda completions: subprocess.Popen(["sleep", "3600"]).pid)


def rank_variables(completions, **columns):
    from megatron_rl.distributed.child_process import LAUNCHER_VARIABLES

    return [float(sum(LAUNCHER_VARIABLES.fullmatch(name) is not None for name in os.environ))] * len(completions)


def variables(completions, **columns):
    """Return for each completion whether an environment variable has that name."""
    return [float(text in os.environ) for text in completions]


def stays_when_asked(completions, **columns):
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(os.getpid(), number)
    child = subprocess.Popen(["sleep", "3600"])
    child.terminate()  # a process started here does leave when asked
    return [float(child.wait(60) == -signal.SIGTERM)] * len(completions)


def leaves_a_session(completions, **columns):
    """Leave a process in a session of its own, whose parent has ended, as daemons do."""
    script = "import subprocess; print(subprocess.Popen(['sleep', '3600'], start_new_session=True, stdout=2).pid)"
    found = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, start_new_session=True)
    return [float(found.stdout)] * len(completions)
