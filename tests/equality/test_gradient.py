"""The skip run's gradient equals the dense run's and that of a plain loop, at every topology and cut."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch

from megatron_rl.planning.cost import CostModel, StageCost
from tests.equality.layouts import CP, SP, TOLERANCE
from tests.equality.rig import Rig, open_rig, ragged_advantages, sizes
from tests.pairwise import pairwise, quick
from tests.reference import make_samples, near_policy, reference_gradient, relative_error, tiny_model

REDUCTIONS = ("token_sum", "token_mean", "sequence_mean", "sequence_sum_mean", "sequence_sum_norm", "prompt_mean")
NUM_SAMPLES, PER_MINI_BATCH = 11, 4  # divisible neither by each other nor by 2 or 4 data-parallel ranks
CUTS = (
    dict(max_tokens=1),  # every sample alone
    dict(max_tokens=25),
    dict(max_tokens=10_000),
    dict(samples_per_microbatch=1),
    dict(samples_per_microbatch=3),
    dict(max_tokens=25, repack=False),
    dict(samples_per_microbatch=2, repack=False),
    dict(cost=CostModel(stages=(StageCost(overhead=0.0, token=1.0, square=0.0),) * 2)),
    dict(cost=CostModel(stages=(StageCost(overhead=1e6, token=1.0, square=0.1),) * 2)),
)

RECOMPUTE = tuple(f"megatron.transformer.recompute_{x}" for x in ("granularity=full", "method=uniform", "num_layers=1"))
# (tensor, pipeline, data), a family each: tied and untied embeddings, biases, q/k norms, scaled rotary frequencies.
VPP = ("parallel.virtual_pipeline=2",)

SMALL = [
    ((1, 1, 1), "qwen3", ()),
    ((2, 1, 1), "qwen2_tied", SP),
    ((1, 2, 1), "qwen2_tied", ()),
    ((1, 1, 2), "llama3_rope", ()),
    ((1, 1, 2), "llama3_rope", CP),
    ((2, 1, 1), "phi3_partial", SP),
    ((2, 1, 1), "olmo2", ()),
    ((2, 1, 1), "olmo2", SP),
    ((2, 1, 1), "olmo3", SP),
    ((1, 2, 1), "gemma3_text", ()),
    ((2, 1, 1), "gemma3_text", ()),
    ((1, 1, 2), "gemma3_text", CP),
    ((1, 2, 1), "mistral_window", ()),
]
LARGE = [
    ((2, 2, 1), "qwen3", SP),
    ((2, 1, 2), "llama", ()),
    ((1, 2, 2), "qwen2_untied", ()),
    ((1, 1, 4), "qwen2_tied", ()),
    ((1, 4, 1), "qwen2_tied", ()),
    ((1, 2, 1), "qwen3", RECOMPUTE),
    ((1, 2, 1), "olmo3", RECOMPUTE),
    ((1, 2, 1), "qwen2_tied", VPP),
    ((1, 2, 2), "qwen2_untied", VPP),
    ((2, 2, 1), "qwen3", VPP),
]
TOPOLOGIES = SMALL + LARGE


def name(topology: tuple) -> str:
    (tensor, pipeline, data), family, extra = topology
    suffix = {SP: "-SP", CP: "-CP2", RECOMPUTE: "-recompute", VPP: "-VPP2"}.get(extra, "")
    return f"TP{tensor}-PP{pipeline}-DP{data}-{family}{suffix}"


@functools.cache
def wanted(family, layers, reduction, first, last, count) -> tuple[dict[str, torch.Tensor], float]:
    """Return the reference's gradient and loss over samples first..last of ``count``; a worker keeps them."""
    _, model = tiny_model(family, layers=layers)
    advantages = ragged_advantages(count)[first:last]
    groups = [i // 2 for i in range(first, last)]
    samples = near_policy(model, make_samples(count))[first:last]
    return reference_gradient(model, samples, groups, list(advantages), reduction=reduction)


def error_of(rig: Rig, family: str, reduction: str, first: int, last: int, gradient: dict[str, torch.Tensor]) -> float:
    """Return a gradient's relative error on the main rank only: the others' cores are better used elsewhere."""
    return (
        relative_error(
            gradient, wanted(family, rig.model.config.num_hidden_layers, reduction, first, last, len(rig.samples))[0]
        )
        if rig.is_main
        else 0.0
    )


def every_reduction(rank: int, world: int, topology: tuple) -> dict[str, float]:
    """Return the relative error per (reduction, dense or skip), the worst over mini-batches of 4 of 11 samples."""
    (tensor, pipeline, _), family, extra = topology
    count = f"train.samples_per_mini_batch={PER_MINI_BATCH}"
    found: dict[str, float] = {}
    with open_rig(family, *sizes(tensor, pipeline), count, *extra, samples=NUM_SAMPLES) as rig:
        advantages = ragged_advantages(NUM_SAMPLES)
        for drops in (False, True):
            plan = rig.plan(advantages, drops=drops)
            assert sum(len(m.dropped) for m in plan.mini_batches) == (4 if drops else 0)
            for reduction in REDUCTIONS:
                errors = []
                for position, mini_batch in enumerate(plan.mini_batches):
                    gradient = rig.gradient(advantages, plan, position, reduction=reduction)
                    first, last = int(mini_batch.members[0]), int(mini_batch.members[-1]) + 1
                    errors.append(error_of(rig, family, reduction, first, last, gradient))
                found[f"{reduction} {'skip' if drops else 'dense'}"] = max(errors)
    return found


@pytest.mark.parametrize("topology", quick(TOPOLOGIES, *SMALL, LARGE[0], LARGE[5], LARGE[7]), ids=name)
def test_skip_and_dense_equal_reference_for_every_reduction(pool, topology):
    (tensor, pipeline, data), _, _ = topology
    found = pool.run(tensor * pipeline * data, every_reduction, topology, timeout_s=60)[0]
    print(name(topology), f"worst {max(found.values()):.1e}")
    assert max(found.values()) < TOLERANCE, found


def every_cut(rank: int, world: int, topology: tuple) -> dict[str, float]:
    (tensor, pipeline, _), family, extra = topology
    found: dict[str, float] = {}
    with open_rig(family, *sizes(tensor, pipeline), *extra, samples=NUM_SAMPLES) as rig:
        advantages, usual = ragged_advantages(NUM_SAMPLES), rig.backend.rules
        for cut in CUTS:
            rig.backend.rules = dataclasses.replace(usual, **cut)
            for drops in (False, True):
                gradient = rig.gradient(advantages, rig.plan(advantages, drops=drops))
                found[f"{cut} {drops}"] = error_of(rig, family, "token_mean", 0, NUM_SAMPLES, gradient)
    return found


@pytest.mark.parametrize("topology", quick(TOPOLOGIES, *SMALL), ids=name)
def test_every_cut_into_microbatches_gives_the_reference_gradient(pool, topology):
    (tensor, pipeline, data), _, _ = topology
    found = pool.run(tensor * pipeline * data, every_cut, topology, timeout_s=60)[0]
    print(name(topology), f"worst {max(found.values()):.1e}")
    assert max(found.values()) < TOLERANCE, found


def several_calls(rank: int, world: int, topology: tuple, ddp: tuple[str, ...]) -> dict[str, float]:
    """Return the errors of three calls and one reduction; then of optim_step's norm and loss over the same."""
    (tensor, pipeline, _), family, extra = topology
    split = f"train.samples_per_mini_batch={PER_MINI_BATCH}"
    with open_rig(family, *sizes(tensor, pipeline), split, *ddp, *extra, samples=NUM_SAMPLES) as rig:
        advantages, everyone = ragged_advantages(NUM_SAMPLES), np.arange(NUM_SAMPLES)
        found = {}
        for again in range(2):  # once more: what the first step leaves behind must not leak into the second
            plan = rig.plan(advantages, drops=True)
            inputs = rig.inputs(advantages, everyone)
            for position, mini_batch in enumerate(plan.mini_batches):
                rig.backend.forward_backward(rig.batch, mini_batch, inputs, fingerprint=plan.fingerprints()[position])
            found[f"gradient {again}"] = error_of(rig, family, "token_mean", 0, NUM_SAMPLES, rig.backend.gradient())
            rig.backend.zero_grad()
            rig.backend._sums.zero()
        for position, mini_batch in enumerate(plan.mini_batches):
            rig.backend.forward_backward(rig.batch, mini_batch, inputs, fingerprint=plan.fingerprints()[position])
        result = rig.backend.optim_step(mini_batch.kind)
        if rig.is_main:
            gradient, loss = wanted(
                family, rig.model.config.num_hidden_layers, "token_mean", 0, NUM_SAMPLES, NUM_SAMPLES
            )
            norm = float(sum((g.double() ** 2).sum() for g in gradient.values()) ** 0.5)
            found |= {"norm": abs(result.grad_norm / norm - 1), "loss": abs(result.sums["loss"] - loss)}
        return found


OVERLAP = ("megatron.ddp.overlap_grad_reduce=true", "megatron.ddp.bucket_size=1000")


@pytest.mark.parametrize(
    ("topology", "ddp"),
    pairwise(
        [SMALL[3], SMALL[1], LARGE[0], LARGE[2]],
        [OVERLAP, ()],
        strength=1,
        ids=lambda x: name(x) if x and x is not OVERLAP else "overlap" if x else "plain",
    ),
)
def test_several_calls_before_one_step_add(pool, topology, ddp):
    (tensor, pipeline, data), _, _ = topology
    found = pool.run(tensor * pipeline * data, several_calls, topology, ddp, timeout_s=60)[0]
    print(name(topology), {k: f"{v:.1e}" for k, v in found.items()})
    assert max(found.values()) < TOLERANCE, found  # reduced twice, the norm would be 2x


def with_a_sample_without_loss_tokens(rank: int, world: int, pipeline: int) -> dict[str, float]:
    """Return the errors where every sample is alone in its micro-batch and one of them is masked throughout."""
    with open_rig("qwen2_tied", *sizes(1, pipeline)) as rig:
        samples = near_policy(rig.model, make_samples(5))
        samples[2] = dataclasses.replace(samples[2], loss_mask=np.zeros_like(samples[2].loss_mask))
        rig.take(samples)
        rig.rules(max_tokens=1)
        advantages = np.array([0.5, -1.0, 2.0, 0.0, 1.0])
        expected, _ = reference_gradient(rig.model, samples, rig.groups, list(advantages))
        plan = rig.plan(advantages, drops=False, purpose="logprob")
        passed = rig.backend.forward(rig.batch, plan)
        assert passed.sums["tokens"] == sum(s.loss_mask.sum() for s in samples)
        found = {}
        for drops in (False, True):
            plan = rig.plan(advantages, drops=drops)
            assert (2 in plan.mini_batches[0].dropped) is drops
            found["skip" if drops else "dense"] = relative_error(rig.gradient(advantages, plan), expected)
        return found


@pytest.mark.parametrize(("pipeline", "data"), [(1, 1), (2, 2)])
def test_sample_without_loss_tokens_adds_nothing(pool, pipeline, data):
    for found in pool.run(pipeline * data, with_a_sample_without_loss_tokens, pipeline, timeout_s=60):
        assert max(found.values()) < TOLERANCE, found


def bitwise_pairs(rank, world, tensor, pipeline, extra, cut) -> dict[str, object]:
    """Compare the gradients of a skip run that drops whole micro-batches, with nothing repacked, and the dense run."""
    with open_rig("qwen2_tied", *sizes(tensor, pipeline), *extra, samples=12) as rig:
        rig.rules(repack=False, **cut)
        advantages = np.where(np.arange(12) % 4 < 2, 0.0, np.linspace(-1, 1, 12))
        dense, skip = (rig.plan(advantages, drops=drops) for drops in (False, True))
        wants = rig.gradient(advantages, rig.plan(advantages, drops=False))
        finds = rig.gradient(advantages, rig.plan(advantages, drops=True))
        return {
            "dropped": int(skip.mini_batches[0].microbatches_dropped),
            "equal": [torch.equal(finds[k], wants[k]) for k in wants],
            "norm": float(sum(x.double().norm() for x in wants.values())),
            "dense": int(dense.mini_batches[0].num_microbatches.sum()),
        }


@pytest.mark.parametrize(("degrees", "dtype"), pairwise([(1, 1), (2, 1), (2, 2)], ["float32", "bfloat16"], strength=1))
def test_dropped_microbatches_leave_the_dense_gradient_bitwise(pool, degrees, dtype):
    """They add exact zeros in the dense order, so there is no rounding to tolerate."""
    pipeline, data = degrees
    extra = (f"model.dtype={dtype}",)
    for cut in (dict(samples_per_microbatch=2), dict(max_tokens=10)):
        for found in pool.run(pipeline * data, bitwise_pairs, 1, pipeline, extra, cut, timeout_s=60):
            assert found["dropped"] > 0 and found["norm"] > 0, found
            assert all(found["equal"])


def with_pad_tokens(rank: int, world: int) -> dict[str, float]:
    """Return the errors over samples that hold the pad's id; "frozen": that row in transformers."""
    samples = [
        dataclasses.replace(s, token_ids=np.where(s.token_ids % 5 == 0, 0, s.token_ids)) for s in make_samples(6)
    ]
    advantages, name = ragged_advantages(6), "model.embed_tokens.weight"
    with open_rig("qwen2_untied") as rig:
        assert rig.model.config.pad_token_id == 0
        rig.rules(pad_multiple=8)
        rig.take(samples)
        found = rig.gradient(advantages, rig.plan(advantages, drops=True))
        frozen, _ = reference_gradient(rig.model, samples, rig.groups, list(advantages))
        rig.model.get_input_embeddings().padding_idx = None
        expected, _ = reference_gradient(rig.model, samples, rig.groups, list(advantages))
    return {
        "all": relative_error(found, expected),
        "the pad's row": relative_error({name: found[name][0]}, {name: expected[name][0]}),
        "frozen": float(frozen[name][0].abs().max()),
    }


def test_the_pads_id_is_a_token_like_any_other(pool):
    """It trains its embedding, which transformers' ``padding_idx`` leaves out; pads that fill up do not."""
    (found,) = pool.run(1, with_pad_tokens, timeout_s=60)
    assert found["frozen"] == 0.0 and found["all"] < TOLERANCE and found["the pad's row"] < TOLERANCE, found
