"""Checks tools/gpu_report.py: no step stops the rest, each record says how it ended, every command can be parsed."""

import json
import os
import pathlib
import shlex
import subprocess
import sys
import time

import acceptance
import gpu_report
import pytest
from acceptance_matrix.cells import CELLS
from gpu_report_steps import records
from gpu_report_steps.parts import EXTRAS, PARTS, STEPS, Step
from gpu_report_steps.report import headline, markdown
from gpu_report_steps.running import Runner

from tests.patience import patient, until
from tests.tools import ROOT
from tests.tools.processes import alive

MACHINE = dict(gpus=0, device="a CPU", driver="none", **dict.fromkeys(("cuda", "cudnn", "nccl")), python="3.12")
MACHINE["versions"] = {"torch": "2"}
WRITES = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'figure': 2.5}))"
# It starts a process in a session of its own, as torchrun does, and waits for ever.
HANGS = """import subprocess, sys, time, pathlib
child = subprocess.Popen(['sleep', '3600'], start_new_session=True)
pathlib.Path(sys.argv[1]).with_name('child').write_text(str(child.pid))
time.sleep(3600)"""
MEETS = """import pathlib, sys, time
folder = pathlib.Path(sys.argv[1]).parents[2]
(folder / sys.argv[1].split('/')[-2]).touch()
while not all((folder / x).exists() for x in ('left', 'right')): time.sleep(0.01)"""
PROCESS_GROUP = """import os, sys, torch
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
open(sys.argv[1], "w").write("{}")
"""


def step(name: str, command: str, *, part: int = 1, limit_s: float = patient(60.0), **facts: object) -> Step:
    return Step(name=name, part=part, measures="a step", command=command, limit_s=limit_s, **{"cpu": command} | facts)


def planted(name: str, script: str, **facts: object) -> Step:
    return step(name, shlex.join(["{python}", "-c", script.replace("{", "{{").replace("}", "}}"), "{out}"]), **facts)


class Limited(Runner):
    def start(self, command: list[str], step: Step, log: pathlib.Path) -> subprocess.Popen:
        """Start the step; the limit of one that hangs begins when its child runs."""
        process, child = super().start(command, step, log), log.with_name("child")
        assert step.name != "hangs" or until(lambda: child.exists() and child.read_text())
        return process


def run(folder: pathlib.Path, *steps: Step, left_s: float = 600.0) -> list[dict]:
    """Run the steps and return their records in the order in which they ended."""
    runner = Limited(out=folder, machine=MACHINE, commit="c0ffee", ends_at=time.monotonic() + left_s, cores=2)
    found: list[dict] = []

    def keep(record: dict) -> None:
        found.append(record)
        records.keep(record, folder)
        records.write_report(folder, folder / "copied")

    runner.run_part(steps, keep)
    return found


@pytest.mark.process
def test_a_step_that_fails_hangs_or_dies_does_not_stop_the_rest(tmp_path: pathlib.Path) -> None:
    judges = WRITES.replace("{'figure': 2.5}", "{'failed': 'three tensors differ'}") + "; sys.exit(1)"
    failed, judged, hung, killed, absent, last = run(
        tmp_path,
        planted("fails", "raise ValueError('a planted error of /some/where/x.py')"),
        planted("judges", judges),
        planted("hangs", HANGS, limit_s=0.1),
        planted("dies", "import os; os.kill(os.getpid(), 9)"),
        step("absent", "no-such-program"),
        planted("passes", WRITES),
    )
    assert (failed["outcome"], failed["reason"]) == ("failed", "ValueError: a planted error of <path>")
    assert (judged["outcome"], judged["reason"]) == ("failed", "three tensors differ")
    assert hung["outcome"] == "timed out" and "killed with all that it started" in hung["reason"]
    assert (killed["outcome"], killed["reason"]) == ("killed", "ended by SIGKILL, not by this report")
    assert (absent["outcome"], absent["reason"]) == ("not run", "no-such-program: No such file or directory")
    assert (last["outcome"], last["found"]) == ("passed", {"figure": 2.5})
    assert all(record["machine"] == MACHINE and record["seconds"] >= 0 for record in (failed, hung, killed, last))
    assert not alive(int((tmp_path / "steps" / "hangs" / "child").read_text()))
    page = (tmp_path / "report.md").read_text()
    assert "2 failed, 1 killed, 1 not run, 1 passed, 1 timed out." in page and str(tmp_path) not in page
    assert "| 1 | passes | passed |" in page and "figure 2.5" in page
    assert {x.name for x in (tmp_path / "copied").iterdir()} == {"report.md", "report.json", "logs.tar.gz"}
    assert len(json.loads((tmp_path / "copied" / "report.json").read_text())) == 6


