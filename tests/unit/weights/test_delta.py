"""Checks weights/delta.py against a naive loop over the words: positions, values, bytes, and the patched bucket."""

import struct

import pytest
import torch

from megatron_rl.weights import delta
from megatron_rl.weights.delta import Difference, apply, changed_words, compare, difference_of, encode, word_bytes_of
from tests.unit.weights.digested import as_bytes

SHARES = [0.0, 0.0005, 0.003, 0.02, 0.2, 0.6, 0.9, 0.93, 0.95, 0.97, 0.99, 1.0]
NUM_WORDS = 20_000


def naive_positions(old: torch.Tensor, new: torch.Tensor, word_bytes: int) -> list[int]:
    before, after = bytes(old.tolist()), bytes(new.tolist())
    starts = range(0, len(after), word_bytes)
    return [i // word_bytes for i in starts if before[i : i + word_bytes] != after[i : i + word_bytes]]


def naive_payload(old: torch.Tensor, new: torch.Tensor, word_bytes: int, code_bytes: int) -> bytes:
    """Write codes and values word by word."""
    positions, after = naive_positions(old, new, word_bytes), bytes(new.tolist())
    codes, free = b"", 0
    if code_bytes == 0:
        bits = bytearray(-(-len(after) // word_bytes // 8))
        for position in positions:
            bits[position // 8] |= 1 << position % 8
        codes = bytes(bits)
    else:
        most, form = 256**code_bytes - 1, {1: "<B", 2: "<H"}[code_bytes]
        for position in positions:
            gap, free = position - free, position + 1
            while gap >= most:
                codes, gap = codes + struct.pack(form, most), gap - most
            codes += struct.pack(form, gap)
    codes += bytes(-len(codes) % 4)
    return codes + b"".join(after[i * word_bytes : (i + 1) * word_bytes] for i in positions)


def pair(share: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(int(share * 10_000))
    old = torch.randn(NUM_WORDS, generator=random).to(dtype)
    moved = torch.rand(NUM_WORDS, generator=random) < share
    return as_bytes(old), as_bytes(torch.where(moved, old + 1, old))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_positions_values_and_bytes_equal_a_naive_loop(dtype):
    """The cheapest coding is taken, each somewhere; where none is smaller than the bucket, that travels itself."""
    word_bytes, chosen = dtype.itemsize, set()
    for share in SHARES:
        old, new = pair(share, dtype)
        changed = changed_words(old, new, word_bytes)
        assert changed.nonzero().flatten().tolist() == naive_positions(old, new, word_bytes)
        payloads = {code: naive_payload(old, new, word_bytes, code) for code in (0, 1, 2)}
        found, (count, compared) = encode(changed, new, word_bytes), compare(old, new, word_bytes)
        assert count == int(changed.sum()) and (found is None) == (compared is None)
        assert (found is None) == (min(map(len, payloads.values())) >= len(new)), share
        if found is None:
            continue
        difference, payload = found
        chosen.add(difference.code_bytes)
        assert compared[0] == difference and torch.equal(compared[1], payload)
        assert bytes(payload.tolist()) == payloads[difference.code_bytes]
        assert len(payload) == min(map(len, payloads.values()))
        apply(old, difference, payload)
        assert torch.equal(old, new)
    assert chosen == {0, 1, 2} and found is None


def test_bits_of_the_smallest_element_are_compared_and_nothing_changed_is_nothing():
    assert word_bytes_of(["float32", "bfloat16"]) == 2 and word_bytes_of(["float32"]) == 4
    assert word_bytes_of(["float64", "float32"]) == 4 and word_bytes_of(["float8_e4m3fn"]) == 2
    # −0.0 after 0.0 has changed; a NaN that kept its bits has not, and one of other bits has
    old = torch.tensor([0x0000, 0x7FC0, 0x7FC0, 0x3F80, -0x8000], dtype=torch.int16)
    new = torch.tensor([-0x8000, 0x7FC0, 0x7FC1, 0x3F80, -0x8000], dtype=torch.int16)
    assert new.view(torch.bfloat16).isnan().tolist() == [False, True, True, False, False]
    old, new = (as_bytes(x.repeat(20)) for x in (old, new))
    changed = changed_words(old, new, 2)
    assert changed.nonzero().flatten().tolist() == [x for k in range(0, 100, 5) for x in (k, k + 2)]
    apply(old, *encode(changed, new, 2))
    assert torch.equal(old, new)
    same = torch.arange(64, dtype=torch.uint8)
    difference, payload = encode(changed_words(same, same, 2), same, 2)
    assert (difference.num_changed, len(payload)) == (0, 0)
    apply(same, difference, payload)
    empty = torch.empty(0, dtype=torch.uint8)
    assert encode(changed_words(empty, empty, 2), empty, 2) is None


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 65533, 65534, 65535, 65536, 131069, 131070])
@pytest.mark.parametrize("code_bytes", [1, 2])
def test_every_gap_has_its_code(monkeypatch, gap, code_bytes):
    monkeypatch.setattr(delta, "CODES", {code_bytes: delta.CODES[code_bytes]})
    old = torch.zeros(2 * (2 * gap + 5_000), dtype=torch.uint8)
    new = old.clone()
    for position in (gap, 2 * gap + 1, 2 * gap + 2):
        new[2 * position] = 1
    difference, payload = encode(changed_words(old, new, 2), new, 2)
    assert difference.code_bytes == code_bytes
    assert bytes(payload.tolist()) == naive_payload(old, new, 2, code_bytes)
    apply(old, difference, payload)
    assert torch.equal(old, new)


def test_what_does_not_fit_is_refused_by_name():
    old, new = pair(0.02, torch.bfloat16)
    difference, payload = encode(changed_words(old, new, 2), new, 2)
    with pytest.raises(ValueError, match="and its payload"):
        apply(old, difference, payload[:-2])
    with pytest.raises(ValueError, match=f"in a bucket of {NUM_WORDS // 2:,} words"):
        apply(old[:NUM_WORDS], difference, payload)
    with pytest.raises(ValueError, match="no difference to one of"):
        changed_words(old, new[:-2], 2)
    fields = {"word_bytes": 2, "code_bytes": 0, "num_codes": 5, "num_changed": 3}
    for wrong in ({"word_bytes": 3}, {"code_bytes": 4}, {"num_changed": -1}):
        with pytest.raises(ValueError, match="is no difference"):
            difference_of(fields | {"code_bytes": 1} | wrong)
    assert difference_of(fields) == Difference(**fields)
