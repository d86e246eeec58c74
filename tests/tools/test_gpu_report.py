"""Checks tools/gpu_report.py: no step stops the rest, each record says how it ended, every command can be parsed."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import subprocess
import sys
import time

import pytest

from tests.patience import patient
from tests.workers.nursery import Nursery

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import acceptance  # noqa: E402
import gpu_report  # noqa: E402
from acceptance_matrix.cells import CELLS  # noqa: E402
from gpu_report_steps import records  # noqa: E402
from gpu_report_steps.parts import EXTRAS, PARTS, STEPS, Step  # noqa: E402
from gpu_report_steps.report import headline, markdown  # noqa: E402
from gpu_report_steps.running import Runner  # noqa: E402

MACHINE = {
    "gpus": 0,
    "device": "a CPU",
    "driver": "none",
    "cuda": None,
    "cudnn": None,
    "nccl": None,
    "python": "3.12",
    "versions": {"torch": "2"},
}


def planted(name: str, script: str, *, limit_s: float = 30.0, cores: int = 0) -> Step:
    command = shlex.join(["{python}", "-c", script.replace("{", "{{").replace("}", "}}"), "{out}"])
    return Step(
        name=name, part=1, measures="a planted step", command=command, cpu=command, limit_s=limit_s, cores=cores
    )


def run(folder: pathlib.Path, *steps: Step, left_s: float = 600.0) -> list[dict]:
    """Run the steps and return their records in the order in which they ended."""
    runner = Runner(out=folder, machine=MACHINE, commit="c0ffee", ends_at=time.monotonic() + left_s, cores=2)
    found: list[dict] = []

    def keep(record: dict) -> None:
        found.append(record)
        records.keep(record, folder)
        records.write_report(folder, folder / "copied")

    runner.run_part(steps, keep)
    return found


WRITES = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'figure': 2.5}))"
# It starts a process in a session of its own, as torchrun does, and waits for ever.
HANGS = (
    "import subprocess, sys, time, pathlib\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'], start_new_session=True)\n"
    "pathlib.Path(sys.argv[1]).with_name('child').write_text(str(child.pid))\n"
    "time.sleep(3600)"
)


@pytest.mark.process
def test_a_step_that_fails_hangs_or_dies_does_not_stop_the_rest(tmp_path: pathlib.Path) -> None:
    failed, hung, killed, absent, last = run(
        tmp_path,
        planted("fails", "raise ValueError('a planted error of /some/where/x.py')"),
        planted("hangs", HANGS, limit_s=patient(0.5)),
        planted("dies", "import os; os.kill(os.getpid(), 9)"),
        Step(name="absent", part=1, measures="", command="no-such-program", cpu="no-such-program", limit_s=5.0),
        planted("passes", WRITES),
    )
    assert (failed["outcome"], failed["reason"]) == ("failed", "ValueError: a planted error of <path>")
    assert hung["outcome"] == "timed out" and "killed with all that it started" in hung["reason"]
    assert (killed["outcome"], killed["reason"]) == ("killed", "ended by SIGKILL, not by this report")
    assert (absent["outcome"], absent["reason"]) == ("not run", "no-such-program: No such file or directory")
    assert (last["outcome"], last["found"]) == ("passed", {"figure": 2.5})
    assert all(record["machine"] == MACHINE and record["seconds"] >= 0 for record in (failed, hung, killed, last))
    child = int((tmp_path / "steps" / "hangs" / "child").read_text())
    assert not alive(child)
    page = (tmp_path / "report.md").read_text()
    assert "1 failed, 1 killed, 1 not run, 1 passed, 1 timed out." in page and str(tmp_path) not in page
    assert "| 1 | passes | passed |" in page and "figure 2.5" in page
    assert {x.name for x in (tmp_path / "copied").iterdir()} == {"report.md", "report.json", "logs.tar.gz"}
    assert len(json.loads((tmp_path / "copied" / "report.json").read_text())) == 5


def alive(pid: int) -> bool:
    """Return whether a process runs; one that was killed and that nobody has waited for does not."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.process
def test_a_failing_steps_own_words_are_its_reason(tmp_path: pathlib.Path) -> None:
    script = WRITES.replace("{'figure': 2.5}", "{'failed': 'three tensors differ'}") + "; sys.exit(1)"
    (record,) = run(tmp_path, planted("judges", script))
    assert (record["outcome"], record["reason"]) == ("failed", "three tensors differ")


