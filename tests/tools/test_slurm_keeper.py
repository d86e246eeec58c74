"""tests/slurm/keeper.py: what is kept for a process ends with it, whatever signal ended it (`make test-slurm`)."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.patience import patient
from tests.slurm.keeper import KeeperError, kept

ROOT = pathlib.Path(__file__).parents[2]
STAND_IN = "tests.tools.test_slurm_keeper:StandIn"
WAIT_S = patient(20.0)


class StandIn:
    """A daemon in place of SLURM's: it sleeps, its process id lies in the folder, and its end is written there."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def __enter__(self) -> StandIn:
        if (self.folder / "refuse").exists():
            raise RuntimeError("no daemon today")
        self.daemon = subprocess.Popen(["sleep", "1000"])
        (self.folder / "pid").write_text(str(self.daemon.pid))
        return self

    def __exit__(self, *_: object) -> None:
        self.daemon.terminate()
        (self.folder / "ended").write_text(str(self.daemon.wait()))


OWNER = f"""
import pathlib, time
from tests.slurm.keeper import kept
with kept({STAND_IN!r}, pathlib.Path(__import__("sys").argv[1]), stop_s=20):
    print("up", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM, signal.SIGINT], ids=lambda x: x.name)
def test_what_is_kept_ends_with_its_owner(tmp_path: pathlib.Path, number: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert owner.stdout.readline() == b"up\n"
    daemon = int((tmp_path / "pid").read_text())
    os.kill(daemon, 0)  # it runs
    owner.send_signal(number)
    deadline = time.monotonic() + WAIT_S
    while not (tmp_path / "ended").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    owner.wait(WAIT_S)
    owner.stdout.close()
    assert (tmp_path / "ended").read_text() == str(-signal.SIGTERM)
    with pytest.raises(ProcessLookupError):
        os.kill(daemon, 0)


def test_what_does_not_start_is_an_error_with_its_reason(tmp_path: pathlib.Path) -> None:
    (tmp_path / "refuse").touch()
    with pytest.raises(KeeperError, match="no daemon today"), kept(STAND_IN, tmp_path, stop_s=WAIT_S):
        raise AssertionError("entered without a daemon")
    with kept(STAND_IN, _without_refusal(tmp_path), stop_s=WAIT_S):
        assert (tmp_path / "pid").exists() and not (tmp_path / "ended").exists()
    assert (tmp_path / "ended").exists()


def _without_refusal(folder: pathlib.Path) -> pathlib.Path:
    (folder / "refuse").unlink()
    return folder
