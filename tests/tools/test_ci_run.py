"""`.ci/run` over a small project: what failed by chance is named, what fails again is red, six sixths are all."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.patience import HANG_S, patient
from tests.selection import chosen_share, share_of

ROOT = pathlib.Path(__file__).parents[2]
TARGETS = ("test", "test-oracles", "test-tinker", "test-s3", "test-vllm", "test-extras", "test-long")
STEADY = "def test_steady():\n    pass\n"
LONG = "import pytest\n\n\n@pytest.mark.long\n@pytest.mark.parametrize('i', range(12))\ndef test_long(i):\n    pass\n"
BY_CHANCE = """import pathlib


def test_by_chance():
    seen = pathlib.Path("seen")
    again = seen.exists()
    seen.touch()
    assert again
"""
BREAKS_OFF = """

def test_that_ends_pytest():
    import pytest
    pytest.exit("broken off")
"""
pytestmark = pytest.mark.process


@pytest.fixture
def project(tmp_path: pathlib.Path) -> pathlib.Path:
    """Make a project of seven targets, each a file of its own, none of which imports anything large."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    shutil.copy(ROOT / "tests" / "selection.py", tmp_path / "tests")
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "setup.cfg").write_text("[tool:pytest]\nmarkers =\n    long: long\n")
    recipes = "".join(f"{name}:\n\t$(PYTHON) -m pytest tests/{name}.py $(PYTEST_ARGS)\n" for name in TARGETS)
    (tmp_path / "Makefile").write_text(f".PHONY: {' '.join(TARGETS)}\n{recipes}")
    for name in TARGETS:
        (tmp_path / "tests" / f"{name}.py").write_text(STEADY)
    (tmp_path / "tests" / "test-long.py").write_text(LONG)
    return tmp_path


def run_ci(project: pathlib.Path, share: int = 1) -> tuple[int, list[str]]:
    """Return the exit code and the lines after the last part's own."""
    # of the installed plugins only the one that knows -n: each of a dozen pytests starts in half the time
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    environment = {"PATH": f"{pathlib.Path(sys.executable).parent}:/usr/bin:/bin", "CI_SHARE": str(share), **plugins}
    given = dict(cwd=project, env=environment, timeout=patient(HANG_S))
    ended = subprocess.run(["bash", ".ci/run"], capture_output=True, text=True, **given)
    return ended.returncode, ended.stdout.partition("\nSixth")[2].splitlines()


def test_what_fails_by_chance_and_the_drawn_sixth_are_named_and_the_run_is_green(project: pathlib.Path) -> None:
    (project / "tests" / "test-tinker.py").write_text(BY_CHANCE)
    names = {f"tests/test-long.py::test_long[{i}]" for i in range(12)}
    code, lines = run_ci(project, share=2)
    assert code == 0 and lines[-1] == "UNSTEADY: tests/test-tinker.py::test_by_chance", lines
    assert any("Tinker" in line and "1 failed" in line for line in lines)
    ran = {line.strip() for line in lines if line.startswith("  ")}
    assert ran == {x for x in names if share_of(x, 6) == 2} and ran, lines


@pytest.mark.long
def test_what_fails_again_and_a_part_that_cannot_start_or_breaks_off_end_with_1(project: pathlib.Path) -> None:
    (project / "tests" / "test.py").write_text(STEADY + "\n\ndef test_wrong():\n    assert 1 == 2\n")
    (project / "Makefile").write_text((project / "Makefile").read_text().replace("tests/test-vllm.py", "--no-such"))
    (project / "tests" / "test-oracles.py").write_text(BY_CHANCE + BREAKS_OFF)
    code, lines = run_ci(project)
    assert code == 1 and "FAILED: tests/test.py::test_wrong" in lines, lines
    for part in ("vLLM", "oracles"):
        assert any(part in line and "FAILED with code 2" in line for line in lines), lines


def test_six_sixths_are_all_long_tests_once() -> None:
    names = [f"tests/test-long.py::test_long[{i}]" for i in range(100)]
    shares = [[x for x in names if share_of(x, 6) == share] for share in range(1, 7)]
    assert sorted(sum(shares, [])) == sorted(names) and all(shares)


@pytest.mark.parametrize("text", ["0/6", "7/6", "3", "a/b", ""])
def test_no_share_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="--long-tests .* must be none or a share such as 3/6"):
        chosen_share(text)