@pytest.mark.process
def test_steps_that_compare_numbers_run_side_by_side_before_the_others(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path, planted("alone", WRITES), planted("left", MEETS, cores=1), planted("right", MEETS, cores=1))
    assert [x["outcome"] for x in found] == ["passed"] * 3 and found[-1]["name"] == "alone"


SHARES = {"first": "import helper\nfound(pid=os.getpid(), helper=helper.NAME, argv=sys.argv[2:])",
          "raises": "raise ValueError('a planted error')",
          "hangs": HANGS,
          "exits": "print('three'); sys.exit(3)",
          "dies": "os.kill(os.getpid(), 9)",
          "second": "import helper\nsys.path.insert(0, 'x'); os.environ['PLANTED'] = '1'\n"
          "found(pid=os.getpid(), helper=helper.NAME)\nsys.exit(0)",
          "third": "import helper\nprint('by', os.getppid(), sys.stdin.read())\n"
          "found(pid=os.getpid(), helper=helper.NAME, kept='x' in sys.path or 'PLANTED' in os.environ)"}
FOUND = "import json, os, sys\ndef found(**x): open(sys.argv[1], 'w').write(json.dumps(x))\n"


def sharing(folder: pathlib.Path, name: str, **facts: object) -> Step:
    """Write a script and a module beside it, and return the step that runs it in a process of several."""
    (folder / name).mkdir()
    (folder / name / "helper.py").write_text(f"NAME = {name!r}")
    (folder / name / "script.py").write_text(FOUND + SHARES[name])
    return step(name, f"{{python}} {folder / name / 'script.py'} {{out}} --more", shares=True, **facts)


@pytest.mark.process
def test_steps_share_a_process_until_one_does_not_pass(tmp_path: pathlib.Path) -> None:
    steps = [sharing(tmp_path, x, limit_s=0.1 if x == "hangs" else patient(60.0)) for x in SHARES]
    folder = tmp_path / "out"
    found = run(folder, steps[0], planted("alone", WRITES), *steps[1:])
    first, _, raised, hung, exited, died, second, third = found
    assert [x["name"] for x in found] == ["first", "alone", *list(SHARES)[1:]]
    assert (raised["outcome"], raised["reason"]) == ("failed", "ValueError: a planted error")
    assert hung["outcome"] == "timed out" and not alive(int((folder / "steps" / "hangs" / "child").read_text()))
    assert (exited["outcome"], exited["reason"]) == ("failed", "three")
    assert (died["outcome"], died["reason"]) == ("killed", "ended by SIGKILL, not by this report")
    assert [x["outcome"] for x in (first, second, third)] == ["passed"] * 3
    assert first["found"]["argv"] == ["--more"] and "script.py OUT --more" in first["command"]
    assert [x["found"]["helper"] for x in (first, second, third)] == ["first", "second", "third"]
    assert first["found"]["pid"] != second["found"]["pid"] == third["found"]["pid"] and not third["found"]["kept"]
    assert (folder / "steps" / "third" / "log.txt").read_text() == f"by {os.getpid()} \n"
    assert (folder / "steps" / "second" / "log.txt").read_text() == "" and not alive(third["found"]["pid"])


def test_parts_fit_their_calls_and_only_scripts_of_one_process_that_run_alone_share_one() -> None:
    assert {step.part for step in STEPS} == set(PARTS) and {step.carried for step in STEPS} == {"", *EXTRAS}
    for part in PARTS:
        steps = [step for step in STEPS if step.part == part]
        limits_s = sum(x.limit_s for x in steps if not x.cores) + max([x.limit_s for x in steps if x.cores] or [0])
        # a limit is twice what a step takes
        assert limits_s / 2 <= 60 * gpu_report.PART_MINUTES - 30, (part, limits_s / 2)
    assert len({step.name for step in STEPS}) == len(STEPS)
    shared = [step for step in STEPS if step.shares]
    assert {step.carried for step in shared} == {""} and not any(step.cores for step in shared)
    for command in (x for step in shared for x in (step.command, step.cpu) if x):
        python, script, *_ = shlex.split(command)
        assert python == "{python}" and script.startswith("{tools}/")


@pytest.mark.process
def test_what_leaves_a_process_group_ends_the_process(tmp_path: pathlib.Path) -> None:
    steps = [sharing(tmp_path, name) for name in ("first", "second", "third")]
    (tmp_path / "second" / "script.py").write_text(PROCESS_GROUP)
    first, second, third = run(tmp_path / "out", *steps)
    assert [x["outcome"] for x in (first, second, third)] == ["passed"] * 3
    assert "the script left a process group" in (tmp_path / "out" / "steps" / "second" / "log.txt").read_text()
    assert first["found"]["pid"] != third["found"]["pid"]


