"""Fills the support matrix on this machine: each feature on each layout against a Hugging Face reference.

    python tools/acceptance.py --markdown matrix.md          # make acceptance

Each cell runs in its own processes: with GPUs, one process per GPU over NCCL; without, gloo on the CPU. With
--share-gpu the processes of a cell that asks for more GPUs than there are share them, over NCCL's sockets. A cell that
this host cannot run is listed as not run, with the reason, and never as passed. A cell that does not answer in
--timeout seconds has failed; every process that it started is killed. acceptance_matrix/cells.py lists the checks that
a cell must pass, and acceptance_matrix/checks.py measures them.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform as host_platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import psutil
from acceptance_matrix.cells import CELLS, FAULTS, LABELS, Cell, tolerances
from acceptance_matrix.log_reason import reason_in

PROBE_S = 120.0
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine", "apex", "fla-core")
IMPORTS = {
    "transformer_engine": "import torch; import transformer_engine.pytorch; "
    "from transformer_engine.pytorch.optimizers import FusedAdam",
    "apex": "from apex.optimizers import FusedAdam",
    "vllm": "import vllm",
    "fla": "from megatron_rl.model.delta_net.kernels import fla_fault; fault = fla_fault(); assert not fault, fault",
}
WITHOUT_GPU = ("vllm", "CPU")  # modules that also have a CPU build, and a host without a GPU
COUNT_GPUS = (
    "import torch; n = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
    "print(f'GPUS {n} {torch.cuda.get_device_name() if n else str()}')"
)
# Set before CUDA starts: TF32 off inside Transformer Engine and cuBLAS too, and kernels that add in one order, because
# some checks compare to the bit.
CUDA_ENVIRONMENT = {
    "NVIDIA_TF32_OVERRIDE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    faults = "; ".join(f"{name}: {what}" for name, what in FAULTS.items()).replace("`", "")
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/acceptance.py --only pp2 --markdown matrix.md --json matrix.json",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="SUBSTRING",
        help="only cells whose name or feature contains it; =NAME for one; several with commas between them",
    )
    parser.add_argument("--list", action="store_true", help="name the cells and stop")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds a cell may take (default 300)"
    )
    parser.add_argument(
        "--max-processes",
        type=int,
        default=4,
        help="largest world on a host without GPUs, and of ranks that share GPUs (default 4)",
    )
    parser.add_argument(
        "--share-gpu",
        action="store_true",
        help="let several ranks share a GPU, over NCCL's sockets, where a cell asks for more than there are",
    )
    parser.add_argument("--jobs", type=int, default=1, help="cells that run side by side (default 1)")
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="PATH", help="write every cell's errors and tolerances there"
    )
    parser.add_argument("--markdown", type=pathlib.Path, metavar="PATH", help="write the support matrix there")
    parser.add_argument(
        "--inject", choices=FAULTS, metavar="FAULT", help=f"plant a fault, to see the cell fail. {faults}"
    )
    # --cell and --out are for the processes that this tool starts.
    parser.add_argument("--cell", choices=[cell.name for cell in CELLS], metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=pathlib.Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.jobs < 1:
        parser.error(f"--jobs {given.jobs} must be at least 1")
    if given.inject and given.markdown:
        parser.error(f"--inject {given.inject} plants a fault, and --markdown writes a support matrix; leave one out")
    given.cells = [cell for cell in CELLS if chosen(cell, given.only)]
    if not given.cells:
        parser.error(f"--only {given.only} names no cell; --list names them all")
    return given


def chosen(cell: Cell, only: str) -> bool:
    return any(
        cell.name == word[1:] if word.startswith("=") else word in cell.name or word in cell.feature
        for word in only.split(",")
    )


def probe(script: str) -> tuple[str, str]:
    """Run a Python one-liner in its own process; return (standard output, "") or ("", the reason), without paths."""
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {PROBE_S:.0f} s"
    return (done.stdout, "") if done.returncode == 0 else ("", reason_in(done.stderr))


def machine() -> dict:
    """Describe the machine of the measurement, without host name or paths."""
    output, why = probe(COUNT_GPUS)
    match = re.search(r"GPUS (\d+) ?(.*)", output)
    if not match:
        raise SystemExit(f"torch does not say how many GPUs there are: {why}; python -m megatron_rl.doctor says more")
    gpus, name = int(match[1]), match[2].strip()
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    device = f"{gpus} x {name}" if gpus else f"{host_platform.machine()} CPU, {os.cpu_count()} cores"
    where = f"NCCL, {name}" if gpus else "gloo, CPU"
    return {
        "gpus": gpus,
        "device": device,
        "where": where,
        "python": host_platform.python_version(),
        "versions": versions,
    }


def shares(cell: Cell, host: dict) -> bool:
    """Return whether ranks of the cell must share a GPU of this host."""
    return bool(host["gpus"]) and max(cell.gpus, cell.world) > host["gpus"]


def why_not(cell: Cell, host: dict, max_processes: int, imports: dict[str, str], *, share_gpu: bool = False) -> str:
    """Return the reason why this host cannot run the cell, or "" if it can.

    imports: the result of each import that was tried, filled here.
    """
    if cell.needs == "CPU" and host["gpus"]:
        return f"it is for CPUs alone, this host has {host['gpus']} GPUs"
    if cell.needs and cell.needs not in WITHOUT_GPU and not host["gpus"]:
        return "needs a GPU" + ("" if cell.needs == "GPU" else f" for {cell.needs}") + ", this host has none"
    if shares(cell, host) and not share_gpu:
        return f"needs {max(cell.gpus, cell.world)} GPUs, this host has {host['gpus']}"
    if (shares(cell, host) or not host["gpus"]) and cell.world > max_processes:
        return f"needs {cell.world} processes, --max-processes is {max_processes}"
    if shares(cell, host) and cell.needs == "vllm":
        return f"an engine over {cell.world} GPUs needs {cell.world}, this host has {host['gpus']}"
    if cell.needs in ("GPU", "CPU"):
        return ""
    if cell.needs and cell.needs not in imports:
        imports[cell.needs] = probe(IMPORTS[cell.needs])[1]
    return f"{cell.needs} cannot be used: {imports[cell.needs]}" if cell.needs and imports[cell.needs] else ""


def end(process: subprocess.Popen) -> None:
    """Kill the launcher, its process group and all its descendants: its workers lead sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        launcher.suspend()  # so that it starts nothing between the count and the kill
        for child in launcher.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.stdin.close()  # the cell's other processes then exit by themselves, see acceptance_matrix/checks.py
    process.wait()


