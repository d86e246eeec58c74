"""Checks the simulator's memory against built models, its plans against the backend's, and its clock's arithmetic."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.model.hf_config import model_shape
from megatron_rl.model.settings import ModelSettings
from megatron_rl.planning.plan import plan_rules
from megatron_rl.planning.tokens import tokens_of
from megatron_rl.simulator.degrees import degrees_of
from megatron_rl.simulator.forecast import forecast
from megatron_rl.simulator.machine import Machine, machine_costs
from megatron_rl.simulator.memory import kept_elements, stage_memory
from megatron_rl.simulator.placed import PlacedModel
from megatron_rl.simulator.workload import Workload, draw
from megatron_rl.weights.config_json import read_hf_config
from tests.equality.layouts import RECOMPUTE
from tests.equality.rig import DEFAULTS, layers_of, open_rig, ragged_advantages
from tests.pairwise import quick
from tests.published.configs import HERE
from tests.reference import tiny_config
from tests.tools import words
from tests.tools.simulated_job import bytes_of, equal_samples, held_bytes, job_of, per_token, tiny_job

KIN = ("TP2 SP, layers of two kinds", "TP2 SP ETP1, biases and sinks", "EP2, latents")
KIN += ("EP2, adapters on experts", "PP2 VPP2, adapters", "EP2, delta nets in part")


def split(family: str, given: str) -> tuple[str, ...]:
    """Return a family and the overrides of a layout, in short: `tensor=2` for `parallel.tensor=2`, `SP` for TP2 SP."""
    short = given.replace("SP", "tensor=2 sequence_parallel=true").split()
    return family, *(x if "." in x else f"parallel.{x}" for x in short)


SPLITS = {
    "TP2": split("qwen2_untied", "SP"),
    "PP2, tied": split("qwen2_tied", "pipeline=2"),
    "PP2 VPP2": split("qwen3", "pipeline=2 virtual_pipeline=2"),
    "TP2, joined projections": split("phi3", "tensor=2"),
    "TP2, norms over heads": split("olmo2", "tensor=2"),
    "PP2, norms around": split("gemma3_text", "pipeline=2"),
    "EP2": split("mixtral", "expert=2"),
    "TP2 ETP1": split("qwen3_moe", "SP expert_tensor=1"),
    "PP2, layers of two kinds": split("glm4_moe", "pipeline=2"),
    "TP2 SP, layers of two kinds": split("glm4_moe", "SP"),
    "EP2, biases and sinks": split("gpt_oss", "expert=2"),
    "TP2 SP ETP1, biases and sinks": split("gpt_oss", "SP expert_tensor=1"),
    "PP2, dense layers between": split("llama4_interleaved", "pipeline=2"),
    "TP2 SP, latents": split("deepseek_v3", "SP"),
    "EP2, latents": split("moonlight", "expert=2"),
    "PP2, delta nets": split("qwen3_5_text", "pipeline=2"),
    "TP2 SP, delta nets": split("qwen3_next", "SP"),
    "EP2, delta nets in part": split("qwen3_5_moe_text", "expert=2"),
    "PP2, windows by kind": split("olmo3", "pipeline=2"),
    "TP2, window": split("mistral_window", "tensor=2"),
    "DP2, sharded": split("llama", "optimizer.distributed=true"),
    "TP2, Muon": split("phi3", "tensor=2 optimizer.algorithm=muon"),
    "EP2, Muon, sharded": split("glm4_moe", "expert=2 optimizer.algorithm=muon optimizer.distributed=true"),
    "PP2, second model": split("qwen2_tied",
                               "pipeline=2 loss.kl_coefficient=0.1 skip.mode=off reference.placement=device"),
    "TP2, adapters": split("qwen3", "tensor=2 lora.rank=3"),
    "EP2, adapters on experts": split("glm4_moe", "expert=2 lora.rank=3"),
    "TP2-SP, adapters on experts": split("mixtral", "SP lora.rank=3"),
    "PP2 VPP2, adapters": split("qwen2_tied", "pipeline=2 virtual_pipeline=2 lora.rank=3 lora.targets=[linear_fc1]"),
}


def shaped(family: str, world: int, *overrides: str):
    config = load_config(None, [*DEFAULTS, "model.dtype=float32", *overrides])
    degrees = degrees_of(config.parallel, world)
    hf_config = tiny_config(family, layers=layers_of(config))
    return config, model_shape(hf_config, ModelSettings.of(config), degrees, layer_spec="torch"), degrees


def built(rank: int, world: int, family: str, *overrides: str) -> dict:
    """Return the memory that a rank of a real backend holds, and the plan that it makes."""
    values = ragged_advantages(24)
    with open_rig(family, *overrides, samples=24) as rig:
        plan = rig.plan(values, drops=True)
        rig.step(values, drops=True)
        backend, facts = rig.backend, rig.batch.facts
        found = dict(zip(("weights", "gradients", "moments"), held_bytes(backend), strict=True))
        backend.keep_reference()
        kept = backend.reference.tensors if backend.config.reference.placement == "device" else []
        lengths = {name: getattr(facts, name) for name in ("prompt_tokens", "response_tokens", "response_inputs")}
        groups = np.unique(facts.prompt_keys, return_inverse=True)[1]
        found["workload"] = lengths | dict(loss_tokens=facts.response_tokens, groups=groups)
        sliced = backend.config.parallel.sequence_parallel
        found["prior"] = plan_rules(backend.config.plan, backend.topology, backend.shape, sequence_parallel=sliced,
                                    fp8=False, share_prompts=True)
        stage = backend.topology.pipeline_rank
        return found | dict(reference=bytes_of(kept), stage=stage, fingerprints=plan.fingerprints(), signal=values != 0)


@pytest.mark.parametrize("split", quick(SPLITS, *(SPLITS.keys() - KIN)))
def test_memory_and_plan_equal_the_backends(pool, split: str) -> None:
    """Bytes of weights, second model and gradients are equal on every rank, bytes of moments over all ranks."""
    family, *overrides = SPLITS[split]
    config, shape, degrees = shaped(family, 2, *overrides)
    found = pool.run(2, built, family, *overrides, timeout_s=120)
    sizes = dict(tokens=40, loss_tokens=20, microbatches=4)
    predicted = [stage_memory(PlacedModel.of(config, shape, degrees), rank["stage"], **sizes) for rank in found]
    for name in ("weights", "reference", "gradients"):
        assert [getattr(x, name) for x in predicted] == [rank[name] for rank in found], name
    assert sum(x.optimizer for x in predicted) == sum(rank["moments"] for rank in found)
    job = job_of(config, shape, degrees, Workload(rewards=np.zeros(24), **found[0]["workload"]))
    assert job.rules() == found[0]["prior"]
    assert job.plan(job.rules(), found[0]["signal"], drops=True).fingerprints() == found[0]["fingerprints"]


def saved_bytes(rank: int, world: int, family: str, layers: int, *overrides: str) -> tuple[int, int]:
    """Return the bytes that autograd saves in one micro-batch's forward, weights not counted, and its tokens."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    values = ragged_advantages(8)
    with open_rig(family, "plan.max_tokens_per_microbatch=4096", *overrides, samples=8, layers=layers) as rig:
        plan = rig.plan(values, drops=False)
        weights = {p.untyped_storage().data_ptr() for chunk in rig.backend.chunks for p in chunk.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            rig.accumulate(values, plan)
        saved = sum(size for pointer, size in kept.items() if pointer not in weights)
        return saved, int(tokens_of(rig.batch.facts, share_prompts=False).whole.sum())


PLAIN = ("qwen2_tied", "qwen3", "olmo2", "gemma3_text", "qwen3_moe", "glm4_moe", "llama4", "gpt_oss", "deepseek_v3")
SAVED = {family: split(family, "") for family in PLAIN}
SAVED["mixture, whole experts over TP2"] = split("qwen3_moe", "SP expert_tensor=1 expert=2")
SAVED["latents over TP2"] = split("moonlight", "SP expert_tensor=1 expert=2")


@pytest.mark.parametrize("case", SAVED)
def test_activations_are_what_autograd_saves(pool, case: str) -> None:
    """Four layers less two, float32, on the ranks' mean. The 5 %: norms keep a number a token, attention one a head."""
    family, *overrides = SAVED[case]
    world = 2 if overrides else 1
    deep, shallow = (pool.run(world, saved_bytes, family, layers, *overrides, timeout_s=60) for layers in (4, 2))
    config, shape, degrees = shaped(family, world, *overrides)
    found = sum(more - less for (more, _), (less, _) in zip(deep, shallow, strict=True)) / 2 / world
    assert 4 * deep[0][1] * kept_elements(PlacedModel.of(config, shape, degrees), 1) == pytest.approx(found, rel=0.05)


def test_equal_samples_take_what_the_pipeline_takes() -> None:
    """16 samples of 40 tokens, one a micro-batch, on PP4 x DP2 take (8 + 4 - 1) slots of 40 s; half dead (4 + 3)."""
    found = forecast(tiny_job(equal_samples(16, 40, dead=4), 8, "parallel.pipeline=4", costs=per_token(4)))
    assert found.dense.update_s == pytest.approx(11 * 40 + 7, rel=1e-12)
    assert found.skip.update_s == pytest.approx(7 * 40 + 7, rel=1e-12)
    assert found.ideal == 2.0 and found.gain == pytest.approx(447 / 287, rel=1e-12) and found.dense.imbalance == 0.0
    np.testing.assert_allclose(found.dense.bubble_share, 3 / 11, rtol=1e-12)
    layout = ("parallel.pipeline=4", "parallel.virtual_pipeline=2")
    interleaved = forecast(tiny_job(equal_samples(16, 40), 8, *layout, costs=per_token(4, virtual=2)))
    assert interleaved.dense.update_s == pytest.approx((8 * 2 + 3) * 20 + 7, rel=1e-12)


def test_nothing_dead_gains_nothing_and_all_dead_is_a_ghost() -> None:
    alive = forecast(tiny_job(equal_samples(8, 20), 2))
    assert alive.gain == 1.0 and alive.ideal == 1.0
    assert alive.skip.plan.fingerprints() == alive.dense.plan.fingerprints()
    ghost = forecast(tiny_job(equal_samples(8, 20, dead=4), 2, costs=per_token(1)))
    assert ghost.ideal is None and ghost.skip.drawn is None
    assert (ghost.skip.count("ghosts"), ghost.skip.update_s) == (1, 7.0)
    assert forecast(tiny_job(equal_samples(8, 20, dead=2), 2, "skip.mode=off")).gain == 1.0


def test_what_binds_is_named() -> None:
    """The costliest comes first: with experts over two replicas and a long sample, what one takes beyond the other."""
    workload = dataclasses.replace(equal_samples(4, 20), response_tokens=np.array([15, 15, 15, 95]))
    found = forecast(tiny_job(workload, 2, "parallel.expert=2", family="mixtral", costs=per_token(1)))
    assert {"EP lockstep", "longest sample", "token cap", "optimizer step"} <= {x.name for x in found.constraints}
    assert found.dense.count("num_fillers") == 1 and found.constraints[0].name == "longest sample"
    layout = ("parallel.pipeline=4", "parallel.virtual_pipeline=2")
    wide = forecast(tiny_job(equal_samples(12, 40), 4, *layout, costs=per_token(4, 2)))
    assert {"VPP multiple", "pipeline bubble", "uneven stages"} <= {x.name for x in wide.constraints}
    assert wide.constraints[0].name == "pipeline bubble"


def test_replicas_that_share_experts_wait_for_each_other() -> None:
    """One sample a micro-batch: replica 0 runs 10 and 40 tokens, replica 1 30 and 25: 30 + 40, apart the longer 55."""
    lengths = dict(prompt_tokens=np.full(4, 5), response_tokens=np.array([5, 25, 35, 20]))
    workload = dataclasses.replace(equal_samples(4, 20), **lengths)
    for expert, seconds in ((2, 70), (1, 55)):
        given = (f"parallel.expert={expert}", "plan.samples_per_microbatch=1")
        found = forecast(tiny_job(workload, 2, *given, family="mixtral", costs=per_token(1)))
        assert found.dense.update_s == pytest.approx(seconds + 7, rel=1e-12)


@pytest.mark.long(seconds=5)
def test_thousands_of_gpus_are_forecast() -> None:
    """4,096 GPUs, 2,048 samples and four mini-batches are planned and put on the clock several times over."""
    given = "model.dtype=bfloat16 parallel.tensor=4 parallel.sequence_parallel=true parallel.pipeline=8 "
    given += "train.prompts_per_rollout=128 rollout.samples_per_prompt=16 train.samples_per_mini_batch=512 "
    config = load_config(None, words(given + "rollout.max_response_tokens=4096"))
    degrees = degrees_of(config.parallel, 4096)
    hf_config = tiny_config("qwen2_untied", layers=32)
    hf_config.num_key_value_heads = 4
    shape = model_shape(hf_config, ModelSettings.of(config), degrees, layer_spec="torch")
    workload, _ = draw(config, lengths=None, pass_rate=None, prompt_tokens=None, seed=0)
    found = forecast(job_of(config, shape, degrees, workload))
    assert found.dense.update_s >= found.skip.update_s > 0 and 1 <= found.gain <= found.ideal * 1.2


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen2.5-7B-Instruct"])
@pytest.mark.parametrize("recompute", [(), RECOMPUTE], ids=["kept", "recomputed"])
def test_no_other_split_of_two_stages_is_forecast_to_be_quicker(name: str, recompute: tuple[str, ...]) -> None:
    """The layers are divided before there is a sample, by the mean length that the limits allow."""
    lengths = "data.max_prompt_tokens=1024", "rollout.max_response_tokens=4096"
    config = load_config(None, [*DEFAULTS, *lengths, *recompute, "parallel.pipeline=2"])
    degrees, hf_config = degrees_of(config.parallel, 2), read_hf_config(HERE / name)
    shape = model_shape(hf_config, ModelSettings.of(config), degrees, layer_spec="torch")
    tokens, squares = np.array([2560.0]), np.array([2560.0**2])

    def slowest(stage_layers: tuple[int, ...]) -> float:
        machine = Machine(flops_per_s=1e12, attention_flops_per_s=1e12, layer_overhead_s=0.0)
        split = dataclasses.replace(shape, stage_layers=stage_layers)
        model = machine_costs(machine, PlacedModel.of(config, split, degrees), loss_share=0.8, source="").model
        return max(float(stage.seconds(tokens, squares)[0]) for stage in model.stages)

    count = shape.num_layers
    assert slowest(shape.stage_layers) == min(slowest((first, count - first)) for first in range(1, count))
    assert slowest(shape.stage_layers) < 0.97 * slowest((count // 2, count // 2))
