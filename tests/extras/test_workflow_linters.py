"""zizmor finds no hole in the workflows, and they and the issue forms have GitHub's published form."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

from tests.patience import patient
from tests.runs.command import ROOT
from tools import release

BOUND_S = patient(300)
GITHUB = ROOT / ".github"
pytestmark = pytest.mark.network


def run(*words: str) -> tuple[int, str]:
    """Run a program of the package index in an environment of its own."""
    command = release.uv("tool", "run", "--quiet", *words)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S, check=False)
    return done.returncode, done.stdout + done.stderr


def zizmor(folder: pathlib.Path) -> tuple[int, str]:
    """Read all workflows of a folder, without asking GitHub for the actions that they name."""
    return run("zizmor", "--offline", "--no-progress", "--persona=pedantic", "--min-severity=low", str(folder))


def of_form(form: str, *paths: pathlib.Path) -> tuple[int, str]:
    return run("check-jsonschema", "--builtin-schema", f"vendor.{form}", *map(str, paths))


def test_zizmor_finds_nothing_in_the_workflows_and_a_hole_that_is_planted(tmp_path: pathlib.Path) -> None:
    code, said = zizmor(GITHUB / "workflows")
    assert code == 0, said
    shutil.copytree(GITHUB / "workflows", tmp_path / ".github/workflows")
    planted = tmp_path / ".github/workflows/ci.yml"
    text = planted.read_text()
    planted.write_text(
        text.replace('make "$TARGET"', "make ${{ github.head_ref }}").replace("contents: read", "contents: write")
    )
    code, said = zizmor(tmp_path)
    assert code != 0 and "template-injection" in said and "excessive-permissions" in said, said


def test_workflows_and_issue_forms_have_github_s_form_and_a_typo_has_not(tmp_path: pathlib.Path) -> None:
    workflows, forms = sorted((GITHUB / "workflows").glob("*.yml")), sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
    for form, paths in (("github-workflows", workflows), ("github-issue-forms", forms)):
        assert paths
        code, said = of_form(form, *paths)
        assert code == 0, said
        (tmp_path / "typo.yml").write_text(
            paths[0].read_text().replace("timeout-minutes", "timeout-minuets").replace("label:", "lable:")
        )
        code, said = of_form(form, tmp_path / "typo.yml")
        assert code == 1 and ("minuets" in said or "label" in said), said
