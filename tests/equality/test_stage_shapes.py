"""The shapes that stages take from the plan are those that they would send each other, and nothing else changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from megatron_rl.backend import stage_shapes
from megatron_rl.errors import LockstepError
from tests.equality.rig import equal_by_name, open_rig, ragged_advantages

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # isort: skip

SAMPLES = 11
LAYOUTS = {
    "PP2": (2, "qwen2_tied", ("parallel.pipeline=2",)),
    "PP2-VPP2": (2, "qwen2_tied", ("parallel.pipeline=2", "parallel.virtual_pipeline=2")),
    "PP3": (3, "qwen3", ("parallel.pipeline=3",)),
    "TP2-SP-PP2": (4, "qwen3", ("parallel.tensor=2", "parallel.sequence_parallel=true", "parallel.pipeline=2")),
    "CP2-PP2": (4, "qwen2_untied", ("parallel.context=2", "parallel.pipeline=2")),
    "PP2-DP2": (4, "qwen3_moe", ("parallel.pipeline=2",)),
}


@contextlib.contextmanager
def recorded(answer) -> Iterator[list]:
    """Let ``answer`` give the shapes within the block, and record its answers."""
    given: list = []

    def communicate(self, *arguments):
        given.append(answer(self, *arguments))
        return given[-1]

    before = P2PCommunicator._communicate_shapes
    P2PCommunicator._communicate_shapes = communicate
    try:
        yield given
    finally:
        P2PCommunicator._communicate_shapes = before


def both_ways(rank: int, world: int, family: str, parallel: tuple[str, ...]) -> tuple[list, list, bool, bool]:
    """Return the shapes by the plan and by exchange, and whether gradients and log-probs are the same to the bit."""
    advantages = ragged_advantages(SAMPLES)
    layers = ("plan.max_tokens_per_microbatch=24",)
    with open_rig(family, *parallel, *layers, samples=SAMPLES, unique_lengths=True) as rig:
        plan = rig.plan(advantages, drops=True)
        signal = advantages != 0
        found = []
        for answer in (stage_shapes._from_plan, without_plan):
            with recorded(answer) as shapes:
                gradient = rig.gradient(advantages, plan)
                logprobs = torch.from_numpy(rig.backend.logprobs(rig.batch, signal).flat)
            found.append((shapes, gradient, logprobs))
    (planned, gradient, logprobs), (exchanged, other_gradient, other_logprobs) = found
    return planned, exchanged, equal_by_name(gradient, other_gradient), torch.equal(logprobs, other_logprobs)


def without_plan(communicator, *arguments):
    """Exchange the shapes as Megatron-Core does, and go past the plan's."""
    exchanged = stage_shapes._exchange(communicator, *arguments)
    assert stage_shapes._from_plan(communicator, *arguments) == tuple(exchanged)
    return exchanged


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plans_shapes_are_those_that_stages_would_send(pool, layout):
    world, family, parallel = LAYOUTS[layout]
    for planned, exchanged, same_gradient, same_logprobs in pool.run(world, both_ways, family, parallel, timeout_s=90):
        assert [tuple(map(list, pair)) for pair in planned] == [tuple(map(list, pair)) for pair in exchanged]
        assert len({tuple(shape) for pair in planned for shape in pair}) > 2  # micro-batches differ in size
        assert same_gradient and same_logprobs


def sends_no_shape(rank: int, world: int) -> list[str]:
    """Return the dtypes of all that travels between the stages of a step."""
    sent, batch = [], torch.distributed.batch_isend_irecv
    torch.distributed.batch_isend_irecv = lambda ops: (sent.extend(str(op.tensor.dtype) for op in ops), batch(ops))[1]
    try:
        with open_rig("qwen2_tied", "parallel.pipeline=2", samples=SAMPLES) as rig:
            rig.step(ragged_advantages(SAMPLES), drops=True)
    finally:
        torch.distributed.batch_isend_irecv = batch
    return sorted(set(sent))


def test_nothing_but_hidden_states_and_their_gradients_travels_between_stages(pool):
    assert pool.run(2, sends_no_shape, timeout_s=60) == [["torch.float32"]] * 2


def another_schedule(rank: int, world: int, fewer: int) -> list[str]:
    """Plan for another number of micro-batches than the schedule runs; return each rank's error."""
    planned = stage_shapes.planned
    stage_shapes.planned = lambda topology, count, *rest, **more: planned(topology, count - fewer, *rest, **more)
    try:
        with open_rig("qwen2_tied", "parallel.pipeline=2", "plan.max_tokens_per_microbatch=24", samples=SAMPLES) as rig:
            advantages = ragged_advantages(SAMPLES)
            try:
                rig.accumulate(advantages, rig.plan(advantages, drops=True))
            except LockstepError as error:
                return [str(error)]
    finally:
        stage_shapes.planned = planned
    return []


def test_a_schedule_that_receives_less_than_the_plan_says_is_an_error(pool):
    for rank, (said,) in enumerate(pool.run(2, another_schedule, -1, timeout_s=60)):
        assert f"rank {rank} (" in said and "received 1 tensors less than its plan says" in said
