"""Measures how a run of two ranks ends when one is stopped, and when one sleeps in Python: who is named, how soon.

    python tools/gpu_report_steps/faults.py --json faults.json --work /tmp/work --share-gpu

A fault passes if the output names rank 1, and not rank 0, within three times run.deadline_s.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from clock import write

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from acceptance_matrix.log_reason import without_paths  # noqa: E402

DEADLINE_S = 20.0
FAULTS = ("stopped", "asleep")
NAMED = re.compile(r"megatron_rl: rank (\d+) \([^\n]*")  # the line by which a run says why it ended
SETTINGS = (
    "parallel.pipeline=1",
    "sft.steps=0",
    "train.num_rollouts=100000",
    "train.prompts_per_rollout=8",
    "train.samples_per_mini_batch=32",
    "metrics.progress=false",
    f"run.deadline_s={DEADLINE_S}",
)


def start(fault: str, given: argparse.Namespace, folder: pathlib.Path) -> subprocess.Popen:
    reward = "tools/gpu_report_steps/sleeping_reward.py" if fault == "asleep" else "tests/reward_functions.py"
    function = "score" if fault == "asleep" else "parity"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc_per_node", "2"]
    command += [str(ROOT / "tools/gpu_report_steps/shared_run.py"), "--pids", str(folder / "pids")]
    command += [*(["--share-gpu"] if given.share_gpu else []), "--"]
    command += ["--config", str(ROOT / "examples/quickstart/quickstart.yaml"), "--run-dir", str(folder / "run")]
    inputs = given.work / "inputs"
    command += [f"model.hf_path={inputs / 'model'}", f"data.train={inputs / 'train.jsonl'}", *SETTINGS]
    command.append(f"reward.functions=[{ROOT / reward}:{function}]")
    return subprocess.Popen(
        command, stdout=(folder / "log.txt").open("wb"), stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
    )


def pids_of(folder: pathlib.Path) -> list[int]:
    return [int(path.read_text()) for path in sorted((folder / "pids").glob("rank*.pid"))]


def wait_for(condition, process: subprocess.Popen, bound_s: float) -> bool:
    """Return whether the condition came true before the bound, and before the launcher ended."""
    started = time.monotonic()
    while time.monotonic() - started < bound_s:
        if condition():
            return True
        if process.poll() is not None:
            return bool(condition())
        time.sleep(0.2)
    return False


def end(process: subprocess.Popen, folder: pathlib.Path) -> None:
    for pid in [process.pid, *pids_of(folder)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def measure(fault: str, given: argparse.Namespace) -> dict:
    folder = given.work / fault
    folder.mkdir(parents=True, exist_ok=True)
    process = start(fault, given, folder)
    log, metrics = folder / "log.txt", folder / "run" / "metrics.jsonl"
    try:
        if not wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, process, given.start):
            return {"fault": fault, "failed": f"no first step in {given.start:g} s", "log": log.read_text()[-2000:]}
        if fault == "stopped":
            os.kill(pids_of(folder)[1], signal.SIGSTOP)
        began = time.monotonic()
        named = wait_for(lambda: NAMED.search(log.read_text(errors="replace")), process, 3 * DEADLINE_S)
        seconds = time.monotonic() - began
    finally:
        end(process, folder)
    lines = [match[0] for match in NAMED.finditer(log.read_text(errors="replace"))]
    guilty = sorted({match[1] for match in map(NAMED.match, lines) if match})
    row = {"fault": fault, "seconds": seconds, "named": guilty, "says": without_paths(lines[0])[:300] if lines else ""}
    if not named or not lines:
        row["failed"] = f"nobody was named in {3 * DEADLINE_S:g} s"
        row["log"] = log.read_text(errors="replace")[-2000:]
    elif guilty != ["1"]:
        row["failed"] = f"rank 1 was at fault, and named were ranks {', '.join(guilty)}"
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/gpu_report_steps/faults.py --json faults.json --work /tmp/work",
    )
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="a folder for the runs")
    parser.add_argument("--share-gpu", action="store_true", help="both ranks on one GPU, over NCCL's sockets")
    parser.add_argument("--only", choices=FAULTS, help="one of the faults")
    parser.add_argument("--start", type=float, default=120.0, metavar="S", help="until the first step (default 120)")
    given = parser.parse_args(arguments)
    prepare = [sys.executable, str(ROOT / "examples/quickstart/prepare.py"), "--out", str(given.work / "inputs")]
    subprocess.run(prepare, check=True, cwd=ROOT)
    rows = []
    for fault in [given.only] if given.only else FAULTS:
        rows.append(measure(fault, given))
        failed = "; ".join(f"{x['fault']}: {x['failed']}" for x in rows if "failed" in x)
        says = [f"{x['fault']}: {x.get('failed') or x['says']} ({x.get('seconds', 0.0):.0f} s)" for x in rows]
        code = write(given.json, {"headline": says, "faults": rows, "failed": failed})
    return code


if __name__ == "__main__":
    raise SystemExit(main())
