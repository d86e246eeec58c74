"""The table of families has a row for each family of the register, and its cells count tests that exist."""

import ast
import json
import pathlib
from types import SimpleNamespace

import model_matrix
import pytest

from megatron_rl.weights.families.register import FAMILIES
from tests.tools import ROOT, words
from tests.workers.nursery import Nursery
from tools.model_proofs.columns import COLUMNS
from tools.model_proofs.outcomes import named

HOST = {"device": "a CPU", "python": "3.11", "versions": {"torch": "2"}}


def case(outcome: str, family: str = "qwen3", column: str = COLUMNS[0].title, reason: str = "") -> dict:
    return dict(column=column, families=[family], outcome=outcome, reason=reason)


def test_every_test_of_a_column_exists_and_the_page_has_a_row_for_each_family() -> None:
    for test in (test for column in COLUMNS for test in column.tests):
        file, _, function = test.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert function in {x.name for x in tree.body if isinstance(x, ast.FunctionDef)}, test
    # ``make models`` writes them; a family that was added since has none yet
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    rows = page.partition(model_matrix.BEGIN)[2].partition(model_matrix.END)[0].splitlines()
    missing = [name for name in FAMILIES if not any(x.startswith(f"| {model_matrix.models_of(name)} |") for x in rows)]
    assert not missing, f"docs/models.md has no row for {missing}; run make models"
    assert len([x for x in rows if x.startswith("| ")]) == len(FAMILIES) + 1


def test_every_family_is_met_by_cases_that_pytest_collects(nursery: Nursery, tmp_path: pathlib.Path) -> None:
    found, given = tmp_path / "found.json", "--collect-only -qq -p no:cacheprovider -p tools.model_proofs.outcomes"
    given = [*words(given), f"--rootdir={ROOT}", "-c", f"{ROOT}/setup.cfg", "--proofs", str(found)]
    tests = [f"{ROOT}/{test}" for column in COLUMNS for test in column.tests]
    code, printed = nursery.run_script(pathlib.Path(pytest.__file__).parent / "__main__.py", *given, *tests)
    assert code == 0, printed
    cases = json.loads(found.read_text())
    assert {x["column"] for x in cases.values()} == {column.title for column in COLUMNS}
    for title in (COLUMNS[0].title, "files and round trip"):
        met = {family for x in cases.values() if x["column"] == title for family in x["families"]}
        assert met >= set(FAMILIES), f"{title}: no case of {set(FAMILIES) - met}"


@pytest.mark.parametrize(("cases", "words"), [
    ([], "not run: no case"),
    ([case("passed"), case("passed")], "passed (2)"),
    ([case("passed"), case("failed"), case("long")], "failed: 1 of 2"),
    ([case("passed"), case("skipped")], "passed (1)"),
    ([case("skipped", reason="no GPU")], "not run: no GPU"),
    ([case("long"), case("long")], "not run: 2 long"),
    ([case("collected")], "not run: 1 to run"),
    ([case("passed"), case("collected")], "passed (1); 1 to run"),
    ([case("passed", "llama"), case("passed", column="forecast")], "not run: no case"),
])
def test_a_cell_counts_what_ran_and_says_what_did_not(cases: list[dict], words: str) -> None:
    for reasons, said in (({}, words), ({COLUMNS[0].title: "no end"}, "not run: no end")):
        assert model_matrix.cell("qwen3", COLUMNS[0].title, dict(enumerate(cases)), reasons) == said


def test_outcomes_of_an_earlier_run_are_taken_by_node_id(tmp_path: pathlib.Path) -> None:
    """Of three collected cases one passed, one failed, and one no report names; a case of no column is passed over."""
    report, start = tmp_path / "report.xml", '<testcase file="tests/a.py" name="test_'
    rows = f'{start}x[1]" />{start}x[2]"><failure message="assert 1\n2">...</failure></testcase>{start}y" />'
    report.write_text(f"<testsuites><testsuite>{rows}</testsuite></testsuites>")
    cases = {f"tests/a.py::test_x[{number}]": case("collected") for number in (1, 2, 3)}
    model_matrix.take_outcomes(cases, [report])
    found = [(x["outcome"], x["reason"]) for x in cases.values()]
    assert found == [("passed", ""), ("failed", "assert 1 2"), ("collected", "")]


def test_the_table_stands_between_the_markers_and_nothing_else_changes(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "models.md"
    page.write_text(f"before\n{model_matrix.BEGIN}\nold\n{model_matrix.END}\nafter\n")
    model_matrix.write(page, model_matrix.table({"x": case("passed")}, {}, HOST, 90.0, "beside other work"))
    written = page.read_text()
    assert written.startswith(f"before\n{model_matrix.BEGIN}\n") and written.endswith(f"{model_matrix.END}\nafter\n")
    assert "old" not in written and "a CPU, Python 3.11, torch 2; beside other work" in written
    assert written.count("\n| ") == len(FAMILIES) + 1 and "| passed (1) |" in written


def test_a_case_names_a_family_by_a_parameter_or_a_row_of_its_modules_table() -> None:
    module = SimpleNamespace(CASES={"EP2": (2, ("parallel.expert=2",), "glm4_moe")}, OTHER={"x": ("llama",)})
    item = SimpleNamespace(callspec=SimpleNamespace(params={"name": "EP2", "kind": "qwen2 tied"}), module=module)
    assert {"glm4_moe", "qwen2"} <= named(item) and "llama" not in named(item)
    assert named(SimpleNamespace(module=module)) == set()