def where(cell: Cell, host: dict) -> str:
    gpus = "one GPU" if host["gpus"] == 1 else f"{host['gpus']} GPUs"
    return f"NCCL over sockets, {gpus}" if shares(cell, host) else host["where"]


def run_cell(cell: Cell, given: argparse.Namespace, host: dict, folder: pathlib.Path) -> dict:
    """Start the cell's processes and judge the measurements that they write."""
    # Build the command.
    out, log = folder / f"{cell.name}.json", folder / f"{cell.name}.log"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc_per_node",
        str(cell.world),
        __file__,
    ]
    command += ["--cell", cell.name, "--out", str(out), "--timeout", str(given.timeout)]
    command += ["--inject", given.inject] if given.inject else []
    shared = shares(cell, host)
    command += ["--share-gpu"] if shared else []
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **(CUDA_ENVIRONMENT if host["gpus"] else {})}
    (folder / cell.name).mkdir()
    # Run it to its end or its deadline, and end all its processes.
    started, code = time.monotonic(), None
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(given.timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end(process)
    # Judge the measurements, if it wrote any.
    row = {"status": FAILED, "seconds": time.monotonic() - started, "where": where(cell, host)}
    if code is None:
        return {**row, "reason": f"no answer in {given.timeout:g} s; its processes were killed"}
    if code or not out.exists():
        text = log.read_text(errors="replace")
        print(text[-3000:], file=sys.stderr)
        return {**row, "reason": reason_in(text)}
    return {**row, **judge(cell, json.loads(out.read_text()), cuda=bool(host["gpus"]))}


def judge(cell: Cell, found: dict, *, cuda: bool) -> dict:
    """Return passed, or failed with the failed checks; a check that is missing or not a number fails."""
    allowed = cell.allowed(cuda=cuda)
    errors = {name: found["errors"].get(name, float("nan")) for name in cell.checks}
    failed = [name for name in cell.checks if not errors[name] <= allowed[name]]
    bounded = [x for x in cell.checks if allowed[x]]  # the others are exact
    nearest = max(bounded, key=lambda x: errors[x] / allowed[x]) if bounded else cell.checks[0]
    says = "; ".join(f"{x} {errors[x]:.1e}, allowed {allowed[x]:g} ({LABELS[x]})" for x in failed or [nearest])
    return {
        **{key: value for key, value in found.items() if key != "errors"},
        "status": FAILED if failed else PASSED,
        "reason": says if failed else "",
        "nearest": says,
        # JSON has no NaN
        "checks": {
            name: {"error": x if math.isfinite(x) else str(x), "allowed": allowed[name]} for name, x in errors.items()
        },
    }


def run_all(given: argparse.Namespace, host: dict) -> list[dict]:
    """Run the cells, --jobs at a time; --json is written after each, so that a kill leaves what was measured."""
    imports: dict[str, str] = {}
    reasons = [why_not(cell, host, given.max_processes, imports, share_gpu=given.share_gpu) for cell in given.cells]
    rows: dict[str, dict] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(max_workers=given.jobs) as threads,
    ):
        waiting = {
            threads.submit(run_or_say, cell, why, given, host, pathlib.Path(folder)): cell
            for cell, why in zip(given.cells, reasons, strict=True)
        }
        for ended in as_completed(waiting):
            cell, outcome = waiting[ended], ended.result()
            rows[cell.name] = {
                **{"name": cell.name, "feature": cell.feature, "layout": cell.layout, "dtype": cell.dtype},
                **outcome,
            }
            seconds = f" ({outcome['seconds']:.0f} s)" if "seconds" in outcome else ""
            says = outcome["reason"] or outcome["nearest"]
            print(f"{outcome['status']:>8}  {cell.name:<22} {says}{seconds}", flush=True)
            if given.json:
                write_json(in_order(rows), host, given)
    return in_order(rows)


