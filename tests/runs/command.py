"""A run by its command line: its arguments, what it leaves in its folder, and its rows without times."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys

import torch
from safetensors.torch import load_file

ROOT = pathlib.Path(__file__).parents[2]
START, TARGET, HORIZON = 0.05, 1e-4, 200
KL = (
    f"loss.kl_coefficient={START}",
    "skip.mode=approximate",
    "optimizer.lr=1e-3",
    "reference.refresh_every_rollouts=2",
)
ADAPTIVE = (*KL, "reference.controller=adaptive", f"reference.kl_target={TARGET}", f"reference.kl_horizon={HORIZON}")
SAVED = ("optimizer.schedule=constant", "checkpoint.save_every_rollouts=1", "checkpoint.keep_last=null")
PPO = (
    "advantage.estimator=gae",
    "advantage.lam=0.95",
    "critic.lr=1e-3",
    "rollout.samples_per_prompt=2",
    "train.samples_per_mini_batch=8",
    "reward.functions=[tests.reward_functions:graded]",
    "optimizer.schedule=constant",
    "train.epochs_per_rollout=2",
)


def command_line(rank: int, world: int, arguments: list[str]) -> tuple[int, str]:
    """Run ``python -m megatron_rl.train`` within a pool worker and return its exit code and what it said."""
    from megatron_rl.train import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = main(arguments)
    return code, said.getvalue()


def told_to_leave(rank: int, world: int, given: list[str], after_step: int) -> tuple[int, str]:
    """Run the command line; rank 1 gets SIGTERM when the row of ``after_step`` is written."""
    from megatron_rl.observability.metrics import MetricsWriter

    write = MetricsWriter.write

    def write_and_signal(self, row, *rest):
        written = write(self, row, *rest)
        if rank == 1 and row["step"] == after_step:
            signal.raise_signal(signal.SIGTERM)
        return written

    MetricsWriter.write = write_and_signal
    try:
        return command_line(rank, world, given)
    finally:
        MetricsWriter.write = write


def arguments(folder: pathlib.Path, run_dir: pathlib.Path, *overrides: str) -> list[str]:
    return [
        "--config",
        str(ROOT / "examples" / "quickstart" / "quickstart.yaml"),
        "--run-dir",
        str(run_dir),
        f"model.hf_path={folder / 'model'}",
        f"data.train={folder / 'train.jsonl'}",
        "parallel.pipeline=1",
        "run.deadline_s=60",
        "sft.steps=0",
        "train.num_rollouts=2",
        "train.prompts_per_rollout=8",
        "train.samples_per_mini_batch=16",
        "rollout.samples_per_prompt=4",
        "reward.functions=[tests.reward_functions:parity]",
        *overrides,
    ]


def run_example(name: str, run_dir: pathlib.Path, *overrides: str, timeout_s: float) -> list[dict]:
    """Run ``bash examples/NAME/run.sh`` as a user does and return its metrics, a row per optimizer step."""
    environment = os.environ | {
        "RUN_DIR": str(run_dir),
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", f"examples/{name}/run.sh", *overrides],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return rows_of(run_dir)


def rows_of(run_dir: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights_of(run_dir: pathlib.Path) -> dict[str, torch.Tensor]:
    (path,) = (run_dir / "checkpoints").glob("step_*/hf/model.safetensors")
    return load_file(path)


def timeless(row: dict) -> dict:
    """Return a row without the values that a clock gave."""
    return {k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "cost/"))}


def weights_of_last(run_dir: pathlib.Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    folders = sorted(
        (run_dir / "checkpoints").glob("step_*/hf"), key=lambda x: int(x.parent.name.removeprefix("step_"))
    )
    return load_file(folders[-1] / "model.safetensors")


def state_of(run_dir: pathlib.Path, iteration: int) -> dict:
    return json.loads((run_dir / "checkpoints" / f"iter_{iteration:07d}" / "state.json").read_text())


def trained_prompts(run_dir: pathlib.Path) -> list[str]:
    """Return the names of the groups of every batch, in order."""
    return [name for line in (run_dir / "trace.jsonl").read_text().splitlines() for name in json.loads(line)["prompts"]]
