"""Keeps what a process has started until that process ends, however it ends, and then takes it down.

    with kept("tests.slurm.cluster:Daemons", folder):
        ...

The keeper is a process in a session of its own, which no terminal's signal reaches; asked to end, it stays. It enters
the context manager ``Daemons(folder)`` and leaves it when its stdin closes: the kernel closes that even after SIGKILL.
"""

import contextlib
import importlib
import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]


class KeeperError(RuntimeError):
    """What was to be kept did not start, or did not stop in time; the message says why."""


@contextlib.contextmanager
def kept(manager: str, folder: pathlib.Path, *, stop_s: float) -> Iterator[None]:
    """Hold a context manager open in a process of its own, until this block or this process ends.

    manager: ``module:class``, called with the folder; an error that it raises is a KeeperError here.
    stop_s: seconds that leaving may take.
    """
    keeper = subprocess.Popen([sys.executable, "-m", "tests.slurm.keeper", manager, str(folder)], cwd=ROOT,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        line = keeper.stdout.readline()
        if not line or json.loads(line) is not None:
            raise KeeperError(json.loads(line) if line else f"the keeper of {manager} ended before it had started")
        yield
    finally:
        keeper.stdin.close()
        try:
            keeper.wait(stop_s)
        except subprocess.TimeoutExpired:
            raise KeeperError(f"{manager} did not stop in {stop_s:g} s; process {keeper.pid} goes on with it") from None
        finally:
            keeper.stdout.close()


def _stay(number: int, frame: object) -> None:
    """Do nothing. A handler, since processes started from here would inherit an ignored signal."""


def main(manager: str, folder: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stay)
    module, _, name = manager.partition(":")
    opened = vars(importlib.import_module(module))[name](pathlib.Path(folder))
    try:
        opened.__enter__()
    except RuntimeError as error:
        print(json.dumps(str(error)), flush=True)
        return 1
    try:
        with contextlib.suppress(BrokenPipeError):  # who asked may be gone by now
            print(json.dumps(None), flush=True)
        sys.stdin.read()
    finally:
        opened.__exit__(None, None, None)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
