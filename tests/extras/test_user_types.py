"""A user's typed code passes `mypy --strict` and pyright beside the installed wheel, and a wrong use of it does not."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence

import pytest

from tests.patience import patient
from tests.runs.command import ROOT, said_by
from tools import release

BOUND_S = patient(900)  # both read torch, transformers and Megatron-Core; a minute and a half of one core
pytestmark = pytest.mark.network
CHECKERS = {
    "mypy": ("mypy", ("mypy", "--strict", "--no-error-summary", "--python-executable")),
    "pyright": ("pyright[nodejs]", ("pyright", "--pythonpath")),
}
WRONG = {
    "step(reward='much')": ("import megatron_rl.environment as e", "e.Step(reward='much', done=True)"),
    "a key that is none": ("from megatron_rl.config import load_config", "load_config(None).optimizer.lrr"),
    "a shape of no value": ("from megatron_rl.types import Sample", "Sample(sample_id='s', prompt_tokens=3)"),
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return the interpreter of an environment that holds the wheel, and finds what that asks for in this one."""
    folder = tmp_path_factory.mktemp("typed")
    venv.create(folder / "venv")
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # of the tree as it lies here, committed or not
    shutil.copytree(ROOT / "megatron_rl", folder / "tree/megatron_rl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, folder / "tree" / name)
    release.build_wheel(folder / "tree", folder / "dist", "--wheel", epoch="1700000000")
    (wheel,) = (folder / "dist").glob("*.whl")
    interpreter = folder / "venv/bin/python"
    said_by(
        release.uv("pip", "install", "--quiet", "--no-deps", "--python", str(interpreter), str(wheel)), folder, BOUND_S
    )
    return interpreter


def judged(checker: str, python: pathlib.Path, folder: pathlib.Path, files: Sequence[pathlib.Path]) -> tuple[int, str]:
    """Return a checker's exit code and what it said of files, read in ``folder``, where no tree of ours lies."""
    package, words = CHECKERS[checker]
    command = release.uv("tool", "run", "--quiet", "--from", package, *words, str(python), *map(str, files))
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=BOUND_S, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long(seconds=150)
@pytest.mark.parametrize("checker", CHECKERS)
def test_users_code_and_the_library_example_are_typed(
    checker: str, python: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    files = [tmp_path / "users_code.py", tmp_path / "one_step.py"]
    shutil.copy(ROOT / "tests/extras/users_code.py", files[0])
    shutil.copy(ROOT / "examples/library/one_step.py", files[1])
    code, said = judged(checker, python, tmp_path, files)
    assert code == 0, said
    for number, (imports, line) in enumerate(WRONG.values()):
        (tmp_path / f"wrong_{number}.py").write_text(f"{imports}\n\nprint({line})\n")
    code, said = judged(checker, python, tmp_path, sorted(tmp_path.glob("wrong_*.py")))
    assert code == 1 and all(f"wrong_{number}.py:3" in said for number in range(len(WRONG))), said


def test_the_checkers_read_an_interpreter_that_has_the_package(python: pathlib.Path) -> None:
    where = "import megatron_rl, pathlib; print(pathlib.Path(megatron_rl.__file__).with_name('py.typed').is_file())"
    assert said_by([str(python), "-c", where], python.parent, BOUND_S, PYTHONPATH="") == "True\n"
    assert str(python) != sys.executable
