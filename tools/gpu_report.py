"""Runs cells and benchmarks on one GPU in four stages of at most ten minutes, and writes one report of all.

    python tools/gpu_report.py --wheels wheels --stage 1            # make gpu-report runs all stages, in 30 minutes

Nothing is needed but Python, torch with CUDA, transformers, triton and, where packages are missing, the folder that
tools/pack_gpu_report.py makes. Each step is a process under a time limit of its own; one that fails, hangs or dies is
recorded and the next one starts. A record holds the machine, the command, the seconds, the outcome and what was
measured. --out gets stage1.json to stage4.json, and report.json and report.md over every stage that lies there. On a
host without a GPU, or with --cpu, the same steps run with small shapes. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

TOOLS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS))

from acceptance_matrix.log_reason import reason_in  # noqa: E402
from gpu_report_steps.report import headline, markdown  # noqa: E402
from gpu_report_steps.stages import INSTALL, STAGE_S, STAGES, STEPS, Step  # noqa: E402

LEAST_S = 5.0  # a step that has less left is not started
CPU_FACTOR = 4  # of the time limits on a host without a GPU, where the steps are tried, not measured
TYPED = dict(python="python", tools="tools", out="OUT", work="WORK", site="SITE", wheels="WHEELS")
TAIL = 3000  # characters of a step's output that its record keeps


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/gpu_report.py --wheels wheels --stage 1 2 --out runs/gpu-report",
    )
    parser.add_argument(
        "--stage", type=int, nargs="+", choices=sorted(STAGES), default=sorted(STAGES), help="default: all four"
    )
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only steps whose name contains it")
    parser.add_argument("--minutes", type=float, help="budget of this call (default: 9.5 for one stage, 30 for more)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/gpu-report"), metavar="FOLDER")
    parser.add_argument("--wheels", type=pathlib.Path, metavar="FOLDER", help="install these first, into --out/site")
    parser.add_argument("--cpu", action="store_true", help="small shapes on the CPU, also where there is a GPU")
    parser.add_argument("--list", action="store_true", help="name the steps, their limits and commands, and stop")
    given = parser.parse_args(arguments)
    if given.minutes is None:
        given.minutes = 9.5 if len(given.stage) == 1 else 30.0
    if given.minutes <= 0:
        parser.error(f"--minutes {given.minutes:g} must be above 0")
    if given.wheels and not (given.wheels / "requirements.txt").exists():
        parser.error(f"--wheels {given.wheels} holds no requirements.txt; tools/pack_gpu_report.py makes such a folder")
    given.steps = [x for x in STEPS if x.stage in given.stage and given.only in x.name]
    if not given.steps:
        parser.error(f"--only {given.only} names no step of the stages {given.stage}; --list names them all")
    return given


def environment_of(given: argparse.Namespace) -> dict[str, str]:
    """Return the environment of every step: the wheels and this tree on the path, no hub, one thread on a CPU.

    Beside a GPU the host's threads draw the random weights; launchers and cells give their processes one thread each.
    """
    paths = [str(given.out.resolve() / "site"), str(TOOLS.parent), os.environ.get("PYTHONPATH", "")]
    found = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **os.environ}
    found["PYTHONPATH"] = os.pathsep.join(x for x in paths if x)
    return found | ({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if given.cpu else {})


def describe_machine(given: argparse.Namespace) -> dict:
    """Return GPU, driver, cuDNN, NCCL and package versions, asked of a process of its own."""
    command = [sys.executable, str(TOOLS / "gpu_report_steps" / "machine.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment_of(given), timeout=120, check=False)
    if done.returncode:
        raise SystemExit(f"gpu_report.py: torch does not start here: {reason_in(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])


def descendants(pid: int) -> list[int]:
    """Return the processes below this one, by Linux's /proc: a launcher's workers lead sessions of their own."""
    parents: dict[int, int] = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def end(process: subprocess.Popen) -> None:
    """Kill the step and everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGSTOP)  # so that it starts nothing between the count and the kill
    for pid in [*descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def folders_of(step: Step, given: argparse.Namespace) -> dict[str, str]:
    """Return the values of the places in the step's command; made anew, so that nothing of an earlier run is read."""
    out = given.out.resolve()
    folder = out / "steps" / "".join(x if x.isalnum() else "_" for x in step.name)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "work").mkdir(parents=True)
    found = dict(
        out=folder / "found.json", work=folder / "work", site=out / "site", tools=TOOLS, log=folder / "log.txt"
    )
    return {name: str(path) for name, path in found.items()} | {
        "python": sys.executable,
        "wheels": str((given.wheels or pathlib.Path()).resolve()),
    }