MEETS = (
    "import pathlib, sys, time\n"
    "folder = pathlib.Path(sys.argv[1]).parents[2]\n"
    "(folder / sys.argv[1].split('/')[-2]).touch()\n"
    "while not all((folder / x).exists() for x in ('left', 'right')): time.sleep(0.01)"
)


@pytest.mark.process
def test_steps_that_compare_numbers_run_side_by_side_before_the_others(tmp_path: pathlib.Path) -> None:
    alone = planted("alone", WRITES)
    found = run(tmp_path, alone, planted("left", MEETS, cores=1), planted("right", MEETS, cores=1))
    assert [x["outcome"] for x in found] == ["passed"] * 3 and found[-1]["name"] == "alone"


SHARES = {
    "first": "import helper\nfound(pid=os.getpid(), helper=helper.NAME, argv=sys.argv[2:])",
    "raises": "raise ValueError('a planted error')",
    "hangs": HANGS,
    "exits": "print('three'); sys.exit(3)",
    "dies": "os.kill(os.getpid(), 9)",
    "second": "import helper\nsys.path.insert(0, 'x'); os.environ['PLANTED'] = '1'\n"
    "found(pid=os.getpid(), helper=helper.NAME)\nsys.exit(0)",
    "third": "import helper\nprint('by', os.getppid(), sys.stdin.read())\n"
    "found(pid=os.getpid(), helper=helper.NAME, kept='x' in sys.path or 'PLANTED' in os.environ)",
}
FOUND = "import json, os, sys\ndef found(**x): open(sys.argv[1], 'w').write(json.dumps(x))\n"


def sharing(folder: pathlib.Path, name: str, *, limit_s: float = 60.0) -> Step:
    """Write a script and a module beside it, and return the step that runs it in a process of several."""
    (folder / name).mkdir()
    (folder / name / "helper.py").write_text(f"NAME = {name!r}")
    (folder / name / "script.py").write_text(FOUND + SHARES[name])
    command = f"{{python}} {folder / name / 'script.py'} {{out}} --more"
    return Step(
        name=name, part=1, measures="a planted step", command=command, cpu=command, limit_s=limit_s, shares=True
    )


@pytest.mark.process
def test_steps_share_a_process_until_one_does_not_pass(tmp_path: pathlib.Path) -> None:
    steps = [sharing(tmp_path, x, limit_s=patient(1.0 if x == "hangs" else 60.0)) for x in SHARES]
    alone, folder = planted("alone", WRITES), tmp_path / "out"
    found = run(folder, steps[0], alone, *steps[1:])
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


def test_only_scripts_of_one_process_that_run_alone_share_one() -> None:
    shared = [step for step in STEPS if step.shares]
    assert {step.carried for step in shared} == {""} and not any(step.cores for step in shared)
    for command in (x for step in shared for x in (step.command, step.cpu) if x):
        python, script, *_ = shlex.split(command)
        assert python == "{python}" and script.startswith("{tools}/")


PROCESS_GROUP = """import os, sys, torch
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
open(sys.argv[1], "w").write("{}")
"""


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
    assert records.passed_before([record], "skip", MACHINE, "c0ffee", "a b")
    for other in (
        ("skip", {**MACHINE, "device": "1 x another"}, "c0ffee", "a b"),
        ("skip", MACHINE, "decade", "a b"),
        ("skip", MACHINE, "c0ffee", "a c"),
        ("run", MACHINE, "c0ffee", "a b"),
    ):
        assert not records.passed_before([record], *other)
    for strange in ("c0ffee+", "unknown"):  # what the tree holds is not known
        assert not records.passed_before([{**record, "commit": strange}], "skip", MACHINE, strange, "a b")
    assert not records.passed_before([{**record, "outcome": "failed"}], "skip", MACHINE, "c0ffee", "a b")


def test_a_step_that_was_not_run_leaves_what_was_measured(tmp_path: pathlib.Path) -> None:
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


@pytest.mark.long
@pytest.mark.process
def test_the_command_writes_the_report_of_a_real_step(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "gpu_report.py"), "--cpu", "--part", "2", "--only", "offload"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=patient(600), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = json.loads((tmp_path / "report.json").read_text())
    assert record["outcome"] == "passed" and record["found"]["different"] == 0
    assert record["found"]["bytes"] > 0 and record["machine"]["versions"]["torch"]
    page = (tmp_path / "report.md").read_text()
    assert "| 2 | offload | passed |" in page and str(tmp_path) not in page and str(ROOT) not in page


