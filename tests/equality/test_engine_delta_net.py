"""Gated delta nets and attention of Transformer Engine's modules equal transformers, on a stand-in without kernels.

The stand-in is the one of test_transformer_engine.py.
"""

import pathlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.checkpoint import model_state
from megatron_rl.checkpoint.convert import Cut, export_folder, import_folder
from megatron_rl.checkpoint.megatron_lm import open_folder
from megatron_rl.model.hf_config import read_shape
from tests.equality.engine_rig import ENGINE
from tests.equality.layouts import SHARDED, TOLERANCE
from tests.equality.rig import equal_by_name, open_rig, ragged_advantages
from tests.equality.rows import measured, row
from tests.equality.saved_steps import save_and_load
from tests.equality.shared_samples import SHARED, advantages_of, group_samples
from tests.pairwise import quick
from tests.reference import file_weights, masked_logprobs, near_policy, reference_gradient, tiny_model

pytestmark = pytest.mark.distributed
FAMILIES = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
SEVERAL = "plan.max_tokens_per_microbatch=48"  # samples in a micro-batch
LAYOUTS = ("one", "shared", "TP2-SP", "TP2-SP-shared", "CP2", "PP2-shared", "recompute-shared")
CASES = ("TP2 qwen3_5_text", "TP2-shared qwen3_5_text", "EP2-permuted qwen3_next", "TP2-SP-EP2-ETP1 qwen3_5_moe_text",
         *(f"{layout} {family}" for layout in LAYOUTS for family in FAMILIES))
QUICK = ("one qwen3_next", "TP2-SP qwen3_5_moe_text", "TP2-SP-shared qwen3_5_text", "TP2-SP-shared qwen3_next")
TORCH = ("model.layer_spec=torch",)
WAYS = {"torch-to-engine": (TORCH, ENGINE), "engine-to-torch": (ENGINE, TORCH), "engine": (ENGINE, ENGINE)}
RESUMED = [f"{way} {layout} {family}" for way in WAYS for layout in ("one", "TP2-SP", "PP2") for family in FAMILIES]
RESUMED_QUICK = ("torch-to-engine TP2-SP qwen3_next", "engine-to-torch one qwen3_5_text", "engine PP2 qwen3_5_moe_text")


def against_transformers(rank: int, world: int, family: str, settings: tuple[str, ...]) -> dict[str, float]:
    """Return the errors of log-probs, and of the dense and of the skip run's gradient."""
    with open_rig(family, SEVERAL, *ENGINE, *settings, samples=7) as rig:
        if SHARED in settings:
            samples, groups = group_samples()
            rig.take(near_policy(rig.model, samples), groups)
        samples, count = rig.samples, len(rig.samples)
        advantages = advantages_of(count) if SHARED in settings else ragged_advantages(count)
        gap = np.abs(rig.logprobs() * rig.loss_mask - masked_logprobs(rig.model, samples)).max()
        want, _ = reference_gradient(rig.model, samples, rig.groups, list(advantages))
        return {"log-probs": float(gap)} | rig.errors(advantages, want)


@pytest.mark.parametrize("name", quick(CASES, *QUICK))
def test_log_probs_and_gradients_equal_transformers(engine_pool, name):
    for found in measured(engine_pool, name, against_transformers):
        assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("name", quick(RESUMED, *RESUMED_QUICK))
def test_checkpoint_goes_on(engine_pool, tmp_path, name):
    """Weights come back to the bit, from the other kind of layers too; with the same kind so do the next steps."""
    way, case = name.split(" ", 1)
    world, family, overrides = row(case)
    first, second = ((*SHARDED, *overrides, *kind) for kind in WAYS[way])
    for found in engine_pool.run(world, save_and_load, str(tmp_path), first, second, family, 3):
        assert found["loaded"] and found["export"] == 0 and found["error"] < TOLERANCE, found
        assert found["moved"] > 1e-4 and (found["next"] or way != "engine"), found


def saved_weights(rank: int, world: int, root: str, settings: tuple[str, ...], family: str) -> dict[str, torch.Tensor]:
    with open_rig(family, *settings, samples=4) as rig:
        model_state.save(rig.backend, pathlib.Path(root), 7, {"state.json": "{}"}, with_adam=False).finish()
        return rig.weights()


def loaded_weights(rank: int, world: int, path: str, settings: tuple[str, ...], family: str) -> bool:
    """Return whether a converted checkpoint brings the weights of the tiny model into a backend that lost them."""
    with open_rig(family, *settings) as rig:
        with torch.no_grad():
            for parameter in rig.backend.parameters():
                parameter.fill_(0.5)
        model_state._put(rig.backend, model_state.load_weights(model_state._entries(rig.backend), pathlib.Path(path)))
        files = file_weights(rig.model)
        return all(torch.equal(x, files[name]) for name, x in rig.weights().items())


CONVERTED = [f"{kind} {case}" for kind in ("engine", "torch") for case in ("TP2-SP qwen3_next", "PP2 qwen3_5_text")]


@pytest.mark.parametrize("name", quick(CONVERTED, CONVERTED[0], CONVERTED[3]))
def test_checkpoint_converts_to_files_and_back(engine_pool, tmp_path, name):
    """Of either kind of layers: what a run saved exports to its weights, and files import to what a run loads."""
    kind, case = name.split(" ", 1)
    world, family, overrides = row(case)
    settings = (*overrides, *(ENGINE if kind == "engine" else TORCH))
    config, model = tiny_model(family)
    model.save_pretrained(tmp_path / "hf")
    tensor = 2 if "TP2" in case else 1  # so that the vocabulary has the run's padding
    shape = read_shape(config, layer_spec="torch", vocab_multiple=tensor)
    saved = engine_pool.run(world, saved_weights, str(tmp_path / "saved"), settings, family)[0]
    export_folder(open_folder(tmp_path / "saved"), shape, tmp_path / "hf", tmp_path / "out")
    assert equal_by_name(load_file(tmp_path / "out" / "model.safetensors"), saved)
    path = import_folder(tmp_path / "hf", shape, tmp_path / "megatron", cut=Cut(tensor=tensor, pipeline=2))
    assert all(engine_pool.run(world, loaded_weights, str(path), settings, family))
