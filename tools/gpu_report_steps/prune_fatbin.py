"""Blanks the machine code of a CUDA library for all GPUs but one, so that the library compresses to a tenth.

    python tools/gpu_report_steps/prune_fatbin.py libtransformer_engine.so --arch 90

nvcc leaves rows of containers in a library (cuobjdump lists them). A container is a header of 16 bytes (magic, u16
version 1, u16 own size, u64 bytes that follow) and entries. An entry is a header of 64 bytes or more (u16 kind, 1 for
PTX and 2 for machine code; u32 own size at byte 4, u64 payload size at 8, u32 architecture at 28) and a payload.
Payloads that the GPU does not load become zeros; no offset moves, so that what points to a container still does. Where
a container has no machine code for the GPU, its PTX of that GPU or an older one stays, which the driver compiles.
"""

from __future__ import annotations

import argparse
import pathlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAGIC = (0xBA55ED50).to_bytes(4, "little")
HEADER, LEAST_ENTRY = 16, 64
PTX, CODE = 1, 2


@dataclass(frozen=True, slots=True)
class Entry:
    """Describes one payload: its kind, its architecture, and where it lies."""

    kind: int
    arch: int
    start: int
    size: int


def containers(data: bytes | bytearray) -> Iterator[list[Entry]]:
    """Yield the entries of each container. Raises ValueError where a container holds what is not known."""
    at = data.find(MAGIC)
    while at >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + 4) if at + HEADER <= len(data) else (0, 0, 0)
        end = at + header + size
        if (version, header) == (1, HEADER) and end <= len(data):
            yield entries(data, at + header, end)
            at = data.find(MAGIC, end)
        else:  # the four bytes stand there by chance
            at = data.find(MAGIC, at + len(MAGIC))


def entries(data: bytes | bytearray, at: int, end: int) -> list[Entry]:
    found = []
    while at + LEAST_ENTRY <= end:
        kind, _, head, size = struct.unpack_from("<HHIQ", data, at)
        (arch,) = struct.unpack_from("<I", data, at + 28)
        if kind not in (PTX, CODE) or head < LEAST_ENTRY or at + head + size > end:
            raise ValueError(
                f"the entry at byte {at:#x} has kind {kind}, {head} and {size} bytes; this form is not known"
            )
        found.append(Entry(kind, arch, at + head, size))
        at += head + size
    return found


def loaded(row: list[Entry], arch: int) -> list[Entry]:
    """Return the entries of a container from which the driver can choose for this architecture."""
    code = [x for x in row if x.kind == CODE and x.arch == arch]
    return code or [x for x in row if x.kind == PTX and x.arch <= arch]


def prune(data: bytearray, arch: int, unused: Sequence[bytes] = ()) -> int:
    """Set every other payload to zeros, and return how many bytes that were.

    unused: parts of the names of kernels that nobody will call; a payload that holds one goes too.
    """
    blanked = 0
    for row in containers(data):
        kept = loaded(row, arch)
        for entry in row:
            end = entry.start + entry.size
            if entry not in kept or any(data.find(x, entry.start, end) >= 0 for x in unused):
                data[entry.start : end] = bytes(entry.size)
                blanked += entry.size
    return blanked


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/gpu_report_steps/prune_fatbin.py libtransformer_engine.so --arch 90",
    )
    parser.add_argument("library", type=pathlib.Path, help="changed in place")
    parser.add_argument("--arch", type=int, default=90, help="architecture that stays (default 90, Hopper)")
    given = parser.parse_args(arguments)
    data = bytearray(given.library.read_bytes())
    blanked = prune(data, given.arch)
    given.library.write_bytes(data)
    print(f"{blanked / 2**20:.1f} of {len(data) / 2**20:.1f} MiB are zeros now")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
