"""The workflows call make targets that exist, by actions pinned to a commit, with no more rights than they need."""

from __future__ import annotations

import itertools
import pathlib
import re
from collections.abc import Iterator

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
WORKFLOWS = {path.name: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
TARGETS = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.M))
# An action at a commit, with the release that the commit is in the comment beside it.
PINNED = re.compile(r"^ +(?:- )?uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
LONGEST_MINUTES = 60
PYTHONS = {"3.11", "3.12"}


def workflow(name: str) -> dict:
    """Return a workflow as it is read; YAML 1.1 takes the key `on` for true."""
    read = yaml.safe_load(WORKFLOWS[name].read_text())
    return {("on" if key is True else key): value for key, value in read.items()}


def jobs() -> Iterator[tuple[str, dict]]:
    for name in WORKFLOWS:
        yield from ((f"{name}:{job}", given) for job, given in workflow(name)["jobs"].items())


def values_of(job: dict) -> list[dict[str, str]]:
    """Return the values of a job's matrix, one of each of its runs."""
    return job.get("strategy", {}).get("matrix", {}).get("include", [{}])


def expanded(text: str, job: dict, step: dict) -> Iterator[str]:
    """Yield the text for each run of the job, with its matrix's values in the step's variables."""
    for given in values_of(job):
        filled = {
            key: re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found: given[found[1]], value)  # noqa: B023
            for key, value in {**step.get("env", {}), "": text}.items()
        }
        line = filled.pop("")
        for key, value in filled.items():
            line = line.replace(f'"${key}"', value)
        yield line


def happens(step: dict) -> bool:
    """Return whether a step runs in this tree: `if` may ask for a file, and for nothing else."""
    if "if" not in step:
        return True
    (path,) = re.fullmatch(r"hashFiles\('(.+)'\) != ''", step["if"]).groups()
    return (ROOT / path).is_file()


def test_there_are_workflows_and_each_job_has_a_deadline_and_one_host() -> None:
    assert {"ci.yml", "release.yml"} <= set(WORKFLOWS)
    for name, job in jobs():
        assert 0 < job["timeout-minutes"] <= LONGEST_MINUTES, name
        assert re.fullmatch(r"ubuntu-\d\d\.\d\d", job["runs-on"]), f"{name}: another host any day"


def test_every_line_that_a_workflow_runs_is_a_target_of_make() -> None:
    ran = set()
    for name, job in jobs():
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), (name, step)
            for line in expanded(step["run"], job, step) if "run" in step and happens(step) else ():
                found = re.fullmatch(r"make ([\w-]+)", line)
                assert found and found[1] in TARGETS, f"{name} runs {line!r}, which is no target of the Makefile"
                ran.add(found[1])
    assert {"lint", "test", "test-latest", "dist", "test-package", "release-check"} <= ran


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_to_commits_with_their_releases_beside_them(name: str) -> None:
    uses = [line for line in WORKFLOWS[name].read_text().splitlines() if "uses:" in line]
    assert uses and all(map(PINNED.match, uses)), [line for line in uses if not PINNED.match(line)]
    pins: dict[str, set[str]] = {}
    for line in itertools.chain.from_iterable(path.read_text().splitlines() for path in WORKFLOWS.values()):
        if found := re.search(r"uses: ([\w./-]+)@(.+)", line):
            pins.setdefault(found[1], set()).add(found[2])
    assert all(len(found) == 1 for found in pins.values()), f"one action at two commits: {pins}"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_read_and_only_the_upload_asks_for_a_token(name: str) -> None:
    given = workflow(name)
    assert given["permissions"] == {"contents": "read"}
    assert set(given["concurrency"]) == {"group", "cancel-in-progress"}
    assert set(given["on"]) <= {"push", "pull_request", "workflow_dispatch"}, "a trigger with the repository's rights"
    for job, content in given["jobs"].items():
        uploads = any("pypi-publish" in step.get("uses", "") for step in content["steps"])
        assert content.get("permissions", {}) == ({"id-token": "write"} if uploads else {}), job
        assert uploads <= ("environment" in content and "needs" in content), job
        for step in content["steps"]:
            if "actions/checkout@" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False, job
    assert "secrets." not in WORKFLOWS[name].read_text()


def test_every_python_of_the_package_is_tested_and_the_wheel_that_is_checked_is_uploaded() -> None:
    setup = (ROOT / "setup.py").read_text()
    named = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', setup))
    tested = {given["python"] for _, job in jobs() for given in values_of(job) if given}
    assert named == tested == PYTHONS
    build, publish = (workflow("release.yml")["jobs"][name] for name in ("build", "publish"))
    assert workflow("release.yml")["on"] == {"push": {"tags": ["v*"]}}
    assert [step["run"] for step in build["steps"] if "run" in step] == ["make dist", "make release-check"]
    up, down = build["steps"][-1]["with"], publish["steps"][0]["with"]
    assert (up["name"], up["path"]) == (down["name"], down["path"]) and publish["needs"] == "build"
    cached = [step for step in build["steps"] if "cache" in step.get("with", {})]
    assert not cached, "what another branch's run left in a cache would go into the release"
