"""A plugin of pytest that keeps the cases of the columns, and writes each one's families and outcome.

python -m pytest -p tools.model_proofs.outcomes --proofs found.json tests/equality/test_weights.py
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest

from megatron_rl.weights.families.register import FAMILIES, TEXT_PARTS
from tests.published.configs import ELEMENTS, fields_of
from tests.reference import FAMILIES as DENSE
from tests.reference import MIXTURES, WINDOWED, tiny_config
from tools.model_proofs.columns import COLUMNS, Column


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proofs", metavar="PATH", help="write the outcomes of the families' cases there")
    parser.addoption("--proofs-long", action="store_true", help="run the long cases too")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(pathlib.Path(config.getoption("--proofs"))), "proofs")


def variants() -> dict[str, str]:
    """Return the family of each name by which a test may mean one: its own, a tiny variant's, a released model's."""
    tiny = {name: tiny_config(name).model_type for name in (*DENSE, *MIXTURES, *WINDOWED)}
    written = {name: fields_of(name)["model_type"] for name in ELEMENTS}
    released = {name: TEXT_PARTS.get(model_type, model_type) for name, model_type in written.items()}
    return {name: name for name in FAMILIES} | tiny | released


def words(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield from (value, *value.split())
    elif isinstance(value, tuple | list):
        for part in value:
            yield from words(part)


def named(item: pytest.Item) -> set[str]:
    """Return the words of a case's parameters, and of the rows that they name in tables of the test's module."""
    found = set(words(list(item.callspec.params.values()))) if "callspec" in vars(item) else set()
    tables = [table for table in vars(item.module).values() if isinstance(table, dict)]
    return found.union(*(words(table[word]) for word in found for table in tables if word in table))


class Outcomes:
    """Keeps what became of each case: passed, failed, skipped, long (not run) or collected (not run yet)."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.cases: dict[str, dict] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        families = variants()
        columns = {test: column for column in COLUMNS for test in column.tests}
        kept = []
        for item in items:
            column = columns.get(item.nodeid.partition("[")[0])
            found = self._families_of(item, column, families) if column else []
            if not found:
                continue
            left_out = item.get_closest_marker("long") and not config.getoption("--proofs-long")
            self.cases[item.nodeid] = dict(
                column=column.title, families=found, outcome="long" if left_out else "collected", reason=""
            )
            if not left_out:
                kept.append(item)
        items[:] = kept

    @staticmethod
    def _families_of(item: pytest.Item, column: Column, families: dict[str, str]) -> list[str]:
        if item.nodeid.partition("[")[0] in column.whole:
            return sorted({families[name] for name in (*DENSE, *MIXTURES)})
        return sorted({families[word] for word in named(item) if word in families})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = self.cases[report.nodeid]
        if report.failed:
            case |= dict(outcome="failed", reason=report.longreprtext.strip().splitlines()[-1][:300])
        elif report.skipped:
            case |= dict(outcome="skipped", reason=str(report.longrepr[-1])[:300])
        elif report.when == "call" and case["outcome"] == "collected":
            case["outcome"] = "passed"

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.cases, indent=1) + "\n")
