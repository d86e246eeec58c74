"""The output weight's gradient, added straight into DDP's main_grad, equals the one that goes through autograd."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from megatron_rl.backend import backend
from megatron_rl.model.logprob import linear as logprob
from tests.equality.layouts import BF16, TOLERANCE
from tests.equality.rig import equal_by_name, open_rig, ragged_advantages
from tests.equality.rows import measured
from tests.pairwise import quick
from tests.reference import relative_error

NUM_SAMPLES = 6
NARROW = (*BF16, "megatron.ddp.grad_reduce_in_fp32=false")
# Through autograd each micro-batch's gradient is rounded to bfloat16, 2^-9 of each number at most; and again where the
# embedding's is added to it.
CLOSE_BFLOAT16 = 2**-8

CASES = (*("one qwen2_untied", "one qwen2_tied", "DP2-overlap qwen2_untied", "DP2-overlap qwen2_tied"),
         *("TP2-SP qwen2_untied", "PP2-overlap qwen2_tied", "TP2 qwen2_tied", "PP2 qwen2_untied"))
CLOSE = {  # a case, settings, tokens of a micro-batch and of a chunk, how close the output weight's gradient is
    "untied": ("one qwen2_untied", (), 1, 3, TOLERANCE),
    "tied-overlap": ("DP2-overlap qwen2_tied", (), 1, 3, TOLERANCE),
    "tied-PP2-overlap": ("PP2-overlap qwen2_tied", (), 1, 3, TOLERANCE),
    "untied-bf16": ("one qwen2_untied", BF16, 25, None, CLOSE_BFLOAT16),
    "tied-bf16": ("one qwen2_tied", BF16, 25, None, CLOSE_BFLOAT16),
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


def both(rank, world, family: str, layout, settings: tuple[str, ...], max_tokens: int, chunk_tokens: int | None):
    """Return (gradients straight, through autograd, which ways were taken) twice, with a step between."""
    found = []
    with open_rig(family, *layout, *settings, samples=NUM_SAMPLES, total_steps=2) as rig:
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


@pytest.mark.parametrize("case", quick(CASES, *CASES[:6]))
def test_straight_into_main_grad_equals_through_autograd(pool, case):
    """Of one micro-batch and one chunk the arithmetic is the same, and so are the bits of every gradient."""
    ranks = measured(pool, case, both, (), 10_000, None)
    assert_ways(ranks, straight=True)
    for first, second, *_ in ranks[0]:
        assert equal_by_name(first, second) and first[output_weight(first)].any()


@pytest.mark.parametrize("name", CLOSE)
def test_micro_batches_and_chunks_add_in_main_grad(pool, name):
    """Several of both are added in another order: that gradient is close, and the others are equal to the bit."""
    case, *given, bound = CLOSE[name]
    ranks = measured(pool, case, both, *given)
    assert_ways(ranks, straight=True)
    for first, second, *_ in ranks[0]:
        output = output_weight(first)
        assert relative_error({"": first.pop(output)}, {"": second.pop(output)}) < bound
        assert equal_by_name(first, second)


def test_a_narrow_main_grad_gets_its_gradient_through_autograd(pool):
    """A main_grad in bfloat16 would round every chunk's sum, so that autograd brings the rounded whole, to the bit."""
    ranks = measured(pool, "one qwen2_untied", both, NARROW, 25, 3)
    assert_ways(ranks, straight=False)
    assert all(equal_by_name(first, second) for first, second, *_ in ranks[0])


def through_hooks(rank: int, world: int) -> bool:
    """Return whether gradients are the same where hooks hand backward other tensors than forward saved."""
    with open_rig("qwen2_untied", samples=NUM_SAMPLES) as rig, watched() as direct:
        advantages = ragged_advantages(NUM_SAMPLES)
        plan = rig.plan(advantages, drops=True)
        wanted = rig.gradient(advantages, plan)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
            found = rig.gradient(advantages, plan)
    return all(direct) and len(direct) > 1 and equal_by_name(found, wanted)


def test_saved_tensors_hooks_do_not_lose_main_grad(pool):
    """Offloading of activations, for one, gives backward copies, which have no main_grad."""
    assert pool.run(1, through_hooks, timeout_s=60) == [True]


def frozen(rank: int, world: int) -> list[bool]:
    with open_rig("qwen2_untied", "lora.rank=2", "lora.alpha=4", samples=NUM_SAMPLES) as rig, watched() as direct:
        rig.step(ragged_advantages(NUM_SAMPLES), drops=True)
    return direct


def test_a_frozen_output_weight_gets_no_gradient(pool):
    assert pool.run(1, frozen, timeout_s=60) == [[]]
