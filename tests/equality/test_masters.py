"""The float32 masters of a bfloat16 policy begin at the files' own numbers, and nothing but a step moves them."""

import logging
import pathlib

import pytest
import torch
import torch.distributed as dist

from megatron_rl.backend import MegatronBackend
from megatron_rl.checkpoint import model_state
from megatron_rl.checkpoint.tensors import MASTER, AdamStates
from megatron_rl.config import load_config
from megatron_rl.distributed import topology
from megatron_rl.errors import ConfigError
from megatron_rl.validate import models, validate_config
from megatron_rl.weights.export import export_weights
from megatron_rl.weights.mapping import trained_entries
from megatron_rl.weights.reader import MemoryReader
from megatron_rl.weights.spread import SpreadReader
from tests.equality.layouts import BF16, SHARDED
from tests.equality.rig import Rig, config_of, equal, equal_by_name, layers_of, open_rig, ragged_advantages
from tests.equality.rows import row
from tests.equality.saved_steps import PLAIN, open_like
from tests.equality.served_rig import open_served
from tests.pairwise import quick
from tests.reference import file_weights, relative_error, tiny_model

# tied embeddings on two stages, chunks, experts, matrices laid out otherwise than in files, Muon's own groups
LAYOUTS = (
    *("one-plain qwen2_tied", "DP2-sharded qwen2_tied", "PP2-sharded qwen2_tied", "TP2-plain llama"),
    *("EP2-sharded qwen3_moe", "TP2-sharded qwen3_5_text", "PP2-VPP2-plain qwen2_tied", "TP2-plain-muon llama"),
    *("TP2-SP-EP2-ETP1-sharded gpt_oss", "EP2-sharded glm4_moe", "DP2-sharded-gather qwen2_tied", "TP2-PP2-plain phi3"),
)
QUICK = (LAYOUTS[0], *LAYOUTS[2:5], LAYOUTS[7])
SPEED = ("optimizer.lr=0.001", "optimizer.weight_decay=0.1", "optimizer.clip_grad=0")
STEPPED_TOLERANCE = 1e-6  # float32, three steps: seen 0; a master that began rounded may be 2^-9 off


def masters_of(rig: Rig) -> dict[str, torch.Tensor]:
    """Return whole masters under the names of files; a float32 parameter is its own master."""
    backend, chunks = rig.backend, []
    states = AdamStates(backend.optimizer.megatron, moments=False).of
    for chunk in backend.chunks:
        found = {}
        for name, parameter in chunk.module.named_parameters():
            whole = torch.zeros(parameter.numel())
            state = states[parameter]
            if parameter.dtype == torch.float32:
                whole.copy_(parameter.detach().flatten())
            elif MASTER in state.tensors:
                whole[slice(None) if state.local is None else state.local] = state.tensors[MASTER].detach().flatten()
            if state.group is not None and parameter.dtype != torch.float32:
                dist.all_reduce(whole, group=state.group)
            found[name] = whole.view(parameter.shape)
        chunks.append(found)
    exported = export_weights(chunks, backend.shape, backend.topology, entries=trained_entries)
    return {name: x.clone() for name, x in exported}


