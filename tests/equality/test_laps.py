"""Each lap of a schedule belongs to its micro-batch and chunk: the test's clock moves by T in a step of T tokens."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.backend import schedule
from tests.equality.rig import open_rig, sizes


def tokens_of(tensors: object) -> int | None:
    """Return the T of the first [T, 1, H] tensor."""
    for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
        if tensor is not None and tensor.dim() == 3:
            return tensor.shape[0]
    return None


def laps_on_a_counting_clock(rank: int, world: int, pipeline: int, virtual: int) -> list[tuple[np.ndarray, ...]]:
    now, last, true_backward, true_clock = [0.0], [0], schedule._true_backward_step, schedule.HOST_CLOCK

    def backward(input_tensor, output_tensor, *rest, **named):
        now[0] += 2.0 * (tokens_of(input_tensor) or tokens_of(output_tensor) or last[0])
        return true_backward(input_tensor, output_tensor, *rest, **named)

    def forward(module, arguments, named):
        last[0] = named[
            "packed_seq_params"
        ].position_ids.numel()  # without a pipeline each backward follows its forward
        now[0] += last[0]

    fields = (f"parallel.virtual_pipeline={virtual}", "plan.samples_per_microbatch=1", "plan.repack=false")
    schedule._true_backward_step, schedule.HOST_CLOCK = backward, lambda: now[0]
    try:
        with open_rig("qwen2_tied", *sizes(1, pipeline), *fields, samples=8, unique_lengths=True) as rig:
            for chunk in rig.backend.chunks:
                chunk.register_forward_pre_hook(forward, with_kwargs=True)
            advantages = np.array([0.5, -0.5] * 4)
            for _ in range(2):  # two schedules before one take
                rig.accumulate(advantages, rig.plan(advantages, drops=True))
            return [
                (run.forward_s, run.backward_s, run.tokens, run.squares) for run in rig.backend.schedule.take_laps()
            ]
    finally:
        schedule._true_backward_step, schedule.HOST_CLOCK = true_backward, true_clock


@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (2, 2)], ids=["PP1", "PP2", "PP2-VPP2"])
def test_laps_are_of_their_microbatches(pool, pipeline, virtual):
    for runs in pool.run(2, laps_on_a_counting_clock, pipeline, virtual, timeout_s=60):
        assert len(runs) == 2
        for forward_s, backward_s, tokens, squares in runs:
            assert forward_s.shape == backward_s.shape == (virtual, 4 if pipeline == 1 else 8)
            assert len(set(tokens)) == len(tokens) and np.array_equal(squares, tokens**2)
            assert np.array_equal(forward_s, np.tile(tokens, (virtual, 1)))
            assert np.array_equal(backward_s, np.tile(2 * tokens, (virtual, 1)))