def run_step(step: Step, given: argparse.Namespace, machine: dict, left_s: float) -> dict:
    """Run one step to its end or its limit, and return its record."""
    on_gpu = bool(machine["gpus"])
    words = shlex.split(step.command if on_gpu else step.cpu)
    typed = " ".join(word.format(**TYPED) for word in words)
    record = {"stage": step.stage, "name": step.name, "measures": step.measures, "machine": machine, "command": typed}
    not_run = {**record, "seconds": 0.0, "outcome": "not run", "found": {}}
    if not words:
        return {**not_run, "reason": f"{step.needs}, this host has none"}
    if left_s < LEAST_S:
        return {**not_run, "reason": f"the budget of {given.minutes:g} minutes is spent"}
    limit_s = min(step.limit_s * (1 if on_gpu else CPU_FACTOR), left_s)
    places = folders_of(step, given)
    started, code = time.monotonic(), None
    with open(places["log"], "wb") as log:
        try:
            process = subprocess.Popen(
                [word.format(**places) for word in words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment_of(given),
                cwd=TOOLS.parent,
                start_new_session=True,
            )
        except OSError as error:
            return {**not_run, "reason": f"{words[0]}: {error.strerror}"}
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                end(process)
            elif code:
                with contextlib.suppress(ProcessLookupError):  # what a step that died may have left in its group
                    os.killpg(process.pid, signal.SIGKILL)
    seconds = time.monotonic() - started
    return {**record, "seconds": seconds, **judge(code, limit_s, pathlib.Path(places["log"]), places["out"])}


def judge(code: int | None, limit_s: float, log: pathlib.Path, out: str) -> dict:
    """Return outcome, reason and measurements of a step that ended with `code` (None: killed at its limit)."""
    text, found = log.read_text(errors="replace"), {}
    with contextlib.suppress(OSError, ValueError):  # none written, or cut short by the kill
        found = json.loads(pathlib.Path(out).read_text())
    if code == 0:
        return {"outcome": "passed", "reason": "", "found": found or {"output": text[-TAIL:]}}
    if code is None:
        outcome, reason = "timed out", f"no end in {limit_s:.0f} s; killed with all that it started"
    elif code < 0:
        outcome, reason = "killed", f"ended by {signal.Signals(-code).name}, not by this report"
    else:
        errors = [f"{x['thing']}: {x['found']}" for x in found.get("findings", ()) if x["level"] == "ERROR"]  # doctor's
        own_words = found.get("failed") or "; ".join(errors) or found.get("tally")
        outcome, reason = "failed", str(own_words or reason_in(text))
    return {"outcome": outcome, "reason": reason, "found": found, "output": text[-TAIL:]}


def run_stage(stage: int, steps: list[Step], given: argparse.Namespace, machine: dict, ends_at: float) -> None:
    """Run the steps of one stage, and write its file and the whole report after each."""
    stage_ends_at, records = min(ends_at, time.monotonic() + STAGE_S), []
    for step in steps:
        record = run_step(step, given, machine, stage_ends_at - time.monotonic())
        records.append(record)
        says = record["reason"] or "; ".join(headline(record["found"]))
        print(f"{record['outcome']:>9}  {stage} {step.name:<28} {record['seconds']:6.1f} s  {says}"[:200], flush=True)
        write_stage(stage, records, given)


def write_stage(stage: int, records: list[dict], given: argparse.Namespace) -> None:
    (given.out / f"stage{stage}.json").write_text(json.dumps(records, indent=1) + "\n")
    everything = [x for path in sorted(given.out.glob("stage*.json")) for x in json.loads(path.read_text())]
    (given.out / "report.json").write_text(json.dumps(everything, indent=1) + "\n")
    (given.out / "report.md").write_text(markdown(everything))


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    if given.list:
        for step in given.steps:
            print(f"{step.stage}  {step.name:<28} {step.limit_s:4.0f} s  {step.measures}\n   {step.command}")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + 60 * given.minutes
    machine = describe_machine(given)
    print(f"{machine['device']}; {len(given.steps)} steps, {given.minutes:g} minutes", flush=True)
    if given.wheels:
        run_stage(0, [INSTALL], given, machine, ends_at)
        machine = describe_machine(given)
    for stage in given.stage:
        run_stage(stage, [x for x in given.steps if x.stage == stage], given, machine, ends_at)
    print(f"written: {given.out / 'report.md'}, {given.out / 'report.json'}")
    records = json.loads((given.out / "report.json").read_text())
    return 1 if any(x["outcome"] not in ("passed", "not run") for x in records if x["stage"] in given.stage) else 0


if __name__ == "__main__":
    sys.exit(main())
