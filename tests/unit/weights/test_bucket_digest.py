"""Checks weights/bucket_digest.py: equal buckets have equal digests, and whatever changed or moved shows."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_rl.rollout.weight_sync.double_buffer import BucketBuffer
from megatron_rl.rollout.weight_sync.transport import view_of
from megatron_rl.weights import bucket_digest as stage
from megatron_rl.weights.bucket_digest import (
    NUM_PARTS,
    ROW_BYTES,
    ROW_WORDS,
    bucket_checksum,
    factors_on,
    part_bounds,
    part_digests,
    parts_of,
)
from megatron_rl.weights.checksum import checksum
from tests.patience import patient
from tests.unit.weights.digested import DTYPES, MASK, as_bytes, mix, random_bytes, under_flips

CPU = torch.device("cpu")
# around a word, a row and a slab (of test size), in bytes
LENGTHS = (0, 1, 3, 4, 5, 4095, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 1, 2 * ROW_BYTES, 5 * ROW_BYTES + 13)
SIZES = [(3,), (1, 0), (5, 7), (64, 9), (), (129, 65), (0,), (2, 2), (11,)]


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a slab to two rows, so that small buckets have several."""
    monkeypatch.setattr(stage, "SLAB_ROWS", {"cpu": 2, "cuda": 2})


