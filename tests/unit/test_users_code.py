"""A user's code: objects by module and by file, the sentence that each fault gets; it cannot end the process."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable

import pytest

from megatron_rl import cli
from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError, RunError
from megatron_rl.reward import worker
from megatron_rl.users_code import exit_is_an_error, resolve

FILE = """
import dataclasses

RUNS = []

@dataclasses.dataclass
class Named:
    value: "int" = 3

def score(**columns):
    return Named().value
"""


def find(name: str) -> object:
    return resolve(name, {}, what=f"part {name!r}", form="module:function")


def test_a_file_gives_its_attributes_and_runs_once(tmp_path, monkeypatch):
    (tmp_path / "math.py").write_text(FILE)  # called like a module of Python's own
    monkeypatch.chdir(tmp_path)
    assert find("./math.py:score")() == 3
    assert worker.resolve_all(["math.py:score"], "text")["math.py:score"][1]() == 3
    assert find("math.py:RUNS") is find(f"{tmp_path}/math.py:RUNS")
    import math

    assert math.pi > 3


def test_a_file_that_gives_nothing_is_named(tmp_path, monkeypatch):
    for name, message in (
        ("./none.py:score", "none.py' does not exist; write the path of a .py file"),
        ("./folder/:score", "folder' is not a Python file"),
        ("./broken.py:score", "importing './broken.py' failed with SyntaxError.*mend the file"),
        ("./leaves.py:score", "importing './leaves.py' failed with SystemExit: 0; mend the file"),
        ("./good.py:scroe", "module './good.py' has no 'scroe'; the nearest it has is 'score'"),
        ("./good.py", "is not known; your own is written module:function"),
    ):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "broken.py").write_text("def score(:\n")
        (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
        (tmp_path / "good.py").write_text(FILE)
        with pytest.raises(ConfigError, match=message):
            find(name)


def test_a_bare_text_is_a_list_of_one(tmp_path):
    by_override = load_config(None, ["reward.functions=my_rewards:score", "data.train=a.jsonl"])
    (tmp_path / "run.yaml").write_text("reward:\n  functions: my_rewards:score\ndata:\n  train: ''\n")
    by_file = load_config(tmp_path / "run.yaml")
    assert by_override.reward.functions == by_file.reward.functions == ("my_rewards:score",)


def test_os_exit_is_an_error_in_the_body_and_a_forked_child_and_other_threads_exit_as_ever() -> None:
    real = os._exit
    with exit_is_an_error():
        with exit_is_an_error(), pytest.raises(SystemExit, match=r"os\._exit\(0\) was called"):
            os._exit(0)
        with pytest.raises(SystemExit, match=r"os\._exit\(3\)"):
            os._exit(3)
    assert os._exit is real
    with exit_is_an_error():
        assert exit_code_of(lambda: os._exit(7)) == 7
        assert exit_code_of(exit_in_another_thread) == 5
    assert exit_code_of(exit_in_another_thread) == 5


def exit_code_of(body: Callable[[], object]) -> int:
    """Return the exit code of a forked child that runs the body; -9 where the body comes back."""
    child = os.fork()
    if child == 0:
        try:
            body()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def exit_in_another_thread() -> None:
    with exit_is_an_error():
        thread = threading.Thread(target=lambda: os._exit(5))
        thread.start()
        thread.join()


def leaves(leave: Callable[[], object]) -> None:
    leave()


def test_a_run_that_something_exits_is_a_failure() -> None:
    for leave, said in (
        (lambda: sys.exit(0), "0"),
        (lambda: sys.exit(), "None|0"),  # wandb replaces sys.exit by one whose default is 0
        (lambda: os._exit(0), r"'os\._exit\(0\) was called'"),
    ):
        with pytest.raises(RunError, match=rf"(?s)asked to exit \(({said})\), which is a failure.*in leaves"):
            cli._ended(functools.partial(leaves, leave))