def test_what_passed_on_such_a_machine_from_this_commit_is_not_run_again() -> None:
    record = dict(name="skip", outcome="passed", machine=MACHINE, commit="c0ffee", command="a b")
    same = ("skip", MACHINE, "c0ffee", "a b")
    assert records.passed_before([record], *same)
    for place, other in enumerate(("run", {**MACHINE, "device": "1 x another"}, "decade", "a c")):
        assert not records.passed_before([record], *same[:place], other, *same[place + 1 :])
    for strange in ("c0ffee+", "unknown"):  # what the tree holds is not known
        assert not records.passed_before([{**record, "commit": strange}], "skip", MACHINE, strange, "a b")
    assert not records.passed_before([{**record, "outcome": "failed"}], "skip", MACHINE, "c0ffee", "a b")


def test_a_step_that_was_not_run_says_what_it_lacks_and_leaves_what_was_measured(tmp_path: pathlib.Path) -> None:
    (late,) = run(tmp_path, planted("late", WRITES), left_s=0.0)
    assert (late["outcome"], late["reason"]) == ("not run", "the time of this call is spent")
    passed = {**late, "outcome": "passed", "date": "2026-01-01T00:00:00"}
    records.keep(passed, tmp_path)
    records.keep(late, tmp_path)
    assert records.load(tmp_path) == [passed]
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps([{**passed, "date": "2026-01-02T00:00:00"}, {**late, "name": "other"}]))
    assert (records.take_in(earlier, tmp_path), records.take_in(earlier, tmp_path)) == (2, 0)
    assert [x["date"][:10] for x in records.load(tmp_path) if x["name"] == "late"] == ["2026-01-02"]
    gpu = step("gpu", "nvidia-smi", cpu="", needs="needs nvidia-smi")
    reasons = [x["reason"] for x in run(tmp_path, gpu, step("wheel", "x", part=4, carried="smollm2"))]
    assert reasons[0] == "needs nvidia-smi, this host has none"
    assert reasons[1].startswith("SmolLM2's wheel is neither installed nor carried")


@pytest.mark.long
@pytest.mark.process
def test_the_command_writes_the_report_of_a_real_step(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "gpu_report.py"), "--cpu", "--part", "2", "--only", "offload"]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(600), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = json.loads((tmp_path / "report.json").read_text())
    assert record["outcome"] == "passed" and record["found"]["different"] == 0
    assert record["found"]["bytes"] > 0 and record["machine"]["versions"]["torch"]
    page = (tmp_path / "report.md").read_text()
    assert "| 2 | offload | passed |" in page and str(tmp_path) not in page and str(ROOT) not in page


def test_every_cell_of_the_report_exists_and_its_shapes_are_folders_with_a_config() -> None:
    known = {f"={cell.name}" for cell in CELLS}
    for step in STEPS:
        for words in map(shlex.split, (step.command, step.cpu)):
            if "{tools}/acceptance.py" in words:
                chosen = set(words[words.index("--only") + 1].split(","))
                cells = acceptance.parse([x for x in words[2:] if x not in ("{out}", "--json")]).cells
                assert {f"={x.name}" for x in cells} == chosen <= known, (step.name, chosen - known)
        words = shlex.split(step.command)
        if "--hf-path" in words:
            folder = pathlib.Path(words[words.index("--hf-path") + 1].format(tools=ROOT / "tools"))
            assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"


def test_headline_is_the_steps_own_or_its_first_figures_and_the_page_names_every_machine_once() -> None:
    assert headline({"headline": ["a", "b"], "x": 1.0}) == ["a", "b"]
    assert headline({"rows": [{"s": 0.12345, "name": "n"}, {"s": 2}]}) == ["s 0.1235", "s 2"]
    cells = {"tally": "1 passed", "cells": [{"name": "pp2", "status": "failed", "reason": "gradient 1"}]}
    assert headline(cells) == ["1 passed", "pp2: gradient 1"]
    record = dict(part=1, commit="c0ffee", name="n", measures="", machine=MACHINE, command="c", seconds=1.0)
    record |= dict(outcome="passed", reason="", found={})
    page = markdown([record] * 2 + [{**record, "machine": {**MACHINE, "device": "1 x another"}, "reason": "a | b"}])
    assert page.count("a CPU, driver none") == 1 and "1 x another" in page and "a / b" in page
