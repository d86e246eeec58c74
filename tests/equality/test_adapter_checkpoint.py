"""Adapters in a checkpoint go on to the bit in the same layout, and from the same bits in another one."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import torch

from megatron_rl.checkpoint import model_state
from megatron_rl.checkpoint.convert import plan_export
from megatron_rl.checkpoint.torch_dist import TorchDistReader
from megatron_rl.errors import CheckpointError, ConfigError
from megatron_rl.model.hf_config import read_shape
from tests.equality.rig import Rig, equal_by_name, open_rig, sizes
from tests.equality.saved_steps import COMMON, take_steps, tensors_of
from tests.reference import file_weights, relative_error, tiny_config

LORA = ("lora.rank=3", "lora.alpha=5")
ATTENTION = "lora.targets=[linear_qkv,linear_proj]"
PLAIN, SHARDED, BF16 = ("optimizer.distributed=false",), ("optimizer.distributed=true",), ("model.dtype=bfloat16",)
SP, VPP2 = "parallel.sequence_parallel=true", "parallel.virtual_pipeline=2"
EP2, ETP1 = "parallel.expert=2", "parallel.expert_tensor=1"


def open_lora(topology: tuple[str, ...], family: str, lora: tuple[str, ...] = LORA):
    # any two of them have the same model
    return open_rig(family, *COMMON, *lora, *topology, samples=8, total_steps=20, layers=4)


def adapters(rig: Rig) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in rig.backend.export_adapters()}


def save_and_load(rank, world, root, first, second, family) -> dict[str, object]:
    """Return the first backend's tensors at its save and two steps later, and those of a second one that loaded it."""
    folder = pathlib.Path(root)
    with open_lora(first, family) as rig:
        rig.backend.keep_reference()
        take_steps(rig, 3)
        pending = model_state.save(rig.backend, folder, 7, {})
        kept, model = model_state.numbers(rig.backend), model_state.identity(rig.backend)
        saved, exported = adapters(rig), rig.weights()
        take_steps(rig, 2, seed=3)
        later = adapters(rig)
        path = pending.finish()
    with open_lora(second, family) as rig:
        model_state.load(rig.backend, path, kept, model)
        loaded, again = adapters(rig), rig.weights()
        with rig.backend.reference_weights():
            reference = rig.weights()
            logprobs = rig.backend.logprobs(rig.batch, np.ones(8, dtype=bool)).flat
        untrained = file_weights(rig.model)
        take_steps(rig, 2, seed=3)
        return {
            "loaded": equal_by_name(loaded, saved),
            "same export": relative_error(again, exported),
            "reference": relative_error(reference, {k: untrained[k].to(x.dtype) for k, x in reference.items()}),
            "reference passes": bool(np.isfinite(logprobs).all()),
            "next": equal_by_name(adapters(rig), later),
            "error": relative_error(adapters(rig), later),
            "moved": relative_error(later, saved),
        }


SAME = {
    "DP2": (2, (*sizes(1, 1), *PLAIN), "qwen2_tied"),
    "DP2-sharded-bf16": (2, (*sizes(1, 1), *SHARDED, *BF16), "qwen2_tied"),
    "TP2-SP": (2, (*sizes(2, 1), SP, *SHARDED), "qwen3"),
    "PP2-tied": (2, (*sizes(1, 2), *SHARDED), "qwen2_tied"),
    "TP2-PP2": (4, (*sizes(2, 2), *PLAIN), "llama"),
    "EP2-experts": (2, (*sizes(1, 1), EP2, *SHARDED), "glm4_moe"),
    "TP2-SP-ETP1-experts": (2, (*sizes(2, 1), SP, ETP1, *PLAIN), "mixtral"),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_topology_goes_on_to_the_bit(pool, tmp_path, name):
    world, topology, family = SAME[name]
    for found in pool.run(world, save_and_load, str(tmp_path), topology, topology, family, timeout_s=120):
        assert found["loaded"] and found["next"] and found["same export"] == 0 and found["reference"] == 0, found
        assert found["reference passes"] and found["moved"] > 1e-3, found
    keys = set(tensors_of(tmp_path / "iter_0000007"))
    with pytest.raises(ConfigError, match="holds adapters .*step_<n>/hf"):
        plan_export(
            TorchDistReader(tmp_path / "iter_0000007"),
            read_shape(tiny_config(family, layers=4), layer_spec="torch"),
            None,
        )
    assert keys and all("_adapter." in key for key in keys), "the frozen weights are in no checkpoint"
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in keys)


OTHER = {
    "DP2-sharded-to-TP2-SP": ((*sizes(1, 1), *SHARDED), (*sizes(2, 1), SP, *PLAIN), "qwen3"),
    "TP2-to-PP2-VPP2": ((*sizes(2, 1), *SHARDED), (*sizes(1, 2), VPP2, *SHARDED), "qwen2_tied"),
    "PP2-to-TP2": ((*sizes(1, 2), *SHARDED), (*sizes(2, 1), *SHARDED), "llama"),
    "EP2-to-TP2": ((*sizes(1, 1), *SHARDED, EP2, ATTENTION), (*sizes(2, 1), *SHARDED, SP, ATTENTION), "qwen3_moe"),
    "EP2-to-TP2-experts": ((*sizes(1, 1), *SHARDED, EP2), (*sizes(2, 1), *PLAIN, SP), "glm4_moe"),
    "TP2-EP2-ETP1-to-PP2-experts": ((*sizes(2, 1), *SHARDED, SP, EP2, ETP1), (*sizes(1, 2), *SHARDED), "qwen3_moe"),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_topology_goes_on_from_the_same_bits(pool, tmp_path, name):
    """The adapters are the same to the bit, their merged product and the next steps to rounding."""
    first, second, family = OTHER[name]
    for found in pool.run(2, save_and_load, str(tmp_path), first, second, family, timeout_s=120):
        assert (
            found["loaded"] and found["same export"] < 1e-6 and found["reference"] < 1e-6 and found["moved"] > 1e-3
        ), found
        assert found["error"] < 1e-4, found


def load_elsewhere(rank: int, world: int, root: str) -> dict[str, str]:
    """Return the words of the refusals of another rank, other targets, no adapters, and other frozen weights."""
    with open_lora((), "llama") as rig:
        path = model_state.save(rig.backend, pathlib.Path(root), 1, {}).finish()
        kept, model = model_state.numbers(rig.backend), model_state.identity(rig.backend)
    said = {}
    for name, lora in (("rank", ("lora.rank=4", "lora.alpha=5")), ("targets", (*LORA, ATTENTION)), ("full", ())):
        with open_lora((), "llama", lora) as rig, pytest.raises(CheckpointError) as caught:
            model_state.load(rig.backend, path, kept, model)
        said[name] = str(caught.value)
    with open_lora((), "llama") as rig, pytest.raises(CheckpointError) as caught:
        with torch.no_grad():
            rig.backend.parameters()[0][0, 0] += 1.0
        model_state.load(rig.backend, path, kept, model)
    return said | {"weights": str(caught.value)}


def test_a_checkpoint_of_other_adapters_or_beside_other_weights_is_refused_by_name(pool, tmp_path):
    for said in pool.run(1, load_elsewhere, str(tmp_path), timeout_s=90):
        assert "lora.rank 3 there and 4 here" in said["rank"] and "give the lora.rank" in said["rank"], said
        assert "'linear_fc1'" in said["targets"] and "lora.targets" in said["targets"], said
        assert "lora.rank 3 there and 0 here" in said["full"] and "null for 0" in said["full"], said
        assert "frozen_weights" in said["weights"] and "model.hf_path and model.dtype" in said["weights"], said
