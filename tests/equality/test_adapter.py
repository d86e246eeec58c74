"""Adapters on every topology equal a plain loop over a Hugging Face model that has them: gradient, steps and export."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.critic import Critic
from megatron_rl.distributed import topology
from megatron_rl.errors import ConfigError
from megatron_rl.model.adapter import adapters_of as own_adapters
from megatron_rl.model.adapter import adapters_off
from megatron_rl.types import StepKind
from megatron_rl.weights.fused import file_tensors
from tests.allocated import AllocationMeter
from tests.equality.adapter_measures import gradients, merged_apart, three_steps
from tests.equality.adapter_rig import ATTENTION, LORA, NUM_SAMPLES, STEPS, TOPOLOGIES, open_adapted, overrides_of
from tests.equality.matrix import EP2, GATHER, PP2, SP, TP2, VPP2
from tests.equality.rig import DEFAULTS, equal, equal_by_name, open_rig, ragged_advantages
from tests.equality.shared_samples import SHARED
from tests.pairwise import quick
from tests.reference import file_weights, make_samples, near_policy, reference_gradient, relative_error, tiny_model

# Float32 and another order of summation: seen up to 9e-7. A gradient that lacks a rank's part shows at 1e-1.
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    "name",
    quick(
        TOPOLOGIES,
        *(
            x
            for x in TOPOLOGIES
            if x not in ("TP2-SP-PP2-VPP2", "PP2-DP2", "TP2-SP-CP2", "TP2-PP2", "experts-TP2-SP-EP2")
        ),
    ),
)
def test_skip_and_dense_gradients_of_adapters_equal_reference(pool, name):
    world, family, parallel, extra = TOPOLOGIES[name]
    found = pool.run(world, gradients, family, parallel, extra, timeout_s=90)
    print(name, found)
    assert all(max(x.values()) < TOLERANCE for x in found), found


@pytest.mark.parametrize("name", ["TP2-SP", "experts", "experts-EP2", "experts-TP2-SP", "experts-PP2"])
def test_adapters_beside_weights_equal_merged_ones(pool, name):
    world, family, parallel, extra = TOPOLOGIES[name]
    found = pool.run(world, merged_apart, family, parallel, extra, timeout_s=90)
    print(name, found)
    assert max(found) < TOLERANCE, found


def without_tokens(rank: int, world: int) -> dict[str, object]:
    """Return how many experts one short sample leaves without a token, and what its gradient is for their adapters."""
    with open_adapted("glm4_moe", ("expert=2",), samples=0) as rig:
        rig.take(near_policy(rig.model, make_samples(2)[:1] * 2))
        reference_gradient(rig.model, rig.samples, rig.groups, [1.0, 1.0])
        named = {name: p.grad for name, p in rig.model.named_parameters() if ".lora_" in name}
        want = file_tensors(named, rig.model.config.model_type)
        advantages = np.ones(2)
        gradient = rig.gradient(advantages, rig.plan(advantages, drops=True))
        idle = [name for name, x in want.items() if ".experts." in name and not x.any()]
        return {
            "idle": len(idle),
            "zero": not any(gradient[name].any() for name in idle),
            "error": relative_error(gradient, want),
        }


def test_an_expert_without_tokens_has_a_gradient_of_zero(pool):
    for found in pool.run(2, without_tokens, timeout_s=60):
        assert found["idle"] and found["zero"] and found["error"] < TOLERANCE, found


@pytest.mark.parametrize("name", ["1 process", "TP2-SP", "PP2-tied", "CP2", "DP2"])
def test_gradients_of_adapters_over_shared_prompts_equal_reference(pool, name):
    world, family, parallel, extra = TOPOLOGIES[name]
    found = pool.run(world, gradients, family, parallel, (*extra, SHARED), timeout_s=90)
    print(name, found)
    assert all(max(x.values()) < TOLERANCE for x in found), found


SHARDED = {
    "DP2-sharded-overlaps": (2, "llama3_rope", (), (*GATHER, "optimizer.distributed=true")),
    "PP2-DP2-sharded-overlaps": (4, "qwen2_tied", (PP2,), (*GATHER, "optimizer.distributed=true")),
    "EP2-DP2-sharded": (4, "qwen3_moe", (EP2,), (ATTENTION, "optimizer.distributed=true")),
    "experts-EP2-sharded-overlaps": (2, "qwen3_moe", (EP2,), (*GATHER, "optimizer.distributed=true")),
    "experts-EP2-DP2-sharded": (4, "qwen3_moe", (EP2,), ("optimizer.distributed=true",)),
}


LARGE = (
    "TP2-PP2",
    "PP2-DP2",
    "TP2-SP-CP2",
    "TP2-SP-EP2",
    "PP2-recomputed",
    "EP2-DP2-sharded",
    "experts-EP2-DP2-sharded",
)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.long] if x in LARGE else []) for x in (*TOPOLOGIES, *SHARDED)]
)
def test_three_adamw_steps_of_adapters_equal_torchs(pool, name):
    """The movement's bound is wider, as AdamW amplifies the summation order where a gradient is near zero."""
    world, family, parallel, extra = {**TOPOLOGIES, **SHARDED}[name]
    found = pool.run(world, three_steps, family, parallel, extra, timeout_s=120)
    print(name, found[0])
    for each in found:
        assert each["norm"] < 1e-6 and each["moved"] < 1e-3 and each["export"] < TOLERANCE, found
        assert each["frozen"] and each["trained"] and each["replicas"], found


