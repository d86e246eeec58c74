"""A run that is ended and started again with the same command equals the uninterrupted one.

Its weights are the same bitwise, and each prompt is trained as often.
"""

from __future__ import annotations

import pytest
import torch

from megatron_rl.checkpoint.folder import whole_checkpoints
from tests.runs.command import SAVED, arguments, command_line, rows_of, timeless, weights_of_last

RUNS = {
    "PP2-warmup": ("parallel.pipeline=2", "sft.steps=2"),
    "DP2-sharded-kl": (
        "optimizer.distributed=true",
        "loss.kl_coefficient=0.01",
        "skip.mode=approximate",
        "sft.steps=2",
    ),
    "TP2-calibrated": ("parallel.tensor=2", "plan.calibrate=true"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_two_parts_equals_the_whole_one(pool, arithmetic, tmp_path, name):
    """A run that ends after two rollouts of four and goes on equals the whole one.

    With ``plan.calibrate`` plans follow measured times: equal to rounding, not to the bit.
    """
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, steps in ((whole, 4), (parts, 2), (parts, 4)):
        if (folder / "completions.jsonl").exists():  # a run killed after its checkpoint has written more
            with (folder / "completions.jsonl").open("a") as file:
                file.write('{"source": "train"}\n{"source": "tr')
        results = pool.run(
            2,
            command_line,
            arguments(arithmetic, folder, *SAVED, *RUNS[name], f"train.num_rollouts={steps}"),
            timeout_s=120,
        )
        assert [code for code, _ in results] == [0, 0], results
    assert whole_checkpoints(parts / "checkpoints") == whole_checkpoints(whole / "checkpoints") == [0, 1, 2, 3, 4]
    one, two = (weights_of_last(x) for x in (whole, parts))
    if "calibrate" in name:
        assert all(torch.allclose(one[k], two[k], atol=1e-4) for k in one)
        return
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert [timeless(x) for x in rows_of(whole)] == [timeless(x) for x in rows_of(parts)]
    completions = [(x / "completions.jsonl").read_text() for x in (whole, parts)]
    assert completions[0] == completions[1] and len(completions[0].splitlines()) == 4 * 4
    traces = [(x / "trace.jsonl").read_text() for x in (whole, parts)]
    assert traces[0] == traces[1] and len(traces[0].splitlines()) == 4
