"""Masters spread over the intervals of their bfloat16 weights round to them, and move them in the mean."""

import numpy as np
import pytest
import torch

from megatron_rl.weights.reader import MemoryReader
from megatron_rl.weights.spread import SpreadReader, draw, spread_out


def finite_bfloat16() -> torch.Tensor:
    """Return every finite bfloat16 number."""
    everything = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return everything[everything.isfinite()]


@pytest.mark.parametrize("drawn", [-32768, -32767, -1, 0, 1, 32767])
def test_every_number_is_rounded_back_to_the_bit(drawn):
    values = finite_bfloat16()
    spread = spread_out(values, torch.full(values.shape, drawn, dtype=torch.int32))
    assert torch.equal(spread.bfloat16().view(torch.int16), values.view(torch.int16))
    assert torch.equal(spread != values.float(), (values != 0) & (drawn not in (0, -32768)))


@pytest.mark.parametrize("size", [(7,), (33, 5), (4, 6, 3), (1, 40), (300, 2)])
@pytest.mark.parametrize("piece", [1, 10, 1 << 22])
def test_a_slice_is_that_of_the_whole(monkeypatch, size, piece):
    monkeypatch.setattr("megatron_rl.weights.spread.PIECE", piece)
    reader = SpreadReader(MemoryReader({"w": torch.randn(size).bfloat16()}), seed=3)
    whole = reader.read("w", 0, 0, size[0])
    assert whole.dtype == torch.float32 and whole.shape == size == reader.size("w") and reader.has("w")
    for dimension in range(min(len(size), 2)):
        for start, stop in ((0, 1), (size[dimension] // 2, size[dimension]), (size[dimension], size[dimension])):
            wanted = whole.narrow(dimension, start, stop - start)
            assert torch.equal(reader.read("w", dimension, start, stop), wanted)


def test_the_numbers_are_those_of_one_sequence():
    whole = draw(5, 0, 1000)
    for first, count in ((0, 1), (15, 2), (16, 16), (17, 900), (999, 1), (3, 0)):
        assert torch.equal(draw(5, first, count), whole[first : first + count])
    raw = np.random.Philox(key=5).random_raw(250).view(np.int16)  # numpy's own, from its first number on
    assert np.array_equal(whole.numpy(), raw)


def test_tensors_and_seeds_differ_and_wider_files_stay():
    given = torch.full((4, 64), 0.1)
    tensors = MemoryReader({"a": given.bfloat16(), "b": given.bfloat16(), "wide": given, "half": given.half()})
    read = {i: {name: SpreadReader(tensors, i).read(name, 0, 0, 4) for name in tensors.tensors} for i in (0, 1)}
    assert not torch.equal(read[0]["a"], read[0]["b"]) and not torch.equal(read[0]["a"], read[1]["a"])
    for name in ("wide", "half"):
        assert torch.equal(read[0][name], tensors.tensors[name]) and read[0][name].dtype == tensors.tensors[name].dtype


@pytest.mark.parametrize("share", [1 / 4, 1 / 64, 1 / 1024])
def test_small_steps_move_the_rounded_weights_by_their_size_in_the_mean(share):
    """A step of a share of the interval; masters in the middle of it would move no weight."""
    values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    values = values[values.view(torch.int16) & 127 != 0]  # below a power of two the interval is half as wide
    width = 2.0 ** (torch.frexp(values.float()).exponent - 8)
    masters = SpreadReader(MemoryReader({"w": values}), seed=0).read("w", 0, 0, len(values))
    moved = ((masters + share * width).bfloat16().float() - values.float()) / width
    unspread = ((values.float() + share * width).bfloat16().float() - values.float()) / width
    error = float(moved.std()) / len(values) ** 0.5
    assert abs(float(moved.mean()) - share) < 5 * error and error < share / 10
    assert not unspread.any()
