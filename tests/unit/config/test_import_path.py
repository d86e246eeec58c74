"""Checks config/import_path.py: objects by module, by file, and the sentence that each fault gets."""

from __future__ import annotations

import pytest

from megatron_rl.config import load_config
from megatron_rl.config.import_path import resolve
from megatron_rl.errors import ConfigError
from megatron_rl.reward import worker

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
    assert worker.resolve_all(["math.py:score"])["math.py:score"]() == 3
    assert find("math.py:RUNS") is find(f"{tmp_path}/math.py:RUNS")
    import math

    assert math.pi > 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./none.py:score", "none.py' does not exist; write the path of a .py file"),
        ("./folder/:score", "folder' is not a Python file"),
        ("./broken.py:score", "importing './broken.py' failed with SyntaxError.*mend the file"),
        ("./leaves.py:score", "importing './leaves.py' failed with SystemExit: 0; mend the file"),
        ("./good.py:scroe", "module './good.py' has no 'scroe'; the nearest it has is 'score'"),
        ("./good.py", "is not known; your own is written module:function"),
    ],
)
def test_a_file_that_gives_nothing_is_named(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
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
