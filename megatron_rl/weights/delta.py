"""The difference of two buckets (packed tensors) of weights: positions and new values of the words that changed.

Between two optimizer steps most bfloat16 weights keep their bits, since a small update is rounded
away. A bucket's bytes are read as words of the size of its tensors' smallest element. Only bits are
compared: −0.0 differs from 0.0, and a NaN is equal to itself. The changed words are written as

    codes | zeros up to a multiple of 4 bytes | the new words, in the order of their positions

The codes tell the positions. They have the shortest of three forms:

- A bit for each word of the bucket, 1 for a changed word.
- For each changed word its gap, the number of unchanged words right before it, in 1 byte.
- The gaps in 2 bytes each.

In a byte the code 255 means "255 unchanged words, and no changed word yet", so that any gap can be
written: 600 unchanged words and a changed one are 255, 255, 90. In 2 bytes 65535 has this meaning.

If codes and new words take no fewer bytes than the bucket, no difference is made, and the bucket
itself is sent.

This module imports torch alone, since engines' processes, which lack Megatron-Core, import it too.
It works on a CPU and on a GPU, and needs a little-endian host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

WORDS = {2: torch.int16, 4: torch.int32}  # by their number of bytes
CODES = {1: torch.uint8, 2: torch.int16}
PADDING = 4  # bytes; the values start at a multiple of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Describes the form of a payload: codes that tell which words changed, then the new words.

    word_bytes: bytes of a word, 2 or 4.
    code_bytes: 0: the codes are one bit for each word. 1 or 2: the bytes of a code, which counts the
        unchanged words before a changed one (the gap). The largest code, 255 or 65535, means that
        the gap goes on in the next code.
    num_codes: the number of codes; if ``code_bytes`` is 0, the number of bytes that hold the bits.
    num_changed: the number of changed words.

    Example: 3 of 1,000 bfloat16 words changed; two gaps are above 254 and take two codes each →
    ``word_bytes=2, code_bytes=1, num_codes=5, num_changed=3``. The payload has 5 bytes of codes, 3
    zero bytes up to a multiple of 4, and 6 bytes of new words.
    """

    word_bytes: int
    code_bytes: int
    num_codes: int
    num_changed: int

    @property
    def values_start(self) -> int:
        return _padded(self.num_codes * max(1, self.code_bytes))

    @property
    def num_bytes(self) -> int:
        return self.values_start + self.num_changed * self.word_bytes


def word_bytes_of(dtypes: Sequence[str]) -> int:
    """Return the number of bytes of a word, the unit in which a bucket is compared.

    It is the size of the bucket's smallest element, but at least 2 and at most 4.

    dtypes: the tensors' dtypes by their names in torch.
    """
    return min(4, max(2, min(getattr(torch, dtype).itemsize for dtype in dtypes)))


def changed_words(old: torch.Tensor, new: torch.Tensor, word_bytes: int) -> torch.Tensor:
    """Return whether each word's bits differ between two buckets, bool [words].

    old, new: uint8 [bytes], of one size, a multiple of ``word_bytes``, on one device.
    """
    if len(old) != len(new):
        raise ValueError(f"a bucket of {len(new):,} bytes has no difference to one of {len(old):,}")
    kind = WORDS[word_bytes]
    return old.view(kind) != new.view(kind)


