"""The output weight's gradient, added straight into DDP's main_grad, equals the one that goes through autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from megatron_rl.backend import backend
from megatron_rl.model import logprob
from tests.equality.layouts import SP, TOLERANCE
from tests.equality.rig import open_rig, ragged_advantages, sizes
from tests.reference import relative_error

NUM_SAMPLES = 6
OVERLAP = ("megatron.ddp.overlap_grad_reduce=true", "megatron.ddp.bucket_size=1000")
BFLOAT16 = ("model.dtype=bfloat16",)
NARROW = (*BFLOAT16, "megatron.ddp.grad_reduce_in_fp32=false")
# Through autograd each micro-batch's gradient is rounded to bfloat16, 2^-9 of each number at most; and again where the
# embedding's is added to it.
CLOSE_BFLOAT16 = 2**-8

# (tensor, pipeline, processes), a family with a tied or an untied output weight, settings
CASES = {
    "untied": ((1, 1, 1), "qwen2_untied", ()),
    "tied": ((1, 1, 1), "qwen2_tied", ()),
    "untied-overlap": ((1, 1, 2), "qwen2_untied", OVERLAP),
    "tied-overlap": ((1, 1, 2), "qwen2_tied", OVERLAP),
    "untied-TP2-SP": ((2, 1, 2), "qwen2_untied", SP),
    "tied-TP2": ((2, 1, 2), "qwen2_tied", ()),
    "tied-PP2-overlap": ((1, 2, 2), "qwen2_tied", OVERLAP),
    "untied-PP2": ((1, 2, 2), "qwen2_untied", ()),
}


@contextlib.contextmanager
def watched(**options: object) -> Iterator[list[bool]]:
    """Give the backend's linear_logprob these options; yield whether each backward added to main_grad itself."""
    direct: list[bool] = []
    weight_sum = logprob._weight_sum

    def watch(weight, precise, parameter):
        found = weight_sum(weight, precise, parameter)
        direct.append(parameter is not None and found is parameter.main_grad)
        return found

    def given(*arguments, **named):
        return logprob.linear_logprob(*arguments, **(named | options))

    with mock.patch.object(logprob, "_weight_sum", watch), mock.patch.object(backend, "linear_logprob", given):
        yield direct


def both(rank: int, world: int, case: tuple, settings: tuple[str, ...], max_tokens: int, chunk_tokens: int | None):
    """Return (gradients straight, through autograd, which ways were taken) twice, with a step between."""
    (tensor, pipeline, _), family, more = case
    found = []
    with open_rig(family, *sizes(tensor, pipeline), *more, *settings, samples=NUM_SAMPLES, total_steps=2) as rig:
        rig.rules(max_tokens=max_tokens)
        advantages = ragged_advantages(NUM_SAMPLES)
        plan = rig.plan(advantages, drops=True)
        for _ in range(2):
            with watched(chunk_tokens=chunk_tokens) as straight:
                first = rig.gradient(advantages, plan)
            with watched(chunk_tokens=chunk_tokens, into_main_grad=False) as through:
                second = rig.gradient(advantages, plan)
            found.append((first, second, straight, through))
            rig.step(advantages, drops=True)
    return found


def output_weight(gradient: dict[str, torch.Tensor]) -> str:
    return "lm_head.weight" if "lm_head.weight" in gradient else "model.embed_tokens.weight"


def assert_ways(ranks: list, *, straight: bool) -> None:
    """Assert that the last stages took the two ways that they were asked to take, and that there were some."""
    for found in zip(*ranks, strict=True):
        ways = [way for _, _, *way in found]
        assert any(first for first, _ in ways)
        assert all(first == [straight] * len(first) and second == [False] * len(first) for first, second in ways)


@pytest.mark.parametrize("case", CASES)
def test_straight_into_main_grad_equals_through_autograd(pool, case):
    """Of one micro-batch and one chunk the arithmetic is the same, and so are the bits of every gradient."""
    ranks = pool.run(CASES[case][0][2], both, CASES[case], (), 10_000, None, timeout_s=60)
    assert_ways(ranks, straight=True)
    for first, second, *_ in ranks[0]:
        assert first.keys() == second.keys() and output_weight(first) in first
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert first[output_weight(first)].any()


@pytest.mark.parametrize("case", ["untied", "tied-overlap", "tied-PP2-overlap"])
def test_micro_batches_and_chunks_add_in_main_grad(pool, case):
    """Several of both are added in another order: that gradient is close, and the others are equal to the bit."""
    ranks = pool.run(CASES[case][0][2], both, CASES[case], (), 1, 3, timeout_s=60)
    assert_ways(ranks, straight=True)
    for first, second, *_ in ranks[0]:
        name = output_weight(first)
        assert relative_error({name: first[name]}, {name: second[name]}) < TOLERANCE
        assert all(torch.equal(first[other], second[other]) for other in first if other != name)


@pytest.mark.parametrize("case", ["untied", "tied"])
def test_main_grad_of_bfloat16_weights_is_close(pool, case):
    ranks = pool.run(1, both, CASES[case], BFLOAT16, 25, None, timeout_s=60)
    assert_ways(ranks, straight=True)
    for first, second, *_ in ranks[0]:
        name = output_weight(first)
        assert relative_error({name: first[name]}, {name: second[name]}) < CLOSE_BFLOAT16
        assert all(torch.equal(first[other], second[other]) for other in first if other != name)


def test_a_narrow_main_grad_gets_its_gradient_through_autograd(pool):
    """A main_grad in bfloat16 would round every chunk's sum, so that autograd brings the rounded whole, to the bit."""
    ranks = pool.run(1, both, CASES["untied"], NARROW, 25, 3, timeout_s=60)
    assert_ways(ranks, straight=False)
    for first, second, *_ in ranks[0]:
        assert all(torch.equal(first[name], second[name]) for name in first)


def through_hooks(rank: int, world: int) -> bool:
    """Return whether gradients are the same where hooks hand backward other tensors than forward saved."""
    with open_rig("qwen2_untied", samples=NUM_SAMPLES) as rig, watched() as direct:
        advantages = ragged_advantages(NUM_SAMPLES)
        plan = rig.plan(advantages, drops=True)
        wanted = rig.gradient(advantages, plan)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
            found = rig.gradient(advantages, plan)
    return all(direct) and len(direct) > 1 and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_saved_tensors_hooks_do_not_lose_main_grad(pool):
    """Offloading of activations, for one, gives backward copies, which have no main_grad."""
    assert pool.run(1, through_hooks, timeout_s=60) == [True]


def frozen(rank: int, world: int) -> list[bool]:
    with open_rig("qwen2_untied", "lora.rank=2", "lora.alpha=4", samples=NUM_SAMPLES) as rig, watched() as direct:
        rig.step(ragged_advantages(NUM_SAMPLES), drops=True)
    return direct


def test_a_frozen_output_weight_gets_no_gradient(pool):
    assert pool.run(1, frozen, timeout_s=60) == [[]]
