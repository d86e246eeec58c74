"""A checkpoint loaded under the same or another topology gives the same weights to the bit and the same next steps."""

from __future__ import annotations

import pathlib

import pytest
import torch

from megatron_rl.checkpoint import model_state
from megatron_rl.checkpoint.folder import whole_checkpoints
from megatron_rl.errors import CheckpointError
from tests.equality.rig import sizes
from tests.equality.saved_steps import BF16, PLAIN, SHARDED, open_like, save_and_load, take_steps, tensors_of

SAME = {
    "DP2": (2, (*sizes(1, 1), *PLAIN), "qwen2_tied", 3),
    "DP2-sharded": (2, (*sizes(1, 1), *SHARDED), "qwen2_tied", 3),
    "DP2-sharded-overlap": (2, (*sizes(1, 1), *SHARDED, "megatron.ddp.overlap_param_gather=true"), "qwen2_tied", 3),
    "DP2-bf16": (2, (*sizes(1, 1), *PLAIN, *BF16), "qwen2_tied", 3),
    "DP2-sharded-bf16": (2, (*sizes(1, 1), *SHARDED, *BF16), "qwen2_tied", 3),
    "TP2": (2, (*sizes(2, 1), *PLAIN), "llama", 3),
    "PP2-tied": (2, (*sizes(1, 2), *SHARDED), "qwen2_tied", 3),
    "EP2": (2, (*sizes(1, 1), *SHARDED, "parallel.expert=2"), "qwen3_moe", 3),
    "EP2-two-kinds-of-layers-bf16": (2, (*sizes(1, 1), *SHARDED, *BF16, "parallel.expert=2"), "glm4_moe", 3),
    "EP2-sinks-bf16": (2, (*sizes(1, 1), *SHARDED, *BF16, "parallel.expert=2"), "gpt_oss", 3),
    "before-any-step": (2, (*sizes(1, 1), *SHARDED, *BF16), "qwen2_tied", 0),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_topology_goes_on_to_the_bit(pool, tmp_path, name):
    world, topology, family, steps = SAME[name]
    for found in pool.run(world, save_and_load, str(tmp_path), topology, topology, family, steps, timeout_s=120):
        assert found["numbers"] and found["loaded"] and found["next"] and found["rate"], found
        assert (found["moved"] > 1e-4) == (steps > 0), found
    assert whole_checkpoints(tmp_path) == [7]


OTHER = {
    "DP2-sharded-to-TP2": ((*sizes(1, 1), *SHARDED), (*sizes(2, 1), *PLAIN), "llama"),
    "TP2-to-PP2": ((*sizes(2, 1), *SHARDED), (*sizes(1, 2), *SHARDED), "qwen2_tied"),
    "PP2-VPP2-to-DP2-sharded": (
        (*sizes(1, 2), *PLAIN, "parallel.virtual_pipeline=2"),
        (*sizes(1, 1), *SHARDED),
        "qwen2_tied",
    ),
    "TP2-to-PP2-joined": ((*sizes(2, 1), *SHARDED), (*sizes(1, 2), *SHARDED), "phi3"),
    "TP2-to-DP2-norms-over-heads": ((*sizes(2, 1), *SHARDED), (*sizes(1, 1), *SHARDED), "olmo2"),
    "TP2-to-PP2-norms-over-each-head": ((*sizes(2, 1), *SHARDED), (*sizes(1, 2), *SHARDED), "qwen3"),
    "PP2-to-DP2-window": ((*sizes(1, 2), *PLAIN), (*sizes(1, 1), *SHARDED), "mistral_window"),
    "TP2-to-PP2-windows-by-kind": ((*sizes(2, 1), *SHARDED), (*sizes(1, 2), *SHARDED), "olmo3"),
    "TP2-to-PP2-norms-around": ((*sizes(2, 1), *SHARDED), (*sizes(1, 2), *SHARDED), "gemma3_text"),
    "PP2-to-CP2": ((*sizes(1, 2), *SHARDED), (*sizes(1, 1), *SHARDED, "parallel.context=2"), "llama"),
    "EP2-to-TP2": (
        (*sizes(1, 1), *SHARDED, "parallel.expert=2"),
        (*sizes(2, 1), *SHARDED, "parallel.sequence_parallel=true"),
        "qwen3_moe",
    ),
    "EP2-to-TP2-sinks": (
        (*sizes(1, 1), *SHARDED, "parallel.expert=2"),
        (*sizes(2, 1), *SHARDED, "parallel.sequence_parallel=true", "parallel.expert_tensor=1"),
        "gpt_oss",
    ),
    "PP2-to-EP2": ((*sizes(1, 2), *PLAIN), (*sizes(1, 1), *SHARDED, "parallel.expert=2"), "glm4_moe"),
    "PP2-to-EP2-dense-layers-between": (
        (*sizes(1, 2), *PLAIN),
        (*sizes(1, 1), *SHARDED, "parallel.expert=2"),
        "llama4_interleaved",
    ),
    "TP2-to-EP2-latents": (
        (*sizes(2, 1), *SHARDED, "parallel.sequence_parallel=true"),
        (*sizes(1, 1), *SHARDED, "parallel.expert=2"),
        "deepseek_v3",
    ),
    "DP2-to-EP2": ((*sizes(1, 1), *PLAIN), (*sizes(1, 1), *SHARDED, "parallel.expert=2"), "mixtral"),
    "bf16-TP2-to-DP2-sharded": ((*sizes(2, 1), *PLAIN, *BF16), (*sizes(1, 1), *SHARDED, *BF16), "llama"),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_topology_goes_on_from_the_same_bits(pool, tmp_path, name):
    """The next steps are equal to rounding; half precision rounds at 2⁻⁸."""
    first, second, family = OTHER[name]
    for found in pool.run(2, save_and_load, str(tmp_path), first, second, family, 3, timeout_s=120):
        assert found["loaded"] and found["rate"] and found["moved"] > 1e-4, found
        assert found["error"] < (5e-3 if "bf16" in name else 1e-5), found


def adam_sums(rank: int, world: int, root: str, first: tuple[str, ...], second: tuple[str, ...], family: str) -> bool:
    """Return whether every tensor of AdamW has the same bytes in both backends' checkpoints."""
    folder = pathlib.Path(root)
    with open_like(first, family) as rig:
        take_steps(rig, 3)
        path = model_state.save(rig.backend, folder, 1, {}).finish()
        kept, model = model_state.numbers(rig.backend), model_state.identity(rig.backend)
    with open_like(second, family) as rig:
        model_state.load(rig.backend, path, kept, model)
        model_state.save(rig.backend, folder, 2, {}).finish()
    return True


@pytest.mark.parametrize("name", ["DP2-sharded-to-TP2", "PP2-VPP2-to-DP2-sharded", "DP2-to-EP2"])
def test_adam_is_the_same_to_the_bit_under_another_topology(pool, tmp_path, name):
    """AdamW's state is the same to the bit in both checkpoints, read by torch's own reader."""
    first, second, family = OTHER[name]
    pool.run(2, adam_sums, str(tmp_path), first, second, family, timeout_s=120)
    one, two = (tensors_of(tmp_path / f"iter_000000{n}") for n in (1, 2))
    assert set(one) == set(two) and any(key.startswith("optimizer.state.exp_avg_sq.") for key in one)
    for key in one:
        rows = min(len(one[key]), len(two[key]))  # the vocabulary of 99 is padded to a multiple of TP
        assert torch.equal(one[key][:rows], two[key][:rows]) and max(len(one[key]), len(two[key])) - rows <= 1, key


def load_other_model(rank: int, world: int, root: str) -> str:
    with open_like(sizes(1, 1), "llama") as rig:
        path = model_state.save(rig.backend, pathlib.Path(root), 1, {}).finish()
        kept, model = model_state.numbers(rig.backend), model_state.identity(rig.backend)
    with open_like(sizes(1, 1), "qwen2_tied") as rig, pytest.raises(CheckpointError) as caught:
        model_state.load(rig.backend, path, kept, model)
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_by_name(pool, tmp_path):
    for message in pool.run(2, load_other_model, str(tmp_path), timeout_s=60):
        assert (
            "another model" in message
            and "family llama there and qwen2 here" in message
            and "tied_embeddings False there and True" in message
        )
