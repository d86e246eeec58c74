"""Every tool says how to call it, with an example, and refuses what it does not know by exit code 2."""

from __future__ import annotations

import pathlib

import pytest

from tests.workers.nursery import Nursery

TOOLS = sorted(
    path
    for path in (pathlib.Path(__file__).resolve().parents[2] / "tools").rglob("*.py")
    if "__main__" in path.read_text()
)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_help_has_an_example(nursery: Nursery, tool: pathlib.Path) -> None:
    code, printed = nursery.run_script(tool, "--help")
    assert code == 0 and "example" in printed.lower() and tool.stem in printed, printed


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_an_unknown_option_ends_with_2(nursery: Nursery, tool: pathlib.Path) -> None:
    code, printed = nursery.run_script(tool, "--no-such-option")
    assert code == 2 and ("--no-such-option" in printed or "required" in printed), printed