def trained_files(rig: Rig, masters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of the model's files that are trained, as float32 as they were given."""
    files = file_weights(rig.model)
    assert all(x.dtype == torch.float32 for x in files.values())
    assert set(files) - set(masters) <= {"lm_head.weight"} | {x for x in files if "correction_bias" in x}
    return {name: files[name] for name in masters}


def kept(rank: int, world: int, family: str, layout: tuple[str, ...]) -> dict[str, bool]:
    with open_rig(family, *layout, *BF16, *SPEED, "optimizer.lr=0", samples=8, total_steps=3) as rig:
        masters, weights = masters_of(rig), rig.weights()
        files = trained_files(rig, masters)
        found = {
            "masters": equal_by_name(masters, files),
            "weights": all(torch.equal(weights[k], v.to(weights[k].dtype)) for k, v in files.items()),
            "bits below bfloat16": any(not torch.equal(x, x.bfloat16().float()) for x in files.values()),
        }
        # a step at a rate of 0 writes each weight from its master
        rig.step(ragged_advantages(8), drops=True)
        found["step"] = equal_by_name(masters_of(rig), files) and equal_by_name(rig.weights(), weights)
        rig.backend.reset_optimizer(total_steps=1)
        found["reset"] = equal_by_name(masters_of(rig), files) and not rig.backend.optimizer.scheduler.num_steps
        rig.backend.offload()
        rig.backend.restore()
        found["offload"] = equal_by_name(masters_of(rig), files)
        return found


@pytest.mark.parametrize("name", quick(LAYOUTS, *QUICK))
def test_masters_begin_at_the_files_numbers(pool, name):
    world, family, layout = row(name)
    for found in pool.run(world, kept, family, layout, timeout_s=120):
        assert all(found.values()), found


def spread(rank: int, world: int, family: str, layout: tuple[str, ...]) -> dict[str, bool]:
    """Build a policy of bfloat16 files with spread masters; compare with their numbers, read whole."""
    config = config_of(*layout, *BF16, "optimizer.spread_masters=true", "run.seed=3")
    hf_config, model = tiny_model(family, layers=layers_of(config))
    files = {name: x.bfloat16() for name, x in file_weights(model).items()}
    try:
        backend = MegatronBackend(config, hf_config=hf_config, weights=files)
        rig = Rig(backend=backend, model=model)
        masters, weights, reader = masters_of(rig), rig.weights(), SpreadReader(MemoryReader(files), 3)
        return {
            "masters": equal_by_name(masters, {k: reader.read(k, 0, 0, len(files[k])) for k in masters}),
            "weights": equal_by_name(weights, {k: files[k].to(weights[k].dtype) for k in weights}),
            "spread": not any(torch.equal(x, files[k].float()) for k, x in masters.items() if files[k].any()),
        }
    finally:
        topology.destroy()


@pytest.mark.parametrize("name", quick(LAYOUTS, *QUICK[1:4], "EP2-sharded glm4_moe"))
def test_spread_masters_are_the_same_in_every_layout(pool, name):
    world, family, layout = row(name)
    for found in pool.run(world, spread, family, layout, timeout_s=120):
        assert all(found.values()), found


def said(rank: int, world: int, *settings: str) -> list[str]:
    """Return what is logged while a policy of float32 files is built whose masters are to be spread."""
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())
    logger = logging.getLogger("megatron_rl.backend.trainable_model")
    logger.addHandler(handler)
    try:
        with open_rig("qwen2_tied", "optimizer.spread_masters=true", *settings, samples=8, total_steps=3):
            return words
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("settings", "why"), [(BF16, "the files are finer than bfloat16"), ((), "float32 weights have no masters")]
)
def test_a_spread_that_changes_nothing_is_logged(pool, settings, why):
    (words,) = pool.run(1, said, *settings, timeout_s=60)
    assert words == [f"optimizer.spread_masters=true changes nothing: {why}"]


@pytest.mark.parametrize("beside", ("lora.rank=4", "model.dtype=float32"))
def test_a_spread_of_what_has_no_master_in_files_is_refused_by_name(beside):
    validate_config(load_config(None, [beside]), models.spread_masters)
    with pytest.raises(ConfigError, match=f"optimizer.spread_masters=true .*{beside}"):
        validate_config(load_config(None, [beside, "optimizer.spread_masters=true"]), models.spread_masters)


