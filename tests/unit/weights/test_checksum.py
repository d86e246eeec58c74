"""Checks weights/checksum.py: equal bytes give equal checksums, however they lie in memory.

Anything else gives another checksum.
"""

import pytest
import torch

from megatron_rl.weights import checksum as stage
from megatron_rl.weights.checksum import ROW_BYTES, ROW_WORDS, Checksum, checksum
from tests.unit.weights.digested import DTYPES, MASK, as_bytes, mix, random_bytes, under_flips

# around a word, a row and a slab (of test size), in bytes
LENGTHS = (0, 1, 3, 7, 8, 9, 4095, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 1, 2 * ROW_BYTES, 5 * ROW_BYTES + 13)


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a slab to two rows, so that small tensors have several."""
    monkeypatch.setattr(stage, "SLAB_BYTES", {"cpu": 2 * ROW_BYTES, "cuda": 2 * ROW_BYTES})


def naive_checksum(data: bytes) -> int:
    """Compute the checksum by its docstring, in Python's integers."""
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    columns = [sum(words[c::ROW_WORDS]) for c in range(ROW_WORDS)]
    rows = [sum(words[r : r + ROW_WORDS]) for r in range(0, len(words), ROW_WORDS)]
    return sum(mix(i, value) for i, value in enumerate([*columns, *rows, len(data)], start=1)) & MASK


@pytest.mark.parametrize("length", LENGTHS)
def test_checksum_equals_naive_sum(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the slabs are cut, and however the bytes lie."""
    data = random_bytes(length)
    wanted = naive_checksum(data.numpy().tobytes())
    assert checksum(data) == wanted
    for rows in (1, 4, 64):
        monkeypatch.setattr(stage, "SLAB_BYTES", {"cpu": rows * ROW_BYTES})
        assert checksum(data) == checksum(data.repeat_interleave(2)[::2]) == wanted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksum_of_any_dtype_equals_that_of_its_bytes(dtype: torch.dtype) -> None:
    """Views start at every offset, so that words begin at addresses that are no multiple of eight."""
    data = random_bytes(8 * 40_001)
    typed = (data % 2).bool() if dtype is torch.bool else data.view(dtype)
    for start in range(5):
        part = typed[start : start + 30_001]
        assert checksum(part) == checksum(as_bytes(part.clone()))
    assert checksum(part) == naive_checksum(as_bytes(part).numpy().tobytes())


def test_checksum_of_strided_equals_contiguous() -> None:
    base = random_bytes(4 * 90 * 400 * 3).view(torch.float32)
    strided = {
        "transposed": base.view(90, 1200).t(),
        "three dimensions": base.view(90, 400, 3).permute(2, 0, 1),
        "rows longer than a slab": base[: 2 * 17_001].view(17_001, 2).t(),
        "one such row": base[: 2 * 17_001].view(1, 17_001, 2)[:, :, 0],
        "columns": base.view(90, 1200)[:, 7:901],
        "every third": base[::3],
        "expanded": base[:5].expand(9000, 5),
        "odd rows": base.view(torch.uint8).view(-1, 9)[:, :7],
    }
    for name, tensor in strided.items():
        assert not tensor.is_contiguous(), name
        assert checksum(tensor) == checksum(tensor.contiguous()), name


def test_every_flipped_bit_and_swapped_elements_rows_and_signs_show() -> None:
    data = random_bytes(3 * ROW_BYTES + 11)
    seen = {*under_flips(checksum, data, (0, 7, 8, ROW_BYTES - 1, ROW_BYTES, 2 * ROW_BYTES + 4, len(data) - 1))}
    assert len(seen) == 1 + 7 * 8
    # so do those that differ in the top bit of a word alone, which weights modulo 2⁶⁴ lose
    tensor = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    changed = [tensor, tensor.flip(0), tensor.flip(1), tensor.t(), tensor.roll(1)]
    for a, b in [((0, 0), (0, 1)), ((0, 3), (0, 7)), ((0, 0), (17, 0)), ((2, 5), (33, 801)), ((0, 0), (63, 1023))]:
        swapped, signs = tensor.clone(), tensor.clone()
        swapped[a], swapped[b] = tensor[b], tensor[a]
        signs[a], signs[b] = -tensor[a], -tensor[b]
        changed += [swapped, signs]
    for a, b in ((0, 1), (0, 16), (16, 32), (5, 60)):
        order = torch.arange(64)
        order[a], order[b] = b, a
        changed.append(tensor[order])
    assert len({checksum(x) for x in changed}) == len(changed)


def test_lengths_of_zeros_differ() -> None:
    """Zeros of another length have another checksum.

    Zeros add nothing to a sum, and the last word is filled with them.
    """
    assert len({checksum(torch.zeros(n, dtype=torch.uint8)) for n in LENGTHS}) == len(LENGTHS)
    assert checksum(torch.empty(0, 5)) == checksum(torch.empty(0, dtype=torch.int8)) == naive_checksum(b"")
    assert checksum(torch.tensor(1.5)) == checksum(torch.tensor([1.5])) != checksum(torch.tensor(-1.5))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))


def value_of(*tensors: tuple[str, torch.Tensor]) -> str:
    found = Checksum()
    for name, tensor in tensors:
        found.update(name, tensor)
    assert found.count == len(tensors)
    return found.value()


def test_combined_checksum_sees_order_name_dtype_and_shape() -> None:
    a, b = torch.arange(6.0), torch.arange(6.0) + 1
    changed = [
        value_of(("a", a), ("b", b)),
        value_of(("b", b), ("a", a)),
        value_of(("a", b), ("b", a)),
        value_of(("a", a), ("c", b)),
        value_of(("a", a)),
        value_of(),
        value_of(("a", a.view(2, 3)), ("b", b)),
        value_of(("a", a.view(torch.int32)), ("b", b)),
        value_of(("a", a), ("b", b), ("empty", torch.empty(0))),
    ]
    assert len(set(changed)) == len(changed)
    strided = b.view(2, 3).t().contiguous().t().reshape(6)
    assert changed[0] == value_of(("a", a.clone().requires_grad_()), ("b", strided))
    assert len(changed[0]) == 16 and int(changed[0], 16) >= 0


def test_combined_checksum_outlives_the_memory_and_extends() -> None:
    memory = torch.arange(10.0)
    bucket, total = Checksum(), Checksum()
    bucket.update("a", memory)
    memory.zero_()
    bucket.update("b", memory)
    total.update("first", torch.ones(2))
    total.extend(bucket)
    assert bucket.value() == value_of(("a", torch.arange(10.0)), ("b", torch.zeros(10)))
    assert total.value() == value_of(("first", torch.ones(2)), ("a", torch.arange(10.0)), ("b", torch.zeros(10)))
    assert total.value() == total.value() and total.count == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("length", LENGTHS)
def test_checksum_on_a_gpu_equals_that_on_a_cpu(length: int) -> None:
    data = random_bytes(length)
    assert checksum(data.cuda()) == checksum(data)
    assert value_of(("a", data.cuda()), ("b", data)) == value_of(("a", data), ("b", data))