def ghosts(rank: int, world: int, family: str, parallel: tuple[str, ...], extra: tuple[str, ...]) -> dict[str, bool]:
    """Compare a step and a ghost with a step and an all-zero gradient; both then take a further step."""
    advantages, ended = ragged_advantages(NUM_SAMPLES), []
    for ghost in (True, False):
        with open_adapted(family, parallel, (*STEPS[1:], *extra)) as rig:
            rig.step(advantages, drops=True)
            if ghost:
                rig.ghost()
            else:
                plan = rig.plan(advantages, drops=False)
                rig.accumulate(np.zeros(NUM_SAMPLES), plan)
                rig.backend.optim_step(StepKind.REAL)
            between = (list(rig.weights().values()), rig.optimizer_state())
            rig.step(advantages, drops=True)
            ended.append((*between, list(rig.weights().values()), rig.optimizer_state()))
    names = ("weights", "state", "later weights", "later state")
    return {name: equal(one, two) for name, one, two in zip(names, *ended, strict=True)}


@pytest.mark.parametrize(
    "name",
    quick(
        ["DP2", "TP2-SP", "PP2-DP2", "PP2-DP2-sharded-overlaps", "experts-EP2"],
        "TP2-SP",
        "experts-EP2",
        "PP2-DP2-sharded-overlaps",
    ),
)
def test_ghost_step_of_adapters_equals_zero_gradient_step(pool, name):
    world, family, parallel, extra = {**TOPOLOGIES, **SHARDED}[name]
    for found in pool.run(world, ghosts, family, parallel, extra, timeout_s=90):
        assert all(found.values()), found


def silent(rank: int, world: int, family: str, parallel: tuple[str, ...], extra: tuple[str, ...]) -> float:
    """Return the error of the skip run's merged weights after two steps in which one sample of eleven has signal."""
    advantages, ended = np.zeros(NUM_SAMPLES), []
    advantages[5] = 0.7
    for drops in (True, False):
        with open_adapted(family, parallel, (*STEPS[1:], *extra)) as rig:
            plan = rig.plan(advantages, drops=drops)
            assert bool(plan.mini_batches[0].silent_ranks) == drops
            for _ in range(2):
                rig.step(advantages, drops=drops)
            ended.append(rig.weights())
    return relative_error(*ended)


@pytest.mark.parametrize(
    "name",
    quick(["DP2", "PP2-DP2", "DP2-sharded-overlaps", "PP2-DP2-sharded-overlaps"], "DP2", "PP2-DP2-sharded-overlaps"),
)
def test_a_silent_rank_joins_the_reduction_of_adapters(pool, name):
    world, family, parallel, extra = {**TOPOLOGIES, **SHARDED}[name]
    found = pool.run(world, silent, family, parallel, extra, timeout_s=90)
    print(name, found)
    assert max(found) < TOLERANCE, found


def untrained(rank: int, world: int, parallel: tuple[str, ...]) -> dict[str, torch.Tensor]:
    with open_rig("qwen3", *overrides_of(parallel, ()), layers=4) as rig:
        return {name: x.clone() for name, x in rig.backend.export_adapters()}


def test_every_layout_starts_with_the_same_adapters(pool):
    """Every layout starts with the same adapters to the bit, and another run.seed with others."""
    first = pool.run(1, untrained, (), timeout_s=60)[0]
    for world, parallel in ((2, (TP2,)), (2, (TP2, SP)), (2, (PP2, VPP2)), (4, (TP2, PP2))):
        for found in pool.run(world, untrained, parallel, timeout_s=60):
            assert equal_by_name(found, first), parallel
    assert all(x.any() == (".lora_A." in name) for name, x in first.items())
    columns = [x for name, x in first.items() if ".lora_A." in name]
    assert len({x.flatten()[0].item() for x in columns}) == len(columns), "no two are drawn alike"


def off_and_on(rank, world, family, parallel, extra) -> dict[str, bool]:
    """Compare adapters that are off, or untrained with B = 0, with the model without any, and on again with before."""
    everyone = np.ones(NUM_SAMPLES, dtype=bool)
    with open_adapted(family, parallel, extra) as rig:
        samples, backend = rig.samples, rig.backend
        before = backend.logprobs(rig.batch, everyone).flat
        backend.schedule.gather_parameters()
        with adapters_off(backend.chunks):
            inside = backend.logprobs(rig.batch, everyone).flat
        after = backend.logprobs(rig.batch, everyone).flat
        rig.step(ragged_advantages(NUM_SAMPLES), drops=True)
        results = rig.step(ragged_advantages(NUM_SAMPLES), drops=True)
    with open_rig(family, *overrides_of(parallel, extra)) as rig:
        rig.take(samples)
        untrained = rig.backend.logprobs(rig.batch, everyone).flat
    with open_rig(family, *(f"parallel.{x}" for x in parallel), *extra) as rig:
        rig.take(samples)
        base = rig.backend.logprobs(rig.batch, everyone).flat
        with pytest.raises(ValueError, match="set lora.rank"), adapters_off(rig.backend.chunks):
            pass
    return {
        "off is the model without": np.array_equal(inside, base),
        "untrained is the model without": np.array_equal(untrained, base),
        "on again": np.array_equal(after, before),
        "they differ": float(np.abs(before - base).max()) > 0.01,
        "training goes on": results[0].applied and results[0].grad_norm > 0,
    }


