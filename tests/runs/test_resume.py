"""A run that is ended and started again with the same command: bitwise the uninterrupted run's weights, each prompt trained as often."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from megatron_rl.checkpoint.folder import whole_checkpoints
from tests.runs.test_train import arguments, command_line, rows_of

SAVED = ("optimizer.schedule=constant", "checkpoint.save_every=1", "checkpoint.keep_last=null")
RUNS = {
    "PP2-warmup": ("parallel.pipeline=2", "warmup.steps=2"),
    "DP2-sharded-kl": ("optimizer.distributed=true", "loss.kl_coefficient=0.01", "skip.mode=approximate", "warmup.steps=2"),
    "TP2-calibrated": ("parallel.tensor=2", "plan.calibrate=true"),
}


def timeless(row: dict) -> dict:
    """Without what a clock said."""
    return {k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "cost/"))}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_two_parts_equals_the_whole_one(pool, arithmetic, tmp_path, name):
    """Ended after two rollouts of four. With ``plan.calibrate`` plans follow measured times: equal to rounding, not to the bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, steps in ((whole, 4), (parts, 2), (parts, 4)):
        results = pool.run(2, command_line, arguments(arithmetic, folder, *SAVED, *RUNS[name], f"train.steps={steps}"), timeout_s=120)
        assert [code for code, _ in results] == [0, 0], results
    assert whole_checkpoints(parts / "checkpoints") == whole_checkpoints(whole / "checkpoints") == [0, 1, 2, 3, 4]
    one, two = (weights_of_last(x) for x in (whole, parts))
    if "calibrate" in name:
        assert all(torch.allclose(one[k], two[k], atol=1e-4) for k in one)
        return
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert [timeless(x) for x in rows_of(whole)] == [timeless(x) for x in rows_of(parts)]
    traces = [(x / "trace.jsonl").read_text() for x in (whole, parts)]
    assert traces[0] == traces[1] and len(traces[0].splitlines()) == 4


def weights_of_last(run_dir: pathlib.Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    folders = sorted((run_dir / "checkpoints").glob("step_*/hf"), key=lambda x: int(x.parent.name.removeprefix("step_")))
    return load_file(folders[-1] / "model.safetensors")


def state_of(run_dir: pathlib.Path, iteration: int) -> dict:
    return json.loads((run_dir / "checkpoints" / f"iter_{iteration:07d}" / "state.json").read_text())
