"""Checks that the table of tools/check_mutants.py fits this tree, and that it tells kills, survivors and errors apart.

It tells them apart on a small tree.
"""

from __future__ import annotations

import ast
import json
import pathlib
import subprocess
import sys
from collections import Counter

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check_mutants  # noqa: E402
from check_mutants import MUTANTS  # noqa: E402
from mutants.table import AREAS, Mutant, read  # noqa: E402

pytestmark = pytest.mark.process


def test_every_line_occurs_once_and_still_parses_with_its_fault() -> None:
    for mutant in MUTANTS:
        text = read(ROOT, mutant)
        assert len(mutant.places(text)) == 1, mutant.name
        assert mutant.line != mutant.becomes and ast.dump(ast.parse(mutant.planted(text))) != ast.dump(
            ast.parse(text)
        ), mutant.name


def test_every_test_named_exists() -> None:
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            name, _, function = test.partition("::")
            assert (ROOT / name).is_file(), (mutant.name, test)
            defined = {
                node.name for node in ast.parse((ROOT / name).read_text()).body if isinstance(node, ast.FunctionDef)
            }
            assert not function or function.partition("[")[0] in defined, (mutant.name, test)


def test_names_are_unique_and_every_area_has_two() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    counts = Counter(mutant.area for mutant in MUTANTS)
    assert set(counts) == set(AREAS) and min(counts.values()) >= 2, counts
    assert {"gspo-single-token", "plan-cap-one-too-large"} <= {mutant.name for mutant in MUTANTS}


def test_the_page_names_every_mutant_and_its_file() -> None:
    rows = [line.split(" | ") for line in (ROOT / "docs/mutants.md").read_text().splitlines() if line.startswith("| `")]
    assert [(row[0], row[1]) for row in rows] == [
        (f"| `{mutant.name}`", f"`{mutant.file.removeprefix('megatron_rl/')}`") for mutant in MUTANTS
    ]


# ---- on a small tree -----------------------------------------------------------------------------------------------


SMALL = {
    "megatron_rl/__init__.py": "",  # without it an installed package of this name would be found first
    "megatron_rl/algorithm/noise.py": "def double(x):\n    y = 2 * x\n    return y\n",
    "tests/test_small.py": "from megatron_rl.algorithm.noise import double\n\n\ndef test_one():\n    assert double(2) "
    "== 4\n\n\n"
    "def test_positive():\n    assert double(2) > 0\n\n\ndef test_broken():\n    assert double(2) == 5\n",
}


def fault(name: str, becomes: str, *tests: str) -> Mutant:
    return Mutant(
        name=name,
        file="megatron_rl/algorithm/noise.py",
        line="y = 2 * x",
        becomes=becomes,
        fault="a wrong factor",
        tests=tuple(f"tests/test_small.py{x}" for x in tests),
    )


@pytest.fixture
def tree(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Make a git repository of SMALL with nothing committed.

    Pytest starts without plugins there, in half the time.
    """
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    root = tmp_path / "tree"
    for name, text in SMALL.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return root


def test_a_kill_a_survivor_and_an_error_are_told_apart(tree: pathlib.Path, tmp_path: pathlib.Path, capsys) -> None:
    """One test sees the first fault, none the second; a module that cannot be imported any more is no kill."""
    mutants = (
        fault("seen", "y = 3 * x", "::test_positive", "::test_one"),
        fault("unseen", "y = 3 * x", "::test_positive"),
        fault("unimportable", "y = (", "::test_one"),
    )
    page, rows = tmp_path / "mutants.md", tmp_path / "mutants.json"
    assert check_mutants.main(["--json", str(rows), "--markdown", str(page)], mutants=mutants, root=tree) == 1
    found = json.loads(rows.read_text())["mutants"]
    assert [(x["name"], x["status"], x["line_number"]) for x in found] == [
        ("seen", "KILLED", 2),
        ("unseen", "SURVIVED", 2),
        ("unimportable", "UNCLEAR", 2),
    ]
    assert found[0]["by"] == "tests/test_small.py::test_one"
    printed = capsys.readouterr().out
    assert "KILLED by tests/test_small.py::test_one" in printed and "1 of 3 killed" in printed
    assert "| `seen` | `algorithm/noise.py` | a wrong factor | `test_small.py::test_one` |" in page.read_text()
    assert (tree / "megatron_rl/algorithm/noise.py").read_text() == SMALL["megatron_rl/algorithm/noise.py"]


def test_the_whole_suite_is_asked_about_a_survivor(tree: pathlib.Path, capsys) -> None:
    # not committed, and copied
    (tree / "tests/test_small.py").write_text(SMALL["tests/test_small.py"].replace("== 5", "== 4"))
    assert check_mutants.main(["--whole"], mutants=[fault("unseen", "y = 3 * x", "::test_positive")], root=tree) == 0
    assert "KILLED by tests/test_small.py::test_one (of the whole suite)" in capsys.readouterr().out


def test_what_cannot_be_judged_is_said(tree: pathlib.Path, capsys) -> None:
    """The tool names what it cannot judge, and does not end with 0.

    It ends with 2 for a test that fails without a fault, a test that does not exist and an unknown name; with 1 for a
    line that is gone.
    """
    for mutant, only, code, words in (
        (
            fault("by a broken test", "y = 3 * x", "::test_broken"),
            [],
            2,
            "do not all pass without a fault (pytest's exit code 1)",
        ),
        (
            fault("by no test", "y = 3 * x", "::test_none"),
            [],
            2,
            "`make test` runs none of tests/test_small.py::test_none",
        ),
        (fault("known", "y = 3 * x", "::test_one"), ["--only", "unknown"], 2, "--only unknown names no mutant"),
    ):
        assert check_mutants.main(only, mutants=[mutant], root=tree) == code and words in capsys.readouterr().err
    (tree / "megatron_rl/algorithm/noise.py").write_text("def double(x):\n    return 2 * x\n")
    assert check_mutants.main([], mutants=[fault("gone", "y = 3 * x", "::test_one")], root=tree) == 1
    assert "gone: the line occurs 0 times in megatron_rl/algorithm/noise.py" in capsys.readouterr().err


def test_tests_that_do_not_end_are_no_kill(tree: pathlib.Path) -> None:
    (tree / "tests/test_small.py").write_text("import time\n\n\ndef test_one():\n    time.sleep(3600)\n")
    outcome = check_mutants.run_tests(tree, ["tests/test_small.py"], 2.0)
    assert outcome.code is None
    assert check_mutants.judge(outcome)["status"] == "UNCLEAR"