@pytest.mark.parametrize("name", ["1 process", "TP2-SP", "PP2-VPP2", "DP2-sharded-overlaps", "experts-EP2"])
def test_adapters_off_is_the_frozen_model_to_the_bit(pool, name):
    world, family, parallel, extra = {**TOPOLOGIES, **SHARDED}[name]
    for found in pool.run(world, off_and_on, family, parallel, extra, timeout_s=90):
        assert all(found.values()), found


def memory_of_export(rank: int, world: int, parallel: tuple[str, ...]) -> dict[int, int]:
    """Return, by bucket_bytes, the most bytes that an export takes beside the model."""
    found = {}
    with open_adapted("qwen2_untied", parallel, samples=0) as rig:
        for bucket_bytes in (1, 200_000):
            meter, tensors = AllocationMeter(), rig.backend.export(bucket_bytes=bucket_bytes)
            while True:
                with meter:
                    if next(tensors, None) is None:
                        break
            found[bucket_bytes] = meter.peak_bytes
    return found


@pytest.mark.parametrize("parallel", [(), (TP2,), (PP2,)], ids=["1 process", "TP2", "PP2"])
def test_merging_takes_a_parameter_beside_the_bucket(pool, parallel):
    """linear_fc1, [192, 64] in float32, with its result, two blocks, and the whole tensor where one is made of it."""
    for found in pool.run(2 if parallel else 1, memory_of_export, parallel, timeout_s=60):
        print(parallel, found)
        one = 192 * 64 * 4
        assert found[200_000] <= 200_000 + 3 * one and found[1] <= 5 * one, found


class NoTokenizer:
    def save_pretrained(self, path: pathlib.Path) -> None: ...


def written(rank: int, world: int, folder: str) -> list[str]:
    """Return what an export of GLM-4.5 with adapters writes, and of Qwen3's mixture, and a refusal's words."""
    with open_rig("glm4_moe", *LORA) as rig:
        rig.backend.save_hugging_face(pathlib.Path(folder) / "hf", NoTokenizer())
        with pytest.raises(ConfigError) as caught:
            rig.backend.save_adapters(pathlib.Path(folder) / "adapter")
    with open_rig("qwen3_moe", *LORA) as rig:
        rig.backend.save_hugging_face(pathlib.Path(folder) / "other", NoTokenizer())
    return [*sorted(x.name for x in pathlib.Path(folder).iterdir()), str(caught.value)]


def test_adapters_that_peft_would_leave_out_are_not_written(pool, tmp_path):
    (found,) = pool.run(1, written, str(tmp_path), timeout_s=60)
    assert found[:-1] == ["hf", "other", "other_adapter"]
    assert "gate_proj of glm4_moe" in found[-1] and "hf, or set lora.targets" in found[-1]


def offloaded(rank: int, world: int, extra: tuple[str, ...]) -> bool:
    """Return whether offload and restore between two steps leave the bits of a run without them."""
    ended = []
    for moves in (False, True):
        with open_adapted("qwen2_tied", (), (*STEPS[1:], *extra)) as rig:
            rig.step(ragged_advantages(NUM_SAMPLES), drops=True)
            if moves:
                assert rig.backend.offload().total > 0
                rig.weights()
                rig.backend.restore()
            rig.step(ragged_advantages(NUM_SAMPLES), drops=True)
            ended.append([*rig.weights().values(), *rig.optimizer_state()])
    return equal(*ended)


@pytest.mark.parametrize("sharded", ["true", "false"])
def test_offload_and_restore_leave_adapters_as_they_were(pool, sharded):
    assert all(pool.run(2, offloaded, (f"optimizer.distributed={sharded}", "model.dtype=bfloat16"), timeout_s=60))


def critic_without(rank: int, world: int) -> bool:
    """Return whether a value model under a configuration with adapters has none and trains every weight."""
    hf_config, model = tiny_model("qwen2_untied")
    config = load_config(None, [*DEFAULTS, *LORA, "advantage.estimator=gae"])
    critic = Critic(config, hf_config=hf_config, weights=file_weights(model), alone=True)
    try:
        return not own_adapters(critic.chunks) and all(p.requires_grad for p in critic.parameters())
    finally:
        critic.close()
        topology.destroy()


def test_a_critic_has_no_adapters(pool):
    assert pool.run(1, critic_without, timeout_s=60) == [True]