def steps_of_torch(rank: int, world: int, layout: tuple[str, ...]) -> dict[str, float]:
    """Compare masters after three steps with torch's AdamW over the files' numbers and the policy's gradients."""
    with open_rig("qwen2_tied", *layout, *BF16, *SPEED, samples=8, total_steps=10**6) as rig:
        want = {name: torch.nn.Parameter(x.clone()) for name, x in trained_files(rig, masters_of(rig)).items()}
        adam = torch.optim.AdamW(want.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        settings = rig.backend.config.optimizer
        for group in adam.param_groups:
            group.update(betas=settings.betas, eps=settings.epsilon)
        advantages = ragged_advantages(8)
        for _ in range(3):
            gradient = rig.gradient(advantages, rig.plan(advantages, drops=True))
            for name, parameter in want.items():
                parameter.grad = gradient[name].float()
                if parameter.ndim == 1:  # as Megatron-Core, no decay of biases and norms
                    with torch.no_grad():
                        parameter.div_(1 - 1e-3 * 0.1)
            rig.step(advantages, drops=True)
            adam.step()
        found = masters_of(rig)
        weights = rig.weights()
        return {
            "masters": relative_error(found, {k: v.detach() for k, v in want.items()}),
            "moved": relative_error(found, trained_files(rig, found)),
            "weights": sum(not torch.equal(weights[k], v.to(weights[k].dtype)) for k, v in found.items()),
        }


@pytest.mark.parametrize("layout", [PLAIN, SHARDED])
def test_steps_go_on_from_the_files_numbers(pool, layout):
    for found in pool.run(2, steps_of_torch, layout, timeout_s=120):
        assert found["masters"] < STEPPED_TOLERANCE and found["moved"] > 1e-3 and not found["weights"], found


def saved(rank: int, world: int, root: str, first: tuple[str, ...], second: tuple[str, ...]) -> dict[str, bool]:
    """Save before the first step, and load over other masters in another layout."""
    with open_like((*first, *BF16), "qwen2_tied") as rig:
        files = trained_files(rig, masters_of(rig))
        numbers, identity = model_state.numbers(rig.backend), model_state.identity(rig.backend)
        path = model_state.save(rig.backend, pathlib.Path(root), 1, {}).finish()
    with open_like((*second, *BF16), "qwen2_tied") as rig:
        rig.backend.optimizer.megatron.reload_model_params()
        rounded = equal_by_name(masters_of(rig), {k: v.bfloat16().float() for k, v in files.items()})
        model_state.load(rig.backend, path, numbers, identity)
        loaded = equal_by_name(masters_of(rig), files)
        model_state.load(rig.backend, path, {k: v for k, v in numbers.items() if k != "has_masters"}, identity)
        earlier = equal_by_name(masters_of(rig), {k: v.bfloat16().float() for k, v in files.items()})
        return {"steps": numbers["optimizer_steps"] == 0, "rounded": rounded, "loaded": loaded, "earlier": earlier}


@pytest.mark.parametrize(("first", "second"), [("DP2-sharded", "PP2-plain"), ("PP2-plain", "DP2-sharded")])
def test_a_checkpoint_before_the_first_step_has_the_masters(pool, tmp_path, first, second):
    """One of an earlier release has none: the masters are then the weights."""
    layouts = (row(f"{x} qwen2_tied")[2] for x in (first, second))
    for found in pool.run(2, saved, str(tmp_path), *layouts, timeout_s=120):
        assert all(found.values()), found


def served(rank: int, world: int, path: str, folder: str) -> dict[str, bool]:
    """Begin a model after another has trained; load the other again with and without AdamW."""
    with open_served(path, folder, *SHARDED, *BF16) as server:
        models, backend, found = server.worker.models, server.backend, {}

        def masters() -> list[torch.Tensor]:
            return [x.clone() for x in backend.optimizer.masters.tensors]

        base = masters()
        server.create("a")
        found["begins at the base"] = equal(masters(), base)
        server.step("a", weight_decay=0.1)
        stepped = masters()
        server.create("b")
        found["begins at it again"] = equal(masters(), base) and not equal(stepped, base)
        for kind in (True, False):
            models.save("a", pathlib.Path(folder) / f"saved {kind}", None, with_adam=kind)
        for kind in (True, False):
            models.load("c", pathlib.Path(folder) / "saved True", with_adam=kind)
            found[f"loaded {kind}"] = equal(masters(), stepped)
        models.load("c", pathlib.Path(folder) / "saved False", with_adam=False)
        found["weights alone"] = equal(masters(), [x.bfloat16().float() for x in stepped])
        return found


def test_models_of_a_server_begin_at_the_files_numbers(pool, arithmetic, tmp_path):
    for found in pool.run(2, served, str(arithmetic), str(tmp_path), timeout_s=120):
        assert all(found.values()), found
