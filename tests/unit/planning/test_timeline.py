"""planning/timeline.py: its invariants under Hypothesis, a reference, and Megatron-Core's own tables.

The reference is an independent search for the longest path.
"""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.planning.timeline import Timeline, rank_order, schedule_table, simulate, warmup_forwards

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@st.composite
def layouts(draw) -> tuple[int, int, int]:
    """Draw (pipeline, virtual, micro-batches) that Megatron-Core accepts."""
    pipeline = draw(st.integers(1, 5))
    virtual = draw(st.integers(1, 3)) if pipeline > 1 else 1
    microbatches = draw(st.integers(1, 4)) * pipeline if virtual > 1 else draw(st.integers(0, 9))
    return pipeline, virtual, microbatches


def seconds(layout: tuple[int, int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    pipeline, virtual, microbatches = layout
    random = np.random.default_rng(seed)
    return tuple(random.uniform(0.1, most, (pipeline * virtual, microbatches)) for most in (3.0, 5.0))


def assert_invariants(timeline: Timeline, forward_s: np.ndarray, backward_s: np.ndarray, transfer_s: float) -> None:
    stages, microbatches = forward_s.shape
    pipeline = timeline.pipeline
    # 1: every operation runs, for its seconds
    np.testing.assert_allclose(timeline.forward_end - timeline.forward_start, forward_s, rtol=1e-9)
    np.testing.assert_allclose(timeline.backward_end - timeline.backward_start, backward_s, rtol=1e-9)
    if microbatches == 0:
        assert timeline.makespan == 0.0 and not timeline.bubble_share.any()
        return
    # 3: the stage before, the stage after, the own forward
    slack = 1e-9
    assert (timeline.forward_start[1:] >= timeline.forward_end[:-1] + transfer_s - slack).all()
    assert (timeline.backward_start[:-1] >= timeline.backward_end[1:] + transfer_s - slack).all()
    assert (timeline.backward_start >= timeline.forward_end - slack).all()
    for rank in range(pipeline):
        order = rank_order(rank, pipeline, stages // pipeline, microbatches)
        assert len(set(order)) == len(order) == 2 * microbatches * (stages // pipeline)  # 1
        starts = [(timeline.backward_start if back else timeline.forward_start)[s, m] for s, m, back in order]
        ends = [(timeline.backward_end if back else timeline.forward_end)[s, m] for s, m, back in order]
        # 2: one after the other, in order
        assert all(start >= end for start, end in zip(starts[1:], ends, strict=False))
        for (s, m, back), start, before in zip(order, starts, [0.0, *ends], strict=False):  # 4
            waits = [before]
            if back and s + 1 < stages:
                waits.append(timeline.backward_end[s + 1, m] + transfer_s)
            if not back and s > 0:
                waits.append(timeline.forward_end[s - 1, m] + transfer_s)
            assert start in (*waits, timeline.forward_end[s, m] if back else 0.0)


@SETTINGS
@given(layouts(), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.25]))
def test_any_times_keep_the_invariants_and_the_makespan_is_the_longest_path(layout, seed, transfer_s) -> None:
    forward_s, backward_s = seconds(layout, seed)
    timeline = simulate(forward_s, backward_s, pipeline=layout[0], transfer_s=transfer_s)
    assert_invariants(timeline, forward_s, backward_s, transfer_s)
    if transfer_s == 0.0:
        assert timeline.makespan == reference_makespan(forward_s, backward_s, layout[0])


@SETTINGS
@given(layouts(), st.integers(1, 5), st.integers(1, 9))
def test_equal_times_take_what_the_paper_says(layout, forward, backward) -> None:
    """Equal times in whole numbers take exactly what the paper says (invariant 5)."""
    pipeline, virtual, microbatches = layout
    shape = (pipeline * virtual, microbatches)
    timeline = simulate(np.full(shape, float(forward)), np.full(shape, float(backward)), pipeline=pipeline)
    slots = microbatches * virtual + pipeline - 1 if microbatches else 0
    assert timeline.makespan == slots * (forward + backward)  # 5
    if microbatches:
        np.testing.assert_allclose(timeline.bubble_share, (pipeline - 1) / slots, rtol=1e-12, atol=1e-12)


def reference_makespan(forward_s: np.ndarray, backward_s: np.ndarray, pipeline: int) -> float:
    """Return the longest path through a graph written down from the schedule's words, without the module's loop."""
    stages, microbatches = forward_s.shape
    virtual = stages // pipeline
    before: dict[tuple, tuple] = {}
    for rank in range(pipeline):
        table, rest = [], list(range(microbatches))
        while rest:
            table += [(chunk, m) for chunk in range(virtual) for m in rest[:pipeline]]
            rest = rest[pipeline:]
        if virtual == 1:
            table = [(0, m) for m in range(microbatches)]
        ups = [("F", chunk * pipeline + rank, m) for chunk, m in table]
        downs = [("B", (virtual - 1 - chunk) * pipeline + rank, m) for chunk, m in table]
        later = pipeline - 1 - rank
        warm = min(len(ups), later if virtual == 1 else 2 * later + (virtual - 1) * pipeline)
        line = ups[:warm]
        for k in range(len(ups) - warm):
            line += [ups[warm + k], downs[k]]
        line += downs[len(ups) - warm :]
        before |= dict(zip(line[1:], line, strict=False))

    @functools.cache
    def end(kind: str, stage: int, m: int) -> float:
        waits = [before[kind, stage, m]] if (kind, stage, m) in before else []
        if kind == "F" and stage:
            waits.append(("F", stage - 1, m))
        if kind == "B":
            waits += [("F", stage, m)] + ([("B", stage + 1, m)] if stage + 1 < stages else [])
        return max((end(*x) for x in waits), default=0.0) + (forward_s if kind == "F" else backward_s)[stage, m]

    return max((end("B", s, m) for s in range(stages) for m in range(microbatches)), default=0.0)


def test_tables_are_megatrons() -> None:
    """schedule_table and warmup_forwards equal the installed Megatron-Core's own functions."""

    import megatron_rl.distributed.platform  # noqa: F401 (presents the host before Megatron-Core is imported)

    from megatron.core.pipeline_parallel import schedules  # isort: skip

    class Communicator:
        def __init__(self, rank: int, size: int, virtual: int | None) -> None:
            self.pp_group, self.virtual_pipeline_model_parallel_size = self, virtual
            self.size, self.rank = (lambda: size), (lambda: rank)

    for pipeline, virtual, microbatches in [(2, 1, 5), (4, 1, 2), (2, 2, 4), (4, 3, 8), (3, 2, 12)]:
        sizes = microbatches, virtual, pipeline
        assert schedule_table(*sizes) == schedules.get_schedule_table(*sizes)
        for rank in range(pipeline):
            place = Communicator(rank, pipeline, virtual if virtual > 1 else None)
            total, _, warm, rest = schedules.get_pp_rank_microbatches(*sizes, p2p_communicator=place)
            assert warmup_forwards(rank, pipeline, virtual, microbatches, pipeline) == warm
            assert total == warm + rest == microbatches * virtual


def test_what_megatron_refuses_is_refused() -> None:
    ones = np.ones((4, 3))
    with pytest.raises(ValueError, match="3 micro-batches leave 1 after groups of 2"):
        simulate(ones, ones, pipeline=2)
    with pytest.raises(ValueError, match="1 micro-batches in groups of 2 over 2 pipeline ranks"):
        simulate(ones[:, :1], ones[:, :1], pipeline=2)
    with pytest.raises(ValueError, match="multiple of pipeline=3"):
        simulate(ones, ones, pipeline=3)
