"""Makes the quickstart's data and a model of given sizes, and trains on them for a few rollouts in one process."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def prepare(folder: pathlib.Path, *, hidden: int, layers: int, max_position: int) -> None:
    """Make data, tokenizer and a Qwen2 with heads of 64 by examples/quickstart/prepare.py."""
    sizes = {
        "hidden": hidden,
        "layers": layers,
        "heads": hidden // 64,
        "kv-heads": hidden // 64,
        "intermediate": 3 * hidden,
        "max-position": max_position,
    }
    command = [sys.executable, str(ROOT / "examples/quickstart/prepare.py"), "--out", str(folder)]
    command += [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def short_run(inputs: pathlib.Path, run_dir: pathlib.Path, *overrides: str, **variables: str) -> tuple[list[dict], str]:
    """Run one process and one thread on the quickstart's data; return its rows of metrics.jsonl, and what it logged.

    inputs:    the folder that ``prepare`` made.
    overrides: settings of the run.
    variables: variables for its environment.

    Raises RuntimeError with the end of the log if the run fails.
    """
    command = [
        sys.executable,
        "-m",
        "megatron_rl.train",
        "--config",
        str(ROOT / "examples/quickstart/quickstart.yaml"),
        "--run-dir",
        str(run_dir),
        f"model.hf_path={inputs / 'model'}",
        f"data.train={inputs / 'train.jsonl'}",
        "parallel.pipeline=1",
        "sft.steps=0",
        "metrics.progress=false",
        "train.export_last=false",
        *overrides,
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tools' / 'benchmarks'}",
        **variables,
    }
    done = subprocess.run(command, cwd=run_dir.parent, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the run in {run_dir.name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()], done.stderr