def test_a_step_says_what_it_lacks(tmp_path: pathlib.Path) -> None:
    gpu = Step(name="gpu", part=1, measures="", command="nvidia-smi", needs="needs nvidia-smi", limit_s=1.0)
    wheel = Step(name="wheel", part=4, measures="", command="x", cpu="x", carried="smollm2", limit_s=1.0)
    reasons = [x["reason"] for x in run(tmp_path, gpu, wheel)]
    assert reasons[0] == "needs nvidia-smi, this host has none"
    assert reasons[1].startswith("SmolLM2's wheel is neither installed nor carried")


def test_parts_fit_their_calls() -> None:
    assert {step.part for step in STEPS} == set(PARTS) and {step.carried for step in STEPS} == {"", *EXTRAS}
    for part in PARTS:
        steps = [step for step in STEPS if step.part == part]
        # a limit is twice what a step takes
        seconds = (
            sum(x.limit_s for x in steps if not x.cores) / 2 + max([x.limit_s for x in steps if x.cores] or [0]) / 2
        )
        assert seconds <= 60 * gpu_report.PART_MINUTES - 30, (part, seconds)
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_every_cell_of_the_report_exists() -> None:
    known = {f"={cell.name}" for cell in CELLS}
    for step in STEPS:
        for command in (step.command, step.cpu):
            words = shlex.split(command)
            if "{tools}/acceptance.py" in words:
                chosen = words[words.index("--only") + 1].split(",")
                assert set(chosen) <= known, (step.name, set(chosen) - known)
                assert {
                    f"={x.name}"
                    for x in acceptance.parse([x for x in words[2:] if x != "{out}" and x != "--json"]).cells
                } == set(chosen)


def options_of(command: str) -> tuple[str, set[str]]:
    """Return the script that a command starts, and the options that the script is given."""
    words = shlex.split(command)
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return words[script], {word for word in words[script + 1 :] if word.startswith("--")}


@pytest.mark.parametrize(
    "script", sorted({options_of(c)[0] for x in STEPS for c in (x.command, x.cpu) if ".py" in c}), ids=lambda x: x
)
def test_every_option_of_a_command_is_known_to_its_script(nursery: Nursery, script: str) -> None:
    """Every option that a step gives a script is in the script's help, so that no step ends at a typing error."""
    path = pathlib.Path(script.format(tools=ROOT / "tools"))
    code, printed = nursery.run_script(path, "--help")
    assert code == 0, printed
    pairs = [options_of(command) for step in STEPS for command in (step.command, step.cpu) if ".py" in command]
    given = set().union(*(options for name, options in pairs if name == script))
    assert given and not {option for option in given if option not in printed}, printed


def test_shapes_of_the_report_are_folders_with_a_config() -> None:
    for step in STEPS:
        words = shlex.split(step.command)
        if "--hf-path" in words:
            folder = pathlib.Path(words[words.index("--hf-path") + 1].format(tools=ROOT / "tools"))
            assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--only", "no such step"], "names no step"),
        (["--minutes", "0"], "--minutes 0 must be above 0"),
        (["--wheels", os.devnull], "holds none of base"),
    ],
)
def test_wrong_arguments_are_refused(words: list[str], says: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_report.parse(words)
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_headline_is_the_steps_own_or_its_first_figures() -> None:
    assert headline({"headline": ["a", "b"], "x": 1.0}) == ["a", "b"]
    assert headline({"rows": [{"s": 0.12345, "name": "n"}, {"s": 2}]}) == ["s 0.1235", "s 2"]
    cells = {"tally": "1 passed", "cells": [{"name": "pp2", "status": "failed", "reason": "gradient 1"}]}
    assert headline(cells) == ["1 passed", "pp2: gradient 1"]


def test_the_page_names_every_machine_once() -> None:
    record = dict(
        part=1, commit="c0ffee", name="n", measures="", machine=MACHINE, command="c", seconds=1.0, outcome="passed"
    )
    other = {**record, "machine": {**MACHINE, "device": "1 x another"}, "reason": "a | b", "found": {}}
    page = markdown([{**record, "reason": "", "found": {}}] * 2 + [other])
    assert page.count("a CPU, driver none") == 1 and "1 x another" in page and "a / b" in page
