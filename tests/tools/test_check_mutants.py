"""Checks that the table of tools/check_mutants.py fits this tree; on a small tree, that it tells kills from errors."""

import ast
import functools
import json
import pathlib
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator

import check_mutants
import pytest
from check_mutants import MUTANTS
from mutants.table import AREAS, Mutant, read

from tests.tools import ROOT

pytestmark = pytest.mark.process


@functools.cache
def defined_in(name: str) -> set[str]:
    """Return the functions of a test file; many mutants name the same one."""
    return {node.name for node in ast.parse((ROOT / name).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_line_occurs_once_and_parses_with_its_fault_and_every_test_named_exists() -> None:
    for mutant in MUTANTS:
        text = read(ROOT, mutant)
        assert len(mutant.places(text)) == 1 and mutant.line != mutant.becomes, mutant.name
        assert ast.dump(ast.parse(mutant.planted(text))) != ast.dump(ast.parse(text)), mutant.name
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            name, _, function = test.partition("::")
            assert (ROOT / name).is_file(), (mutant.name, test)
            assert not function or function.partition("[")[0] in defined_in(name), (mutant.name, test)


def test_names_are_unique_every_area_has_two_and_the_page_names_every_mutant_and_its_file() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    counts = Counter(mutant.area for mutant in MUTANTS)
    assert set(counts) == set(AREAS) and min(counts.values()) >= 2, counts
    assert {"gspo-single-token", "plan-cap-one-too-large"} <= {mutant.name for mutant in MUTANTS}
    lines = (ROOT / "docs/evidence/mutants.md").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| `")]
    found = [(row[0].strip("| `"), row[1].strip("`")) for row in rows]
    assert found == [(mutant.name, mutant.file.removeprefix("megatron_rl/")) for mutant in MUTANTS]


SMALL = {
    "megatron_rl/__init__.py": "",  # without it an installed package of this name would be found first
    "megatron_rl/algorithm/noise.py": "def double(x):\n    y = 2 * x\n    return y\n",
    "tests/test_small.py": """from megatron_rl.algorithm.noise import double

def test_one():
    assert double(2) == 4

def test_positive():
    assert double(2) > 0

def test_broken():
    assert double(2) == 5
""",
}


def fault(name: str, becomes: str, *tests: str) -> Mutant:
    named = dict(name=name, file="megatron_rl/algorithm/noise.py", fault="a wrong factor")
    return Mutant(line="y = 2 * x", becomes=becomes, tests=tuple(f"tests/test_small.py{x}" for x in tests), **named)


@pytest.fixture
def tree(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Make a git repository of SMALL with nothing committed, where pytest starts without plugins, in half the time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    root = tmp_path / "tree"
    for name, text in SMALL.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return root


@pytest.mark.long
def test_a_kill_a_survivor_and_an_error_are_told_apart(tree: pathlib.Path, tmp_path: pathlib.Path, capsys) -> None:
    mutants = (fault("seen", "y = 3 * x", "::test_positive", "::test_one"),
               fault("unseen", "y = 3 * x", "::test_positive"), fault("unimportable", "y = (", "::test_one"))
    page, rows = tmp_path / "mutants.md", tmp_path / "mutants.json"
    assert check_mutants.main(["--json", str(rows), "--markdown", str(page)], mutants=mutants, root=tree) == 1
    found = json.loads(rows.read_text())["mutants"]
    statuses = {"seen": "KILLED", "unseen": "SURVIVED", "unimportable": "UNCLEAR"}
    assert {x["name"]: x["status"] for x in found} == statuses and {x["line_number"] for x in found} == {2}
    assert found[0]["by"] == "tests/test_small.py::test_one"
    printed = capsys.readouterr().out
    assert "KILLED by tests/test_small.py::test_one" in printed and "1 of 3 killed" in printed
    assert "| `seen` | `algorithm/noise.py` | a wrong factor | `test_small.py::test_one` |" in page.read_text()
    assert (tree / "megatron_rl/algorithm/noise.py").read_text() == SMALL["megatron_rl/algorithm/noise.py"]
    # the whole suite is asked about a survivor; this file is not committed, and copied
    (tree / "tests/test_small.py").write_text(SMALL["tests/test_small.py"].replace("== 5", "== 4"))
    assert check_mutants.main(["--whole"], mutants=[mutants[1]], root=tree) == 0
    assert "KILLED by tests/test_small.py::test_one (of the whole suite)" in capsys.readouterr().out


def test_what_cannot_be_judged_is_said(tree: pathlib.Path, capsys) -> None:
    """Tests that fail without a fault or do not exist, and unknown names, end the tool with 2, a lost line with 1."""
    for test, only, said in (
        ("::test_broken", [], "do not all pass without a fault (pytest's exit code 1)"),
        ("::test_none", [], "`make test` runs none of tests/test_small.py::test_none"),
        ("::test_one", ["--only", "unknown"], "--only unknown names no mutant"),
    ):
        assert check_mutants.main(only, mutants=[fault("x", "y = 3 * x", test)], root=tree) == 2
        assert said in capsys.readouterr().err
    (tree / "megatron_rl/algorithm/noise.py").write_text("def double(x):\n    return 2 * x\n")
    assert check_mutants.main([], mutants=[fault("gone", "y = 3 * x", "::test_one")], root=tree) == 1
    assert "gone: the line occurs 0 times in megatron_rl/algorithm/noise.py" in capsys.readouterr().err


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Let processes started here be interrupted, where the suite ignores SIGINT as what a shell put aside does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_tests_that_do_not_end_are_no_kill(tree: pathlib.Path, interrupts: None) -> None:
    (tree / "tests/test_small.py").write_text("import time\n\n\ndef test_one():\n    time.sleep(3600)\n")
    outcome = check_mutants.run_tests(tree, ["tests/test_small.py"], 2.0)
    assert outcome.code is None and check_mutants.judge(outcome)["status"] == "UNCLEAR"
