"""Measures an engine: a short run in the cell's own processes, and the engine's log-probs against the trainer's."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

from acceptance_matrix.cells import Cell
from acceptance_matrix.facts import HOST

from megatron_rl.backend import MegatronBackend

ROOT = pathlib.Path(__file__).resolve().parents[2]
GAP = "train/logprob_gap_mean"
RUN = (
    "sft.steps=0",
    "train.num_rollouts=3",
    "train.prompts_per_rollout=8",
    "train.samples_per_mini_batch=16",
    "rollout.samples_per_prompt=4",
    "rollout.max_logprob_gap=null",
    "skip.mode=off",  # a policy without training answers every prompt wrong: nothing would be trained
    "metrics.progress=false",
    "model.layer_spec=torch",
)


def move_exported(by: float) -> None:
    """Plant a fault: the engine gets other weights than the trainer has."""
    export = MegatronBackend.export

    def moved(self: MegatronBackend, **given: object):
        for name, tensor in export(self, **given):
            yield name, tensor + by

    MegatronBackend.export = moved


def make_inputs(folder: pathlib.Path) -> None:
    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    import prepare

    prepare.main(["--out", str(folder), "--test-rows", "20"])


def run_rows(cell: Cell, deadline_s: float, folder: pathlib.Path) -> list[dict]:
    """Return the metrics' rows of a short run with the cell's settings; its inputs are made first."""
    from megatron_rl.train import main

    inputs = folder / "inputs"
    if os.environ["RANK"] == "0":
        make_inputs(folder / "draft")
        (folder / "draft").rename(inputs)
    while not inputs.exists():  # the cell's own time bounds this wait
        time.sleep(0.1)
    arguments = ["--config", str(ROOT / "examples/quickstart/quickstart.yaml"), "--run-dir", str(folder / "run")]
    arguments += [f"model.hf_path={inputs / 'model'}", f"data.train={inputs / 'train.jsonl'}", *RUN]
    arguments += [f"parallel.{x}" for x in cell.parallel]
    arguments += [f"model.dtype={cell.dtype}", f"run.deadline_s={deadline_s}"]
    # an engine's own waits must end before a collective's
    arguments += [f"rollout.{wait}={0.8 * deadline_s:g}" for wait in ("start_s", "request_s")]
    arguments += cell.overrides
    code = main(arguments)
    if code:
        raise RuntimeError(f"the run of {cell.name} ended with exit code {code}")
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def measure(cell: Cell, fault: str, deadline_s: float, folder: pathlib.Path) -> dict:
    if fault == "other-weights":
        move_exported(0.02)
    gaps = [row[GAP] for row in run_rows(cell, deadline_s, folder) if GAP in row]
    return {"errors": {"engine": max(gaps, default=float("nan"))}, "backend": HOST.backend}
