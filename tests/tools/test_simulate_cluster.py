"""Checks the simulator's memory against built models, its plans against the backend's, and its clock's arithmetic."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.model.hf_config import model_shape
from megatron_rl.planning.plan import plan_rules
from megatron_rl.planning.tokens import tokens_of
from megatron_rl.simulator.degrees import degrees_of
from megatron_rl.simulator.forecast import forecast
from megatron_rl.simulator.memory import kept_elements, stage_memory
from megatron_rl.simulator.workload import Workload, draw
from tests.equality.rig import DEFAULTS, layers_of, open_rig, ragged_advantages
from tests.patience import patient
from tests.reference import tiny_config
from tests.tools.simulated_job import equal_samples, job_of, per_token, tiny_job

# ---- against what is really built -----------------------------------------------------------------------------------

SPLITS = {
    "TP2": ("qwen2_untied", "parallel.tensor=2", "parallel.sequence_parallel=true"),
    "PP2, tied": ("qwen2_tied", "parallel.pipeline=2"),
    "PP2 VPP2": ("qwen3", "parallel.pipeline=2", "parallel.virtual_pipeline=2"),
    "TP2, joined projections": ("phi3", "parallel.tensor=2"),
    "TP2, norms over heads": ("olmo2", "parallel.tensor=2"),
    "PP2, norms around": ("gemma3_text", "parallel.pipeline=2"),
    "EP2": ("mixtral", "parallel.expert=2"),
    "TP2 ETP1": ("qwen3_moe", "parallel.tensor=2", "parallel.sequence_parallel=true", "parallel.expert_tensor=1"),
    "PP2, layers of two kinds": ("glm4_moe", "parallel.pipeline=2"),
    "TP2 SP, layers of two kinds": ("glm4_moe", "parallel.tensor=2", "parallel.sequence_parallel=true"),
    "EP2, biases and sinks": ("gpt_oss", "parallel.expert=2"),
    "TP2 SP ETP1, biases and sinks": (
        "gpt_oss",
        "parallel.tensor=2",
        "parallel.sequence_parallel=true",
        "parallel.expert_tensor=1",
    ),
    "PP2, dense layers between": ("llama4_interleaved", "parallel.pipeline=2"),
    "TP2 SP, latents": ("deepseek_v3", "parallel.tensor=2", "parallel.sequence_parallel=true"),
    "EP2, latents": ("moonlight", "parallel.expert=2"),
    "PP2, windows by kind": ("olmo3", "parallel.pipeline=2"),
    "TP2, window": ("mistral_window", "parallel.tensor=2"),
    "DP2, sharded": ("llama", "optimizer.distributed=true"),
    "PP2, second model": (
        "qwen2_tied",
        "parallel.pipeline=2",
        "loss.kl_coefficient=0.1",
        "skip.mode=off",
        "reference.placement=device",
    ),
    "TP2, adapters": ("qwen3", "parallel.tensor=2", "lora.rank=3"),
    "EP2, adapters on experts": ("glm4_moe", "parallel.expert=2", "lora.rank=3"),
    "TP2-SP, adapters on experts": ("mixtral", "parallel.tensor=2", "parallel.sequence_parallel=true", "lora.rank=3"),
    "PP2 VPP2, adapters": (
        "qwen2_tied",
        "parallel.pipeline=2",
        "parallel.virtual_pipeline=2",
        "lora.rank=3",
        "lora.targets=[linear_fc1]",
    ),
}


def built(rank: int, world: int, family: str, *overrides: str) -> dict:
    """Return the memory that a rank of a real backend holds, and the plan that it makes."""
    values = ragged_advantages(24)
    with open_rig(family, *overrides, samples=24) as rig:
        plan = rig.plan(values, drops=True)
        rig.step(values, drops=True)
        parameters = [p for chunk in rig.backend.chunks for p in chunk.parameters()]
        rig.backend.keep_reference()
        kept = rig.backend.reference.tensors if rig.backend.config.reference.placement == "device" else []
        second = sum(x.numel() * x.element_size() for x in kept)
        moments = 0
        for part in rig.backend.optimizer.megatron.chained_optimizers:
            for state in part.optimizer.state.values():
                moments += sum(state[name].numel() * state[name].element_size() for name in ("exp_avg", "exp_avg_sq"))
        facts = rig.batch.facts
        return {
            "weights": sum(p.numel() * p.element_size() for p in parameters),
            "gradients": sum(p.main_grad.numel() * 4 for p in parameters if p.requires_grad),
            "moments": moments,
            "reference": second,
            "stage": rig.backend.topology.pipeline_rank,
            "fingerprints": plan.fingerprints(),
            "prior": plan_rules(rig.backend.config, rig.backend.topology, rig.backend.shape, share_prompts=True),
            "groups": facts.prompt_keys,
            "signal": values != 0,
            "prompt": facts.prompt_tokens,
            "response": facts.response_tokens,
            "response_inputs": facts.response_inputs,
        }


@pytest.mark.parametrize("split", SPLITS)
def test_memory_and_plan_equal_the_backends(pool, split: str) -> None:
    """The simulator's memory and plan equal those of the backend.

    Bytes of weights, of a second model too, and of gradients are equal on every rank, those of moments over all ranks;
    rules and plan are equal by value.
    """
    family, *overrides = SPLITS[split]
    config = load_config(None, [*DEFAULTS, "model.dtype=float32", *overrides])
    degrees = degrees_of(config, 2)
    shape = model_shape(tiny_config(family, layers=layers_of(config)), config, degrees, layer_spec="torch")
    found = pool.run(2, built, family, *overrides, timeout_s=120)
    predicted = [
        stage_memory(shape, config, degrees, rank["stage"], tokens=40, loss_tokens=20, microbatches=4) for rank in found
    ]
    assert [x.weights for x in predicted] == [rank["weights"] for rank in found]
    assert [x.reference for x in predicted] == [rank["reference"] for rank in found]
    assert [x.gradients for x in predicted] == [rank["gradients"] for rank in found]
    assert sum(x.optimizer for x in predicted) == sum(rank["moments"] for rank in found)
    first = found[0]
    workload = Workload(
        prompt_tokens=first["prompt"],
        response_tokens=first["response"],
        loss_tokens=first["response"],
        response_inputs=first["response_inputs"],
        rewards=np.zeros(24),
        groups=first["groups"],
    )
    job = job_of(config, shape, degrees, workload)
    assert job.rules() == first["prior"]
    assert job.plan(job.rules(), first["signal"], drops=True).fingerprints() == first["fingerprints"]


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
        return sum(size for pointer, size in kept.items() if pointer not in weights), int(
            tokens_of(rig.batch.facts, share_prompts=False).whole.sum()
        )


OVER_TENSOR_RANKS = ("parallel.tensor=2", "parallel.sequence_parallel=true", "parallel.expert_tensor=1")


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen2_tied", ()),
        ("qwen3", ()),
        ("olmo2", ()),
        ("gemma3_text", ()),
        ("qwen3_moe", ()),
        ("qwen3_moe", (*OVER_TENSOR_RANKS, "parallel.expert=2")),
        ("glm4_moe", ()),
        ("llama4", ()),
        ("gpt_oss", ()),
        ("deepseek_v3", ()),
        ("moonlight", (*OVER_TENSOR_RANKS, "parallel.expert=2")),
    ],
    ids=[
        *("qwen2", "qwen3", "olmo2", "gemma3", "mixture", "mixture, whole experts over TP2"),
        *("glm4_moe", "llama4", "gpt_oss", "latents", "latents over TP2"),
    ],
)
def test_activations_are_what_autograd_saves(pool, family: str, overrides: tuple[str, ...]) -> None:
    """The activations of a layer are within 5 % of the bytes that autograd saves for it, on the mean of the ranks.

    They are found in float32, by the difference between four layers and two. The 5 %: norms keep a number
    per token, attention one per token and head.
    """
    world = 2 if overrides else 1
    deep, shallow = (pool.run(world, saved_bytes, family, layers, *overrides, timeout_s=60) for layers in (4, 2))
    config = load_config(None, [*DEFAULTS, "model.dtype=float32", *overrides])
    degrees = degrees_of(config, world)
    shape = model_shape(tiny_config(family), config, degrees, layer_spec="torch")
    found = sum(more - less for (more, _), (less, _) in zip(deep, shallow, strict=True)) / 2 / world
    assert 4 * deep[0][1] * kept_elements(shape, config, degrees, 1) == pytest.approx(found, rel=0.05)


# ---- the clock ------------------------------------------------------------------------------------------------------


def test_equal_samples_take_what_the_pipeline_takes() -> None:
    """Equal samples take as many slots of time as the pipeline has, full or half dead.

    16 samples of 40 tokens, one in each micro-batch, on PP4 x DP2 take (8 + 4 - 1) slots of 40 s; half dead (4 + 3)
    slots.
    """
    found = forecast(tiny_job(equal_samples(16, 40, dead=4), 8, "parallel.pipeline=4", costs=per_token(4)))
    assert found.dense.update_s == pytest.approx(11 * 40 + 7, rel=1e-12) and found.skip.update_s == pytest.approx(
        7 * 40 + 7, rel=1e-12
    )
    assert found.ideal == 2.0 and found.gain == pytest.approx(447 / 287, rel=1e-12) and found.dense.imbalance == 0.0
    np.testing.assert_allclose(found.dense.bubble_share, 3 / 11, rtol=1e-12)
    interleaved = forecast(
        tiny_job(
            equal_samples(16, 40),
            8,
            "parallel.pipeline=4",
            "parallel.virtual_pipeline=2",
            costs=per_token(4, virtual=2),
        )
    )
    assert interleaved.dense.update_s == pytest.approx((8 * 2 + 3) * 20 + 7, rel=1e-12)


def test_nothing_dead_gains_nothing_and_all_dead_is_a_ghost() -> None:
    alive = forecast(tiny_job(equal_samples(8, 20), 2))
    assert (
        alive.gain == 1.0 and alive.ideal == 1.0 and alive.skip.plan.fingerprints() == alive.dense.plan.fingerprints()
    )
    ghost = forecast(tiny_job(equal_samples(8, 20, dead=4), 2, costs=per_token(1)))
    assert (
        ghost.ideal is None
        and ghost.skip.count("ghosts") == 1
        and ghost.skip.update_s == 7.0
        and ghost.skip.drawn is None
    )
    off = forecast(tiny_job(equal_samples(8, 20, dead=2), 2, "skip.mode=off"))
    assert off.gain == 1.0


def test_what_binds_is_named() -> None:
    """The forecast names the constraints that bind, the costliest first.

    With experts over two replicas and one long sample, the lockstep costs what the longer replica takes beyond the
    shorter.
    """
    workload = dataclasses.replace(equal_samples(4, 20), response_tokens=np.array([15, 15, 15, 95]))
    found = forecast(tiny_job(workload, 2, "parallel.expert=2", family="mixtral", costs=per_token(1)))
    names = {x.name for x in found.constraints}
    assert {"EP lockstep", "longest sample", "token cap", "optimizer step"} <= names and found.dense.count(
        "num_fillers"
    ) == 1
    assert found.constraints[0].name == "longest sample"
    wide = forecast(
        tiny_job(equal_samples(12, 40), 4, "parallel.pipeline=4", "parallel.virtual_pipeline=2", costs=per_token(4, 2))
    )
    assert {"VPP multiple", "pipeline bubble", "uneven stages"} <= {x.name for x in wide.constraints}
    assert wide.constraints[0].name == "pipeline bubble"


def test_replicas_that_share_experts_wait_for_each_other() -> None:
    """Replicas that share experts wait for each other in every micro-batch.

    Micro-batches are of one sample: replica 0 runs 10 and 40 tokens, replica 1 runs 30 and 25. Together they take 30 +
    40, apart the longer 55.
    """
    workload = dataclasses.replace(
        equal_samples(4, 20), prompt_tokens=np.full(4, 5), response_tokens=np.array([5, 25, 35, 20])
    )
    for expert, seconds in ((2, 70), (1, 55)):
        found = forecast(
            tiny_job(
                workload,
                2,
                f"parallel.expert={expert}",
                "plan.samples_per_microbatch=1",
                family="mixtral",
                costs=per_token(1),
            )
        )
        assert found.dense.update_s == pytest.approx(seconds + 7, rel=1e-12)


def test_thousands_of_gpus_take_seconds() -> None:
    """A forecast for 4,096 GPUs, 16,384 samples and four mini-batches takes seconds.

    It is planned and put on the clock several times over.
    """
    config = load_config(
        None,
        [
            "model.dtype=bfloat16",
            "parallel.tensor=4",
            "parallel.sequence_parallel=true",
            "parallel.pipeline=8",
            "train.prompts_per_rollout=1024",
            "rollout.samples_per_prompt=16",
            "train.samples_per_mini_batch=4096",
            "rollout.max_response_tokens=4096",
        ],
    )
    degrees = degrees_of(config, 4096)
    hf_config = tiny_config("qwen2_untied", layers=32)
    hf_config.num_key_value_heads = 4
    shape = model_shape(hf_config, config, degrees, layer_spec="torch")
    workload, _ = draw(config, lengths=None, pass_rate=None, prompt_tokens=None, seed=0)
    started = time.perf_counter()
    found = forecast(job_of(config, shape, degrees, workload))
    assert time.perf_counter() - started < patient(300)  # 8 s on a loaded host
    assert found.dense.update_s >= found.skip.update_s > 0 and 1 <= found.gain <= found.ideal * 1.2
