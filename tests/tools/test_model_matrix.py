"""The table of families has a row for each family of the register, and its cells count tests that exist."""

from __future__ import annotations

import ast
import json
import pathlib
import sys
from types import SimpleNamespace

import pytest

from megatron_rl.weights.families.register import FAMILIES
from tests.workers.nursery import Nursery

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import model_matrix  # noqa: E402

from tools.model_proofs.columns import COLUMNS  # noqa: E402
from tools.model_proofs.outcomes import named  # noqa: E402

HOST = {"device": "a CPU", "python": "3.11", "versions": {"torch": "2"}}


def case(outcome: str, family: str = "qwen3", column: str = COLUMNS[0].title, reason: str = "") -> dict:
    return dict(column=column, families=[family], outcome=outcome, reason=reason)


def test_every_test_of_a_column_exists() -> None:
    for test in (test for column in COLUMNS for test in column.tests):
        file, _, function = test.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert function in {x.name for x in tree.body if isinstance(x, ast.FunctionDef)}, test


def test_every_family_is_met_by_cases_that_pytest_collects(nursery: Nursery, tmp_path: pathlib.Path) -> None:
    """Every family's log-probs and files are tested, and every cell's cases are ones that pytest collects."""
    found = tmp_path / "found.json"
    pytest_itself = pathlib.Path(pytest.__file__).parent / "__main__.py"
    options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "tools.model_proofs.outcomes"]
    tests = [f"{ROOT}/{test}" for column in COLUMNS for test in column.tests]
    code, printed = nursery.run_script(
        pytest_itself, *options, f"--rootdir={ROOT}", "-c", f"{ROOT}/setup.cfg", "--proofs", str(found), *tests
    )
    assert code == 0, printed
    cases = json.loads(found.read_text())
    assert {x["column"] for x in cases.values()} == {column.title for column in COLUMNS}
    for title in (COLUMNS[0].title, "files and round trip"):
        met = {family for x in cases.values() if x["column"] == title for family in x["families"]}
        assert met >= set(FAMILIES), f"{title}: no case of {set(FAMILIES) - met}"


def test_the_page_has_a_row_for_each_family_of_the_register() -> None:
    """``make models`` writes them; a family that was added since has none yet."""
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    rows = page.partition(model_matrix.BEGIN)[2].partition(model_matrix.END)[0].splitlines()
    missing = [name for name in FAMILIES if not any(x.startswith(f"| {model_matrix.models_of(name)} |") for x in rows)]
    assert not missing, f"docs/models.md has no row for {missing}; run make models"
    assert len([x for x in rows if x.startswith("| ")]) == len(FAMILIES) + 1


@pytest.mark.parametrize(
    ("cases", "words"),
    [
        ([], "not run: no case"),
        ([case("passed"), case("passed")], "passed (2)"),
        ([case("passed"), case("failed"), case("long")], "failed: 1 of 2"),
        ([case("passed"), case("skipped")], "passed (1)"),
        ([case("skipped", reason="no GPU")], "not run: no GPU"),
        ([case("long"), case("long")], "not run: 2 long"),
        ([case("collected")], "not run: 1 to run"),
        ([case("passed"), case("collected")], "passed (1); 1 to run"),
        ([case("passed", "llama"), case("passed", column="forecast")], "not run: no case"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_cell_counts_what_ran_and_says_what_did_not(cases: list[dict], words: str) -> None:
    assert model_matrix.cell("qwen3", COLUMNS[0].title, dict(enumerate(cases)), {}) == words


def test_a_column_that_did_not_run_is_never_passed() -> None:
    reasons = {COLUMNS[0].title: "pytest did not end"}
    assert model_matrix.cell("qwen3", COLUMNS[0].title, {"x": case("passed")}, reasons) == "not run: pytest did not end"


def test_the_table_stands_between_the_markers_and_nothing_else_changes(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "models.md"
    page.write_text(f"before\n{model_matrix.BEGIN}\nold\n{model_matrix.END}\nafter\n")
    text = model_matrix.table({"x": case("passed")}, {}, HOST, 90.0, "beside other work")
    model_matrix.write(page, text)
    written = page.read_text()
    assert written.startswith(f"before\n{model_matrix.BEGIN}\n") and written.endswith(f"{model_matrix.END}\nafter\n")
    assert "old" not in written and "a CPU, Python 3.11, torch 2; beside other work" in written
    assert written.count("\n| ") == len(FAMILIES) + 1 and "| passed (1) |" in written


def test_a_case_names_a_family_by_a_parameter_or_a_row_of_its_modules_table() -> None:
    module = SimpleNamespace(CASES={"EP2": (2, ("parallel.expert=2",), "glm4_moe")}, OTHER={"x": ("llama",)})
    item = SimpleNamespace(callspec=SimpleNamespace(params={"name": "EP2", "kind": "qwen2 tied"}), module=module)
    assert {"glm4_moe", "qwen2"} <= named(item) and "llama" not in named(item)
    assert named(SimpleNamespace(module=module)) == set()
