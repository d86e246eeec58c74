"""Runs the steps of tools/gpu_report.py as processes under time limits, side by side or one by one."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from acceptance_matrix.log_reason import reason_in
from gpu_report_steps.parts import Step
from gpu_report_steps.sites import TREE, site_paths, smollm2_wheel, versions_of, why_absent

LEAST_S = 5.0  # a step that has less left is not started
CPU_FACTOR = 4  # of the time limits on a host without a GPU, where the steps are tried, not measured
TYPED = dict(python="python", tools="tools", out="OUT", work="WORK", smollm2="SMOLLM2")
TAIL = 3000  # characters of a step's output that its record keeps
TOOLS = TREE / "tools"
WARM = TOOLS / "gpu_report_steps" / "warm.py"
# What a trainer asks for before CUDA starts: where several steps share a process, whichever comes first.
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
POLL_S, CLOSE_S = 0.05, 20.0


def environment_of(out: pathlib.Path, carried: str, *, cpu: bool) -> dict[str, str]:
    """Return the environment of a step: its packages and this tree on the path, no hub, one thread on a CPU.

    Beside a GPU the host's threads draw the random weights; launchers and cells give their processes one thread each.
    Compiled files are kept: importing without them takes twice as long.
    """
    own = pathlib.Path(sys.executable).parent  # where python and torchrun of this interpreter are
    found = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **os.environ}
    paths = [*map(str, site_paths(out, carried)), str(TREE), os.environ.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(x for x in paths if x)
    found["PATH"] = os.pathsep.join(x for x in (str(own), os.environ.get("PATH", "")) if x)
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    return found | ({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if cpu else {})


def describe_machine(out: pathlib.Path, *, cpu: bool) -> dict:
    """Return GPU, driver, cuDNN, NCCL and package versions, asked of a process of its own."""
    command = [sys.executable, str(TOOLS / "gpu_report_steps" / "machine.py")]
    environment = environment_of(out, "", cpu=cpu)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
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


def wait_for_answer(process: subprocess.Popen, limit_s: float) -> int:
    """Return 0 where warm.py says that the step has passed, or the code by which it ended; else TimeoutExpired."""
    until, answered = time.monotonic() + limit_s, False
    while not answered and process.poll() is None:
        if time.monotonic() > until:
            raise subprocess.TimeoutExpired(process.args, limit_s)
        answered = bool(select.select([process.stdout], [], [], POLL_S)[0])
    if answered and process.stdout.readline():
        return 0
    return process.wait(max(0.0, until - time.monotonic()))


def close(process: subprocess.Popen) -> None:
    """Let a process of warm.py end, which waits for its next step, unless it has ended."""
    process.stdin.close()
    try:
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        end(process)
    process.stdout.close()


def judge(code: int | None, limit_s: float, log: pathlib.Path, out: pathlib.Path) -> dict:
    """Return outcome, reason and measurements of a step that ended with `code` (None: killed at its limit)."""
    text, found = log.read_text(errors="replace"), {}
    with contextlib.suppress(OSError, ValueError):  # none written, or cut short by the kill
        found = json.loads(out.read_text())
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


@dataclass(slots=True, kw_only=True)
class Runner:
    """Runs steps on one machine from one commit, until a moment of time.monotonic()."""

    out: pathlib.Path
    machine: dict
    commit: str
    ends_at: float
    cpu: bool = False
    cores: int = len(os.sched_getaffinity(0))
    started: set[subprocess.Popen] = field(default_factory=set)
    warm: dict[str, subprocess.Popen] = field(default_factory=dict)  # by what is carried, for steps that share one

    def command(self, step: Step) -> list[str]:
        """Return the words of the step's form for this machine, with names for places; [] where it has none."""
        return shlex.split(step.command if self.machine["gpus"] else step.cpu)

    def typed(self, step: Step) -> str:
        return " ".join(word.format(**TYPED) for word in self.command(step))

    def run(self, step: Step) -> dict:
        """Run one step to its end or its limit, and return its record."""
        words = self.command(step)
        versions = self.machine["versions"] | versions_of(self.out, step.carried)
        record = {
            **{"part": step.part, "name": step.name, "measures": step.measures},
            "machine": {**self.machine, "versions": versions},
            **{"commit": self.commit, "date": datetime.datetime.now().isoformat(timespec="seconds")},
            "command": self.typed(step),
        }
        left_s = self.ends_at - time.monotonic()
        why = f"{step.needs}, this host has none" if not words else why_absent(self.out, step.carried)
        if not why and left_s < LEAST_S:
            why = "the time of this call is spent"
        not_run = {**record, "seconds": 0.0, "outcome": "not run", "found": {}}
        if why:
            return {**not_run, "reason": why}
        limit_s = min(step.limit_s * (1 if self.machine["gpus"] else CPU_FACTOR), left_s)
        folder = self.out / "steps" / slug(step)
        shutil.rmtree(folder, ignore_errors=True)  # so that nothing of an earlier run is read
        (folder / "work").mkdir(parents=True)
        places = dict(out=folder / "found.json", work=folder / "work", tools=TOOLS, python=sys.executable)
        places["smollm2"] = smollm2_wheel(self.out)
        began = time.monotonic()
        try:
            code = self.wait_for([word.format(**places) for word in words], step, folder / "log.txt", limit_s)
        except OSError as error:
            return {**not_run, "reason": f"{words[0]}: {error.strerror}"}
        record["seconds"] = time.monotonic() - began
        return {**record, **judge(code, limit_s, folder / "log.txt", folder / "found.json")}

    def start(self, command: list[str], step: Step, log: pathlib.Path) -> subprocess.Popen:
        """Start the command, in the process that earlier steps have left for it where it shares one; or OSError."""
        process = self.warm.pop(step.carried, None) if step.shares else None
        if process and process.poll() is not None:
            close(process)
            process = None
        with open(log, "wb") as file:
            if not process:
                environment = environment_of(self.out, step.carried, cpu=self.cpu)
                if step.shares and "PYTORCH_ALLOC_CONF" not in environment:  # the newer name, which a user may have set
                    environment = SEGMENTS | environment
                process = subprocess.Popen(
                    [sys.executable, str(WARM)] if step.shares else command,
                    stdin=subprocess.PIPE if step.shares else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if step.shares else file,
                    stderr=file,
                    env=environment,
                    bufsize=0,
                    cwd=TREE,
                    start_new_session=True,
                )
        if step.shares:
            self.warm[step.carried] = process
            process.stdin.write(json.dumps({"words": command[1:], "log": str(log)}).encode() + b"\n")
        return process

    def wait_for(self, command: list[str], step: Step, log: pathlib.Path, limit_s: float) -> int | None:
        """Return the command's exit code, or None where it was killed at its limit. Raises OSError: not started."""
        code = None
        process = self.start(command, step, log)
        self.started.add(process)
        try:
            code = wait_for_answer(process, limit_s) if step.shares else process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.started.discard(process)
            if code is None:
                end(process)
            elif code:
                with contextlib.suppress(ProcessLookupError):  # what a step that died may have left in its group
                    os.killpg(process.pid, signal.SIGKILL)
        return code

    def run_part(self, steps: Sequence[Step], keep: Callable[[dict], None]) -> None:
        """Run the steps that compare numbers side by side, then those that measure time alone; `keep` each record."""
        self.run_together([x for x in steps if x.cores], keep)
        try:
            for step in steps:
                if not step.cores:
                    keep(self.run(step))
        finally:
            while self.warm:
                close(self.warm.popitem()[1])

    def run_together(self, steps: Sequence[Step], keep: Callable[[dict], None]) -> None:
        """Run the steps in their order, as many at once as the host has cores for."""
        waiting, running = list(steps), {}
        with ThreadPoolExecutor(max_workers=max(1, len(steps))) as threads:
            try:
                while waiting or running:
                    while waiting and self.has_room(waiting[0], running.values()):
                        step = waiting.pop(0)
                        running[threads.submit(self.run, step)] = step
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        del running[future]
                        keep(future.result())
            except BaseException:  # an interrupt too: the threads wait for these
                for process in tuple(self.started):
                    end(process)
                raise

    def has_room(self, step: Step, running: Collection[Step]) -> bool:
        return not running or sum(x.cores for x in running) + step.cores <= self.cores


def slug(step: Step) -> str:
    return "".join(x if x.isalnum() else "_" for x in step.name)
