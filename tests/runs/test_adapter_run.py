"""A whole run of adapters through its command line.

It resumes to the bit, the skip changes nothing, and engine and trainer agree.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.runs.command import arguments, command_line, rows_of, timeless, weights_of, weights_of_last

LORA = ("lora.rank=4", "lora.alpha=16", "optimizer.lr=5e-3")
SAVED = ("optimizer.schedule=constant", "checkpoint.save_every_rollouts=1", "checkpoint.keep_last=null")
RUNS = {
    "PP2-warmup": ("parallel.pipeline=2", "sft.steps=2"),
    "DP2-sharded-kl": (
        "optimizer.distributed=true",
        "loss.kl_coefficient=0.01",
        "skip.mode=approximate",
        "sft.steps=2",
    ),
    "TP2-SP": ("parallel.tensor=2", "parallel.sequence_parallel=true"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_adapters_in_two_parts_equals_the_whole_one(pool, arithmetic, tmp_path, name):
    """A run of adapters that ends after two rollouts of four and goes on equals the whole one.

    Every frozen weight is in the export as it was given.
    """
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, steps in ((whole, 4), (parts, 2), (parts, 4)):
        given = arguments(arithmetic, folder, *SAVED, *LORA, *RUNS[name], f"train.num_rollouts={steps}")
        results = pool.run(2, command_line, given, timeout_s=120)
        assert [code for code, _ in results] == [0, 0], results
    one, two = (weights_of_last(x) for x in (whole, parts))
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert [timeless(x) for x in rows_of(whole)] == [timeless(x) for x in rows_of(parts)]
    start = load_file(arithmetic / "model" / "model.safetensors")
    moved = {name.rpartition(".")[0].rpartition(".")[2] for name in one if not torch.equal(one[name], start[name])}
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}, moved
    biases = [name for name in one if name.endswith(".bias")]
    assert biases and all(torch.equal(one[name], start[name]) for name in biases)
    gaps = [row["train/logprob_gap_max"] for row in rows_of(whole) if "train/logprob_gap_max" in row]
    print(name, "largest gap of engine and trainer", max(gaps))
    assert max(gaps) < 1e-4  # the engine has W + (alpha / rank) · B A, the trainer adds the two products
    (adapter,) = (whole / "checkpoints").glob("step_*/hf_adapter")
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4
    # of two layers A and B of each projection
    assert len(load_file(adapter / "adapter_model.safetensors")) == 2 * 7 * 2


@pytest.mark.parametrize("layout", ["parallel.pipeline=2", "parallel.tensor=2", "parallel.pipeline=1"])
def test_skip_run_of_adapters_ends_with_the_dense_runs_weights(pool, arithmetic, tmp_path, layout):
    """A skip run of adapters ends with the dense run's weights, bitwise, as nothing is repacked.

    It takes two rollouts and four optimizer steps, sampling included.
    """
    weights = {}
    for mode in ("exact", "off"):
        fixed = ("plan.repack=false", "plan.samples_per_microbatch=2")
        given = arguments(arithmetic, tmp_path / mode, layout, *LORA, f"skip.mode={mode}", *fixed)
        results = pool.run(2, command_line, given, timeout_s=120)
        assert [code for code, _ in results] == [0, 0], results
        weights[mode] = weights_of(tmp_path / mode)
    assert sum(row["skip/samples_dropped"] for row in rows_of(tmp_path / "exact")) > 0
    assert all(torch.equal(weights["exact"][name], weights["off"][name]) for name in weights["off"])


def test_another_layout_trains_the_same_adapters(pool, arithmetic, tmp_path):
    """One process, TP2 with sequence parallelism and PP2 train the same adapters.

    The rollouts are the same, and the merged weights, rounding apart.
    """
    weights = []
    for world, layout in (
        (1, ()),
        (2, ("parallel.tensor=2", "parallel.sequence_parallel=true")),
        (2, ("parallel.pipeline=2",)),
    ):
        run_dir = tmp_path / f"{len(weights)}"
        results = pool.run(world, command_line, arguments(arithmetic, run_dir, *LORA, *layout), timeout_s=120)
        assert [code for code, _ in results] == [0] * world, results
        weights.append(torch.cat([x.flatten() for x in weights_of(run_dir).values()]))
    for other in weights[1:]:
        assert (other - weights[0]).norm() / weights[0].norm() < 1e-5


def test_half_precision_adapters_run(pool, arithmetic, tmp_path):
    """Half-precision adapters run with a gap between engine and trainer that is that of half precision.

    The engine has weights that are merged in float32 and rounded once.
    """
    ((code, said),) = pool.run(
        1, command_line, arguments(arithmetic, tmp_path, *LORA, "model.dtype=bfloat16"), timeout_s=60
    )
    assert code == 0, said
    assert max(row["train/logprob_gap_mean"] for row in rows_of(tmp_path) if "train/logprob_gap_mean" in row) < 0.05
