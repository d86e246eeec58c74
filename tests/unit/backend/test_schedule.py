"""Checks the measurements of backend/schedule.py without a world, against loops over sequences, chunks and runs."""

from types import SimpleNamespace

import numpy as np

from megatron_rl.backend.packing import PackedMicroBatch
from megatron_rl.backend.schedule import StageLaps, _Run, measured_sums
from megatron_rl.model.attention.layout import Layout
from megatron_rl.planning.cost import NUM_SUMS


def microbatch(*lengths: int) -> PackedMicroBatch:
    """Make a micro-batch of sequences of these lengths; nothing else of them is read."""
    return PackedMicroBatch(packed=SimpleNamespace(layout=Layout.of(lengths)), positions=np.arange(sum(lengths)),
                            num_sequences=len(lengths), tokens=None)


def test_squares_of_a_micro_batch_equal_a_loop_over_its_sequences() -> None:
    """The squares of a micro-batch are Σ l², not (Σ l)²: attention does not look across sequences."""
    ragged = [(3, 5, 2), (7,), (4, 4)]
    packed = [microbatch(*lengths) for lengths in ragged]
    run = _Run(forwarded=[(0, x) for x in packed], forward=[(0.0, 1.0)] * 3, backward=[(1.0, 3.0)] * 3)
    laps = run.laps(SimpleNamespace(pipeline_rank=0, pipeline_size=1, virtual_size=1), ())
    assert laps.tokens.tolist() == [sum(lengths) for lengths in ragged]
    assert laps.squares.tolist() == [sum(x * x for x in lengths) for lengths in ragged]
    assert laps.forward_s.tolist() == [[1.0] * 3] and laps.backward_s.tolist() == [[2.0] * 3]


def test_sums_of_a_stage_equal_a_loop_over_runs_and_chunks() -> None:
    """A stage's time of a micro-batch is that of all its chunks, forward and backward."""
    random = np.random.default_rng(0)
    runs = [StageLaps(forward_s=random.random((2, count)), backward_s=random.random((2, count)),
                      tokens=random.integers(1, 99, count).astype(float),
                      squares=random.integers(1, 9999, count).astype(float))
            for count in (2, 4)]
    wanted = np.zeros(NUM_SUMS)
    for run in runs:
        for m in range(len(run.tokens)):
            x, seconds = [1.0, run.tokens[m], run.squares[m]], sum(run.forward_s[chunk, m] for chunk in range(2))
            wanted[:6] += [x[i] * x[j] for i in range(3) for j in range(i, 3)]
            wanted[6:9] += [x[i] * seconds for i in range(3)]
            wanted[9:] += [seconds, sum(run.backward_s[chunk, m] for chunk in range(2))]
    np.testing.assert_allclose(measured_sums(runs), wanted, rtol=1e-13)  # sums of six
    assert not measured_sums([]).any()
