"""Every tool says how to call it, with an example, and refuses what it does not know by exit code 2."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

TOOLS = sorted(path for path in (pathlib.Path(__file__).resolve().parents[1] / "tools").glob("*.py") if "__main__" in path.read_text())


def call(tool: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(tool), *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_help_has_an_example(tool: pathlib.Path) -> None:
    done = call(tool, "--help")
    assert done.returncode == 0 and "example" in done.stdout.lower() and tool.stem in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_an_unknown_option_ends_with_2(tool: pathlib.Path) -> None:
    done = call(tool, "--no-such-option")
    assert done.returncode == 2 and "--no-such-option" in done.stderr + done.stdout or "required" in done.stderr, done.stderr
