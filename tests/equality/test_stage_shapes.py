"""The shapes that stages take from the plan are those that they would send each other, and nothing else changes."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_rl.backend import schedule, stage_shapes
from megatron_rl.errors import LockstepError
from tests.equality.rig import equal_by_name, open_rig, ragged_advantages, sizes
from tests.equality.rows import measured
from tests.pairwise import quick

from megatron.core.pipeline_parallel import schedules  # isort: skip
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # isort: skip

SAMPLES = 11
LAYOUTS = (*("PP2 qwen2_tied", "PP2-VPP2 qwen2_tied", "PP3 qwen3"),
           *("TP2-SP-PP2 qwen3", "CP2-PP2 qwen2_untied", "PP2-DP2 qwen3_moe"))


@contextlib.contextmanager
def recorded(answer) -> Iterator[list]:
    """Let ``answer`` give the shapes within the block, and record its answers."""
    given: list = []

    def communicate(self, *arguments):
        given.append(answer(self, *arguments))
        return given[-1]

    with mock.patch.object(P2PCommunicator, "_communicate_shapes", communicate):
        yield given


def both_ways(rank: int, world: int, family: str, parallel: tuple[str, ...]) -> tuple[list, list, bool, bool]:
    """Return the shapes by the plan and by exchange, and whether gradients and log-probs are the same to the bit."""
    advantages = ragged_advantages(SAMPLES)
    layers = ("plan.max_tokens_per_microbatch=24",)
    with open_rig(family, *parallel, *layers, samples=SAMPLES, unique_lengths=True) as rig:
        plan = rig.plan(advantages, drops=True)
        found = []
        for answer in (stage_shapes._from_plan, without_plan):
            with recorded(answer) as shapes:
                gradient = rig.gradient(advantages, plan)
                logprobs = torch.from_numpy(rig.logprobs(advantages != 0))
            found.append((shapes, gradient, logprobs))
    (planned, gradient, logprobs), (exchanged, other_gradient, other_logprobs) = found
    return planned, exchanged, equal_by_name(gradient, other_gradient), torch.equal(logprobs, other_logprobs)


def without_plan(communicator, *arguments):
    """Exchange the shapes as Megatron-Core does, and go past the plan's."""
    exchanged = stage_shapes._exchange(communicator, *arguments)
    assert stage_shapes._from_plan(communicator, *arguments) == tuple(exchanged)
    return exchanged


@pytest.mark.parametrize("layout", quick(LAYOUTS, "PP2-VPP2 qwen2_tied", "PP3 qwen3", "TP2-SP-PP2 qwen3"))
def test_the_plans_shapes_are_those_that_stages_would_send(pool, layout):
    for planned, exchanged, same_gradient, same_logprobs in measured(pool, layout, both_ways):
        assert [tuple(map(list, pair)) for pair in planned] == [tuple(map(list, pair)) for pair in exchanged]
        assert len({tuple(shape) for pair in planned for shape in pair}) > 2  # micro-batches differ in size
        assert same_gradient and same_logprobs


def sends_no_shape(rank: int, world: int) -> list[str]:
    """Return the dtypes of all that travels between the stages of a step."""
    sent, batch = [], torch.distributed.batch_isend_irecv
    noted = mock.patch.object(torch.distributed, "batch_isend_irecv",
                              lambda ops: (sent.extend(str(op.tensor.dtype) for op in ops), batch(ops))[1])
    with noted, open_rig("qwen2_tied", "parallel.pipeline=2", samples=SAMPLES) as rig:
        rig.step(ragged_advantages(SAMPLES), drops=True)
    return sorted(set(sent))


def test_nothing_but_hidden_states_and_their_gradients_travels_between_stages(pool):
    assert pool.run(2, sends_no_shape, timeout_s=60) == [["torch.float32"]] * 2


def another_schedule(rank: int, world: int, fewer: int) -> str:
    """Plan for another number of micro-batches than the schedule runs; return each rank's error."""
    planned = stage_shapes.planned
    another = mock.patch.object(stage_shapes, "planned",
                                lambda t, count, *rest, **more: planned(t, count - fewer, *rest, **more))
    settings = ("parallel.pipeline=2", "plan.max_tokens_per_microbatch=24")
    with another, open_rig("qwen2_tied", *settings, samples=SAMPLES) as rig, pytest.raises(LockstepError) as caught:
        advantages = ragged_advantages(SAMPLES)
        rig.accumulate(advantages, rig.plan(advantages, drops=True))
    return str(caught.value)


def test_a_schedule_that_receives_less_than_the_plan_says_is_an_error(pool):
    for rank, said in enumerate(pool.run(2, another_schedule, -1, timeout_s=60)):
        assert f"rank {rank} (" in said and "received 1 tensors fewer than planned" in said


def tokens_of(tensors: object) -> int | None:
    """Return the T of the first [T, 1, H] tensor."""
    for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
        if tensor is not None and tensor.dim() == 3:
            return tensor.shape[0]
    return None


def laps_on_a_counting_clock(rank: int, world: int, pipeline: int, virtual: int) -> list[tuple[np.ndarray, ...]]:
    now, last, true_backward = [0.0], [0], schedules.backward_step

    def backward(input_tensor, output_tensor, *rest, **named):
        now[0] += 2.0 * (tokens_of(input_tensor) or tokens_of(output_tensor) or last[0])
        return true_backward(input_tensor, output_tensor, *rest, **named)

    def forward(module, arguments, named):
        layout = named["packed_seq_params"]
        last[0] = layout.position_ids.numel()  # without a pipeline each backward follows its forward
        now[0] += last[0]

    fields = (f"parallel.virtual_pipeline={virtual}", "plan.samples_per_microbatch=1", "plan.repack=false")
    counting = mock.patch.object(schedule, "HOST_CLOCK", lambda: now[0])
    stepping = mock.patch.object(schedules, "backward_step", backward)
    fields = (*sizes(1, pipeline), *fields)
    with counting, stepping, open_rig("qwen2_tied", *fields, samples=8, unique_lengths=True) as rig:
        for chunk in rig.backend.chunks:
            chunk.register_forward_pre_hook(forward, with_kwargs=True)
        advantages = np.array([0.5, -0.5] * 4)
        for _ in range(2):  # two schedules before one take
            rig.accumulate(advantages, rig.plan(advantages, drops=True))
        return [(run.forward_s, run.backward_s, run.tokens, run.squares) for run in rig.backend.schedule.take_laps()]


@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (2, 2)], ids=["PP1", "PP2", "PP2-VPP2"])
def test_laps_are_of_their_microbatches(pool, pipeline, virtual):
    for runs in pool.run(2, laps_on_a_counting_clock, pipeline, virtual, timeout_s=60):
        assert len(runs) == 2
        for forward_s, backward_s, tokens, squares in runs:
            assert forward_s.shape == backward_s.shape == (virtual, 4 if pipeline == 1 else 8)
            assert len(set(tokens)) == len(tokens) and np.array_equal(squares, tokens**2)
            assert np.array_equal(forward_s, np.tile(tokens, (virtual, 1)))
            assert np.array_equal(backward_s, np.tile(2 * tokens, (virtual, 1)))