def compare(
    old: torch.Tensor, new: torch.Tensor, word_bytes: int
) -> tuple[int, tuple[Difference, torch.Tensor] | None]:
    """Compare two buckets word by word; return (number of changed words, (difference, payload)).

    Difference and payload tell what changed, as ``encode`` returns them. In place of this pair there
    is None if the payload would not be smaller than the bucket.

    old, new: uint8 [bytes], as ``changed_words`` takes them.
    word_bytes: bytes of a word, 2 or 4.
    """
    changed = changed_words(old, new, word_bytes)
    count = int(torch.count_nonzero(changed))
    # The least that a payload with so many words takes: if that is too much, no position is computed.
    least = count * word_bytes + min(count, len(new) // word_bytes // 8)
    return count, None if least >= len(new) else encode(changed, new, word_bytes)


def encode(changed: torch.Tensor, new: torch.Tensor, word_bytes: int) -> tuple[Difference, torch.Tensor] | None:
    """Encode a bucket's changed words; return (difference, payload).

    The payload, uint8 [bytes] on the device of ``new``, holds their positions and new values. The
    difference describes its form. None: the payload would not be smaller than the bucket.

    changed: bool [words], as ``changed_words`` returns it.
    new: the new bucket's bytes, uint8.
    word_bytes: bytes of a word, 2 or 4.
    """
    positions = changed.nonzero().flatten()
    num_words, num_changed = len(changed), len(positions)
    gaps = positions.diff(prepend=positions.new_full((1,), -1)) - 1
    num_codes = {0: -(-num_words // 8)}
    for code_bytes in CODES:
        num_codes[code_bytes] = num_changed + int((gaps // _most(code_bytes)).sum())
    options = [
        Difference(word_bytes=word_bytes, code_bytes=code_bytes, num_codes=number, num_changed=num_changed)
        for code_bytes, number in num_codes.items()
    ]
    best = min(options, key=lambda option: option.num_bytes)
    if best.num_bytes >= len(new):
        return None
    payload = torch.zeros(best.num_bytes, dtype=torch.uint8, device=new.device)
    codes = _bits(positions, num_words) if best.code_bytes == 0 else _gap_codes(gaps, best)
    payload[: codes.nbytes] = codes.view(torch.uint8)
    values = new.view(WORDS[word_bytes])[positions]
    payload[best.values_start :] = values.view(torch.uint8)
    return best, payload


def apply(packed: torch.Tensor, difference: Difference, payload: torch.Tensor) -> None:
    """Overwrite in the bucket ``packed``, uint8, the machine words that a payload changes.

    Raises ValueError for a payload whose length or positions do not fit ``difference`` and the bucket.

    difference: the size of a word, the number of changed words, and the payload's layout.
    payload: the words' positions and new values, uint8 on the same device, aligned to 4 bytes.
    """
    if len(payload) != difference.num_bytes:
        raise ValueError(f"{difference} has {difference.num_bytes:,} bytes and its payload {len(payload):,}")
    positions = _positions(difference, payload)
    words = packed.view(WORDS[difference.word_bytes])
    if len(positions) != difference.num_changed or (len(positions) and int(positions[-1]) >= len(words)):
        raise ValueError(
            f"a difference of {difference.num_changed:,} words has the positions of {len(positions):,}, in a bucket of "
            f"{len(words):,} words"
        )
    words[positions] = payload[difference.values_start :].view(words.dtype)


def difference_of(fields: Mapping[str, int]) -> Difference:
    """Return the ``Difference`` with these fields. Raises ValueError for an impossible number.

    fields: {field of ``Difference``: number}, from the message that announces a payload.
    """
    difference = Difference(**fields)
    known = difference.word_bytes in WORDS and difference.code_bytes in (0, *CODES)
    if not known or min(difference.num_codes, difference.num_changed) < 0:
        raise ValueError(
            f"{difference} is no difference: words have 2 or 4 bytes, codes 0, 1 or 2, no number is below 0"
        )
    return difference


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // PADDING) * PADDING


def _most(code_bytes: int) -> int:
    return 2 ** (8 * code_bytes) - 1


def _bits(positions: torch.Tensor, num_words: int) -> torch.Tensor:
    changed = torch.zeros(-(-num_words // 8) * 8, dtype=torch.uint8, device=positions.device)
    changed[positions] = 1
    return changed.view(-1, 8).mul_(_weights(positions.device)).sum(1, dtype=torch.uint8)


def _weights(device: torch.device) -> torch.Tensor:
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)


def _gap_codes(gaps: torch.Tensor, difference: Difference) -> torch.Tensor:
    most = _most(difference.code_bytes)
    codes = gaps.new_full((difference.num_codes,), most)
    codes[(gaps // most + 1).cumsum(0) - 1] = gaps % most
    return codes.to(torch.uint8) if difference.code_bytes == 1 else codes.to(torch.int32).to(torch.int16)


def _positions(difference: Difference, payload: torch.Tensor) -> torch.Tensor:
    """Return the positions of the changed words from a payload's codes, int64 [changed], ascending."""
    if difference.code_bytes == 0:
        bits = payload[: difference.num_codes, None].bitwise_and(_weights(payload.device))
        return bits.flatten().nonzero().flatten()
    most = _most(difference.code_bytes)
    codes = payload[: difference.num_codes * difference.code_bytes].view(CODES[difference.code_bytes])
    codes = codes.to(torch.int64) & most
    changed = codes < most
    ends = (codes + changed).cumsum(0)
    return ends[changed] - 1
