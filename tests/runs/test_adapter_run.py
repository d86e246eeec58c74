"""A whole run of adapters resumes to the bit, the skip changes nothing, and engine and trainer agree."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.pairwise import quick
from tests.runs.command import SAVED, SHARDED_KL, WARM, apart, assert_same_run, firsts_of, same_tensors, weights_of

LORA = ("lora.rank=4", "lora.alpha=16", "optimizer.lr=5e-3")
RUNS = {"PP2-warmup": ("parallel.pipeline=2", *WARM), "DP2-sharded-kl": SHARDED_KL,
        "TP2-SP": ("parallel.tensor=2", "parallel.sequence_parallel=true")}
LAYOUTS = ["parallel.pipeline=2", "parallel.tensor=2", "parallel.pipeline=1"]


@pytest.mark.parametrize("name", quick(RUNS, "DP2-sharded-kl"))
def test_a_run_of_adapters_in_two_parts_equals_the_whole_one(made, arithmetic, name):
    """Every frozen weight is in the export as it was given."""
    whole = made(2, *SAVED, *LORA, *RUNS[name], "train.num_rollouts=2")
    assert_same_run(whole, made.again(whole, 1))
    found, start = weights_of(whole), load_file(arithmetic / "model" / "model.safetensors")
    moved = {name.split(".")[-2] for name in found if not torch.equal(found[name], start[name])}
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}, moved
    biases = [name for name in found if name.endswith(".bias")]
    assert biases and all(torch.equal(found[name], start[name]) for name in biases)
    gaps = [row["train/logprob_gap_max"] for row in firsts_of(whole, "train/logprob_gap_max")]
    assert max(gaps) < 1e-4  # the engine has W + (alpha / rank) · B A, the trainer adds the two products
    (adapter,) = (whole / "checkpoints").glob("step_*/hf_adapter")
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4
    assert len(load_file(adapter / "adapter_model.safetensors")) == 2 * 7 * 2  # two layers' A and B of each projection


@pytest.mark.parametrize("layout", quick(LAYOUTS, "parallel.pipeline=1"))
def test_skip_run_of_adapters_ends_with_the_dense_runs_weights(made, layout):
    """They are the same bitwise, sampling included, as nothing is repacked."""
    fixed = ("plan.repack=false", "plan.samples_per_microbatch=2")
    exact, off = (made(2, layout, *LORA, f"skip.mode={mode}", *fixed) for mode in ("exact", "off"))
    assert sum(row["skip/samples_dropped"] for row in firsts_of(exact, "skip/samples_dropped")) > 0
    assert same_tensors(weights_of(exact), weights_of(off))


@pytest.mark.parametrize("layout", quick(LAYOUTS[:2], "parallel.tensor=2"))
def test_another_layout_trains_the_same_adapters(made, layout):
    """One process, TP2 with sequence parallelism and PP2 train the same adapters, rounding apart."""
    sequence = f"parallel.sequence_parallel={str('tensor' in layout).lower()}"
    assert apart(made(1, *LORA), made(2, *LORA, layout, sequence)) < 1e-5


def test_half_precision_adapters_run(made):
    """The gap is that of half precision: the engine's weights are merged in float32 and rounded once."""
    rows = firsts_of(made(1, *LORA, "model.dtype=bfloat16"), "train/logprob_gap_mean")
    assert rows and max(row["train/logprob_gap_mean"] for row in rows) < 0.05