def in_order(rows: dict[str, dict]) -> list[dict]:
    return [rows[cell.name] for cell in CELLS if cell.name in rows]


def run_or_say(cell: Cell, why: str, given: argparse.Namespace, host: dict, folder: pathlib.Path) -> dict:
    return {"status": NOT_RUN, "reason": why} if why else run_cell(cell, given, host, folder)


def write_json(rows: list[dict], host: dict, given: argparse.Namespace) -> None:
    result = {
        "command": command_line(given),
        "date": str(datetime.date.today()),
        "machine": host,
        "tally": tally(rows),
        "cells": rows,
    }
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(result, indent=1) + "\n")


def command_line(given: argparse.Namespace) -> str:
    """Return the command as typed, without the paths."""
    words = ["python tools/acceptance.py"]
    words += [f"--only {given.only}"] if given.only else []
    words += [f"--timeout {given.timeout:g}"] if given.timeout != 300 else []
    words += [f"--max-processes {given.max_processes}"] if given.max_processes != 4 else []
    words += ["--share-gpu"] if given.share_gpu else []
    words += [f"--jobs {given.jobs}"] if given.jobs != 1 else []
    return " ".join(words + ([f"--inject {given.inject}"] if given.inject else []))


def markdown(rows: list[dict], host: dict, given: argparse.Namespace) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    lines = [
        "# Support matrix",
        "",
        f"**{tally(rows)}.**",
        "",
        "`make acceptance` fills this table on your own machine: over NCCL with one process per GPU, over gloo on a "
        "host without one. Write it over this page with "
        '`make acceptance ACCEPTANCE_ARGS="--markdown docs/evidence/support-matrix.md"`.',
        "",
    ]
    if not host["gpus"]:
        lines += [
            "**No GPU was available where this page was made.** Every result below is gloo on a CPU; no row says "
            "anything about NCCL. The Transformer Engine and Apex paths are not run.",
            "",
        ]
    lines += [
        f"`{command_line(given)}`, {datetime.date.today()}, {host['device']}, Python {host['python']}, {versions}",
        "",
        "| feature | layout | where | result | s |",
        "|---|---|---|---|---|",
    ]
    lines += [table_row(row, host["where"]) for row in rows]
    return "\n".join([*lines, "", *footnote(bool(host["gpus"]))]) + "\n"


def table_row(row: dict, where: str) -> str:
    says = row["reason"] or row["nearest"].split(" (")[0]
    where, seconds = (row.get("where", where), f"{row['seconds']:.0f}") if "seconds" in row else ("-", "-")
    cells = (f"{row['feature']}, {row['dtype']}", row["layout"], where, f"{row['status']}: {says}", seconds)
    return f"| {' | '.join(x.replace('|', '/') for x in cells)} |"


def tally(rows: list[dict]) -> str:
    return ", ".join(f"{sum(row['status'] == status for row in rows)} {status}" for status in (PASSED, FAILED, NOT_RUN))


def footnote(cuda: bool) -> list[str]:
    full, half = (tolerances(dtype, cuda=cuda) for dtype in ("float32", "bfloat16"))
    return [
        "`result` names, of all checks of the cell, the one nearest its bound (or those that failed). The checks, "
        "with the error allowed in float32 and in bfloat16 (`silent` and `replicas` where DP > 1); why so much is in "
        "`tools/acceptance_matrix/cells.py`:",
        "",
        *(f"- `{name}`: {label}; {full[name]:g}, {half[name]:g}" for name, label in LABELS.items()),
    ]


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    if given.cell:
        if given.share_gpu:
            from acceptance_matrix import shared_gpu

            shared_gpu.share()
        from acceptance_matrix import checks  # starts Megatron-Core

        (cell,) = (x for x in CELLS if x.name == given.cell)
        # Shorter than the cell's own time, so that a collective that hangs can still report it.
        checks.run(cell, given.out, fault=given.inject or "", deadline_s=max(1.0, given.timeout / 2))
        return 0
    if given.list:
        print("\n".join(f"{cell.name:<22} {cell.layout:<14} {cell.dtype:<9} {cell.feature}" for cell in given.cells))
        return 0
    host = machine()
    print(f"{len(given.cells)} cells on {host['device']}; {host['where']}")
    rows = run_all(given, host)
    print(tally(rows))
    if given.markdown:
        given.markdown.parent.mkdir(parents=True, exist_ok=True)
        given.markdown.write_text(markdown(rows, host, given))
    return 1 if any(row["status"] == FAILED for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