def naive_digests(data: bytes) -> list[int]:
    """Compute the parts' digests by the module's docstring, in Python's integers."""
    factors = [mix(c, 0) | 1 for c in range(1, ROW_WORDS + 1)]
    data_and_zeros = data + bytes(-len(data) % 4)
    words = [int.from_bytes(data_and_zeros[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]
    sums = []
    for start in range(0, len(words), ROW_WORDS):
        sums.append(sum(f * word for f, word in zip(factors, words[start : start + ROW_WORDS], strict=False)))
    rows = -(-len(sums) // NUM_PARTS)
    mixed = [mix(i, h) for i, h in enumerate(sums, start=1)]
    return [sum(mixed[part * rows : (part + 1) * rows]) & MASK for part in range(NUM_PARTS)]


def value(packed: torch.Tensor) -> tuple[int, ...]:
    """Return what a bucket's checksum is made of."""
    return len(packed), *(x & MASK for x in part_digests(packed, range(NUM_PARTS)).tolist())


def bucket_of(tensors: dict[str, torch.Tensor], num_bytes: int = 2**17) -> BucketBuffer:
    half = BucketBuffer(num_bytes, "broadcast", CPU)
    half.bytes = random_bytes(num_bytes, 5)  # what an earlier bucket left
    for name, tensor in tensors.items():
        assert half.fits(tensor)
        half.add(name, tensor)
    return half


def mixture() -> dict[str, torch.Tensor]:
    tensors = {}
    for i, (dtype, size) in enumerate(itertools.product(DTYPES, SIZES)):
        data = random_bytes(torch.Size(size).numel() * dtype.itemsize, i)
        tensors[f"weight.{i}"] = (data % 2 if dtype is torch.bool else data).view(dtype).view(size)
    return tensors


@pytest.mark.parametrize("length", LENGTHS)
def test_digest_equals_naive_sum(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the slabs are cut. The parts are the bucket, and each is one of an engine's workers'."""
    data, bounds = random_bytes(length), part_bounds(length)
    wanted = naive_digests(data.numpy().tobytes())
    assert value(data) == (length, *wanted)
    assert bounds[0] == 0 and bounds[-1] == length and bounds == sorted(bounds)
    assert all(bound % ROW_BYTES == 0 or bound == length for bound in bounds)
    for workers in (1, 2, 3, 8, 11):
        parts = [parts_of(worker, workers) for worker in range(workers)]
        seen = {i: x & MASK for own in parts for i, x in zip(own, part_digests(data, own).tolist(), strict=True)}
        assert all(parts) and [seen[i] for i in range(NUM_PARTS)] == wanted
    for rows in (1, 3, 64):
        monkeypatch.setattr(stage, "SLAB_ROWS", {"cpu": rows})
        assert value(data) == (length, *wanted)


def test_factors_are_odd_and_every_flipped_bit_and_missing_byte_shows() -> None:
    """The factors are odd and differ below bit 32, so that one changed word, and two that swapped, always show."""
    factors = factors_on(CPU)
    assert bool((factors & 1).all()) and len((factors & (2**32 - 1)).unique()) == ROW_WORDS
    data = random_bytes(3 * ROW_BYTES + 11)
    seen = {*under_flips(value, data, (0, 3, 4, ROW_BYTES - 1, ROW_BYTES, 2 * ROW_BYTES + 4, len(data) - 1))}
    seen |= {value(data[:-1]), value(data[:-4]), value(data[:ROW_BYTES]), value(data[4:]), value(data[ROW_BYTES:])}
    assert len(seen) == 1 + 7 * 8 + 5
    assert len({value(torch.zeros(n, dtype=torch.uint8)) for n in LENGTHS}) == len(LENGTHS)


def test_bucket_of_any_dtypes_equals_naive_sum_and_forgets_earlier_buckets() -> None:
    """A sender's bucket has zeros between its tensors, whatever lay there, and its views are the tensors."""
    tensors = mixture()
    half = bucket_of(tensors, 2**19)
    packed = half.bytes[: half.used]
    assert value(packed) == (half.used, *naive_digests(packed.numpy().tobytes()))
    data, at = b"", 0
    for (name, tensor), (named, dtype, shape, start) in zip(tensors.items(), half.tensors, strict=True):
        assert (name, start) == (named, at)
        got = view_of(packed, dtype, shape, start)
        assert got.dtype == tensor.dtype and got.shape == tensor.shape
        raw = as_bytes(tensor).numpy().tobytes()
        assert as_bytes(got).numpy().tobytes() == raw
        data += raw + bytes(max(16, -(-len(raw) // 16) * 16) - len(raw))
        at = len(data)
    assert data == packed.numpy().tobytes() and len(data) == half.used
    assert half.message()["checksum"] == bucket_checksum(half.tensors, packed.clone())


def test_swapped_words_signs_and_rectangles_show() -> None:
    """Swapped elements, signs and rows show, and so do four signs at a rectangle's corners, which sums would miss."""
    table = torch.randn(8, ROW_WORDS, generator=torch.Generator().manual_seed(0))  # a row of the digest each
    changed = [table]
    for a, b in [((0, 0), (0, 1)), ((0, 3), (0, 7)), ((0, 0), (5, 0)), ((2, 5), (3, 801)), ((0, 0), (7, 1023))]:
        swapped, signs = table.clone(), table.clone()
        swapped[a], swapped[b] = table[b], table[a]
        signs[a], signs[b] = -table[a], -table[b]
        changed += [swapped, signs]
    for rows, columns in [((0, 1), (0, 1)), ((2, 7), (3, 4096))]:
        corners, lifted = table.clone(), table.clone().view(torch.int32)
        for i, j in itertools.product(range(2), repeat=2):
            corners[rows[i], columns[j]] *= -1
            lifted[rows[i], columns[j]] += 1 if i == j else -1
        changed += [corners, lifted.view(torch.float32)]
    changed += [table.flip(0), table.flip(1), table.roll(1), table[[1, 0, 2, 3, 4, 5, 6, 7]], -table]
    halves = table.bfloat16()
    changed += [halves, halves.view(8, -1, 2).flip(2), -halves]
    assert len({value(as_bytes(x)) for x in changed}) == len(changed)


@pytest.mark.parametrize("size", [(16,), (4, ROW_WORDS), (3, ROW_WORDS // 2), (7, 33)])
def test_two_tensors_that_change_places_show(size: tuple[int, ...]) -> None:
    """Two tensors of one size show where they swap their bytes, also with the same words in another order."""
    first = torch.randn(size, generator=torch.Generator().manual_seed(1))
    for second in (first + 1, -first, first.flip(-1), first.flip(0).roll(1, -1)):
        kept, swapped = ({"a": x, "b": y, "c": first} for x, y in ((first, second), (second, first)))
        checksums = {bucket_of(x, 2**19).message()["checksum"] for x in (kept, swapped)}
        assert len(checksums) == 2


def test_checksum_sees_order_name_dtype_shape_and_place() -> None:
    """Whatever a bucket says of its tensors enters its checksum."""
    packed = bucket_of({"a": torch.arange(4.0), "b": torch.arange(4.0)}).bytes[:32]
    a, b = ["a", "float32", [4], 0], ["b", "float32", [4], 16]
    changed = [
        [a, b],
        [b, a],
        [a],
        [],
        [["c", *a[1:]], b],
        [["a", "int32", [4], 0], b],
        [["a", "float32", [2, 2], 0], b],
        [["a", "float32", [4], 16], b],
        [["a", "float32", [3], 0], b],
    ]
    assert len({bucket_checksum(x, packed) for x in changed}) == len(changed)
    assert bucket_checksum([a, b], packed) == bucket_checksum([a, b], packed.clone())
    assert len(bucket_checksum([], packed)) == 16 and int(bucket_checksum([], packed), 16) >= 0


QUESTIONS = ("tolist", "item", "__int__", "__bool__", "__float__", "cpu", "numpy", "equal", "nonzero", "is_nonzero")


class Watch(TorchFunctionMode):
    """Counts the operations, and among them the questions: those by which the host reads numbers off the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.questions = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        self.questions += function.__name__ in QUESTIONS
        return function(*args, **(kwargs or {}))


def test_a_bucket_asks_its_device_once_however_many_tensors_it_holds() -> None:
    few, many = bucket_of({"a": torch.ones(300)}), bucket_of({f"w.{i}": torch.ones(3) for i in range(75)})
    assert few.used == many.used == 1200
    counts = []
    for half in (few, many):
        with Watch() as seen:
            sent = half.message()["checksum"]
        counts.append((seen.operations, seen.questions))
        with Watch() as seen:
            assert bucket_checksum(half.tensors, half.bytes[: half.used]) == sent
        counts.append((seen.operations, seen.questions))
    assert counts[:2] == counts[2:] and {questions for _, questions in counts} == {1}, counts


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("length", LENGTHS)
def test_digest_on_a_gpu_equals_that_on_a_cpu(length: int) -> None:
    data = random_bytes(length)
    assert value(data.cuda()) == value(data)


def test_an_engine_without_megatron_computes_both_checksums() -> None:
    code = """
import sys
sys.modules["megatron"] = sys.modules["megatron.core"] = None
import torch
from megatron_rl.weights.bucket_digest import bucket_checksum
from megatron_rl.weights.checksum import checksum
print(bucket_checksum([], torch.arange(100, dtype=torch.uint8)), checksum(torch.arange(10.0)))
ours = {x for x in sys.modules if x.startswith("megatron_rl.")}
assert ours <= {"megatron_rl.weights", "megatron_rl.weights.bucket_digest", "megatron_rl.weights.checksum"}
"""
    given = dict(check=True, timeout=patient(600), capture_output=True, text=True)
    found = subprocess.run([sys.executable, "-c", code], **given).stdout.split()
    wanted = bucket_checksum([], torch.arange(100, dtype=torch.uint8)), checksum(torch.arange(10.0))
    assert found == [str(x) for x in wanted]
