"""A clean clone gives a wheel and an sdist that are a release, and either alone trains a new run to its end."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable

import pytest

from tests.patience import patient
from tests.runs.command import ROOT, rows_of, said_by
from tools import release

BOUND_S = patient(1800)  # the environment: torch and what the package asks for
pytestmark = pytest.mark.network


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> release.Release:
    """Clone the commit, and build it as `make dist` does."""
    folder = tmp_path_factory.mktemp("package")
    said_by(["git", "clone", "--quiet", str(ROOT), str(folder / "clone")], folder, BOUND_S)
    release.build(folder / "clone", folder / "dist")
    return release.Release.in_folder(folder / "clone", folder / "dist")


def test_the_commit_is_a_release_but_for_its_tag(made: release.Release) -> None:
    checks = [faults_of for faults_of in release.CHECKS.values() if faults_of is not release.tag_faults]
    assert len(checks) == len(release.CHECKS) - 1
    assert not [fault for faults_of in checks for fault in faults_of(made)]


def test_python_m_build_makes_the_wheel_of_make_dist_to_the_byte(made: release.Release, tmp_path: pathlib.Path) -> None:
    build = release.uv("tool", "run", "--quiet", "--from", "build", "pyproject-build", "--outdir", str(tmp_path))
    epoch = release.git(made.root, "log", "-1", "--format=%ct")
    said_by(build, made.root, BOUND_S, SOURCE_DATE_EPOCH=epoch)
    assert (tmp_path / made.wheel.name).read_bytes() == made.wheel.read_bytes()
    with tarfile.open(tmp_path / made.sdist.name) as one, tarfile.open(made.sdist) as other:
        assert {x.name for x in one if x.isfile()} == {x.name for x in other if x.isfile()}


def test_a_classifier_that_is_none_and_a_page_that_does_not_render_are_refused(made, tmp_path: pathlib.Path) -> None:
    wheel = tmp_path / made.wheel.name
    with zipfile.ZipFile(wheel, "w") as other:
        for name, content in made.packed().items():
            if name.endswith("/METADATA"):
                content = content.replace(b"Typing :: Typed", b"Typing :: Guessed")
                content = content.replace(b"Content-Type: text/markdown", b"Content-Type: text/parchment")
            other.writestr(name, content)
    faults = [*release.index_faults(release.Release(root=made.root, wheel=wheel, sdist=made.sdist))]
    assert len(faults) == 2 and "no classifier 'Typing :: Guessed'" in faults[0] and "'text/parchment'" in faults[1]


@pytest.fixture(scope="module")
def environment(made: release.Release, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Make an environment and install the wheel there with the pins, by plain pip: all that a user does."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    said_by([sys.executable, "-m", "venv", str(folder)], folder.parent, BOUND_S)
    pip = [str(folder / "bin/pip"), "install", "--quiet", "-c", str(made.root / "constraints.txt")]
    said_by([*pip, str(made.wheel)], folder.parent, BOUND_S)
    said_by([str(folder / "bin/pip"), "check"], folder.parent, BOUND_S)
    return folder


def user_of(environment: pathlib.Path, work: pathlib.Path) -> Callable[[str], str]:
    """Return what runs a line in ``work`` as somebody with this environment alone does; it returns what was said."""
    bare = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    bare |= {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    given = dict(cwd=work, env=bare, timeout=BOUND_S, check=False, capture_output=True, text=True)

    def says(line: str) -> str:
        done = subprocess.run(shlex.split(line), **given)
        assert done.returncode == 0, (line, done.stdout[-4000:], done.stderr[-4000:])
        return done.stdout

    return says


@pytest.mark.long(seconds=240)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_new_run_of_the_package_alone_ends_with_its_report(made, environment, tmp_path, kind: str) -> None:
    says = user_of(environment, tmp_path)
    if kind == "sdist":
        says(f"pip install --quiet --no-deps --force-reinstall {made.sdist}")
    where = says("python -c 'import megatron_rl; print(megatron_rl.__file__)'")
    assert where.startswith(str(environment)) and says("megatron-rl --version") == f"megatron-rl {made.version}\n"
    says("megatron_rl-doctor --json doctor.json")
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["healthy"] and {"thing": "megatron_rl", "found": made.version}.items() <= found["findings"][0].items()
    _, check, run = says("megatron-rl new my_run --tiny").splitlines()
    assert "my_run on 8 GPUs" in says(check.removeprefix("next: "))
    line = run.removeprefix("then: ")
    says(line if kind == "wheel" else f"{line} train.num_rollouts=3 sft.steps=10")
    rows = [row for row in rows_of(tmp_path / "my_run/run") if "reward/mean" in row]
    assert len(rows) == (30 if kind == "wheel" else 3)
    assert (tmp_path / "my_run/run/report.html").is_file()
    # it learned: the sums' answers are right more often than after the supervised steps
    if kind == "wheel":
        early, late = (sum(row["reward/mean"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
        assert late > early
    (weights,) = (tmp_path / "my_run/run/checkpoints").glob("step_*/hf/model.safetensors")
    assert weights.stat().st_size > 500_000
