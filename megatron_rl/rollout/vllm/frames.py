"""Messages between a rank and its engine's process: a JSON header and plain arrays, over a socket pair of their own.

A frame is two little-endian uint64, the header's and the body's length, then the header (JSON, UTF-8) and the body.
Arrays travel as their bytes; the header's ``arrays`` lists [name, dtype, shape] in order. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping

import numpy as np

_LENGTHS = struct.Struct("<QQ")
MAX_BYTES = 1 << 33  # a length above it is a broken stream, not a message
DTYPES = ("int32", "int64", "float32")


class Closed(ConnectionError):
    """Raised where the other side is gone."""


def send(
    connection: socket.socket, header: Mapping[str, object], arrays: Mapping[str, np.ndarray] | None = None
) -> None:
    arrays = arrays or {}
    listed = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({**header, "arrays": listed}).encode()
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    connection.sendall(_LENGTHS.pack(len(text), len(body)) + text + body)


def receive(connection: socket.socket) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the next frame. Raises Closed where the stream ends, ValueError for bytes that are no frame."""
    text_bytes, body_bytes = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size))
    if max(text_bytes, body_bytes) > MAX_BYTES:
        raise ValueError(f"a frame of {text_bytes} + {body_bytes} bytes: the stream is not one of frames")
    header = json.loads(_exactly(connection, text_bytes))
    body = _exactly(connection, body_bytes)
    if not isinstance(header, dict) or "arrays" not in header:
        raise ValueError(f"a frame whose header lists no arrays: {str(header)[:200]}")
    arrays, start = {}, 0
    for name, dtype, shape in header.pop("arrays"):
        if dtype not in DTYPES:
            raise ValueError(f"array {name!r} of dtype {dtype!r} in a frame; these travel: {', '.join(DTYPES)}")
        if any(size < 0 for size in shape):
            raise ValueError(f"array {name!r} of shape {shape} in a frame")
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(body, dtype=dtype, count=count, offset=start).reshape(shape)
        start += count * np.dtype(dtype).itemsize
    if start != body_bytes:
        raise ValueError(f"the arrays of a frame take {start} of its {body_bytes} bytes")
    return header, arrays


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    parts, left = [], num_bytes
    while left:
        part = connection.recv(min(left, 1 << 20))
        if not part:
            raise Closed("the other side closed the connection")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
