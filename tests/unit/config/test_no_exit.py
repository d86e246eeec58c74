"""config/no_exit.py: a user's code cannot end the process, and everything else still can."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from megatron_rl import cli
from megatron_rl.config import Config
from megatron_rl.config.no_exit import exit_is_an_error
from megatron_rl.errors import RunError


def test_os_exit_is_an_error_in_the_body_alone() -> None:
    real = os._exit
    with exit_is_an_error():
        with exit_is_an_error(), pytest.raises(SystemExit, match=r"os\._exit\(0\) was called"):
            os._exit(0)
        with pytest.raises(SystemExit, match=r"os\._exit\(3\)"):
            os._exit(3)
    assert os._exit is real


def test_a_forked_child_and_other_threads_exit_as_ever(monkeypatch) -> None:
    ended: list[int] = []
    with exit_is_an_error():
        child = os.fork()
        if child == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    monkeypatch.setattr(os, "_exit", ended.append)  # the watchdog's thread would end pytest
    with exit_is_an_error():
        with pytest.raises(SystemExit):
            os._exit(0)
        thread = threading.Thread(target=lambda: os._exit(1))
        thread.start()
        thread.join()
    assert ended == [1]


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (lambda: sys.exit(0), "0"),
        (lambda: sys.exit(), "None|0"),  # wandb replaces sys.exit by one whose default is 0
        (lambda: os._exit(0), r"'os\._exit\(0\) was called'"),
    ],
)
def test_a_run_that_something_exits_is_a_failure(leave, said) -> None:
    with pytest.raises(RunError, match=rf"(?s)asked to exit \(({said})\), which is a failure.*in leaves"):

        def leaves(config: Config) -> bool:
            leave()

        cli._run(leaves, Config())
