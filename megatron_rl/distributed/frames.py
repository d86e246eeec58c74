"""Messages between a rank and its child process (an engine, a reward worker): a JSON header and plain arrays.

A frame is two little-endian uint64 (the header's and the body's length), the header (JSON, UTF-8)
and the body. The body is the arrays' bytes. The header's ``arrays`` lists their [name, dtype, shape]
in order. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping

import numpy as np

_LENGTHS = struct.Struct("<QQ")
MAX_BYTES = 1 << 33  # a larger length means a broken stream
DTYPES = ("int16", "int32", "int64", "float32")


class Closed(ConnectionError):
    """Raised if the other side has closed the connection."""


def encode(header: Mapping[str, object], arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    """Return a frame as bytes. Numpy numbers in the header become JSON numbers.

    Raises TypeError if the header holds another value that is not JSON.
    """
    arrays = arrays or {}
    listed = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({**header, "arrays": listed}, default=_number, check_circular=False).encode()
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    return _LENGTHS.pack(len(text), len(body)) + text + body


def _number(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is not JSON")


def is_json(value: object) -> bool:
    """Return whether ``value`` stays the same through JSON: no tuple, no key other than str, nothing of numpy."""
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) is list:
        return all(map(is_json, value))
    return type(value) is dict and all(type(key) is str and is_json(inner) for key, inner in value.items())


def send(
    connection: socket.socket, header: Mapping[str, object], arrays: Mapping[str, np.ndarray] | None = None
) -> None:
    """Send one frame; return when all of it was handed to the socket.

    header: JSON-able values.
    arrays: name → array, of a dtype in DTYPES.
    """
    connection.sendall(encode(header, arrays))


def receive(connection: socket.socket) -> tuple[dict, dict[str, np.ndarray]]:
    """Return (header, {name: array}) of the next frame.

    Raises Closed if the stream ends, ValueError for bytes that are no frame.
    """
    text_bytes, body_bytes = _lengths(_exactly(connection, _LENGTHS.size))
    text = _exactly(connection, text_bytes)
    return _decode(text, _exactly(connection, body_bytes))


class Inbox:
    """Cuts a stream of bytes into frames (messages); any number of bytes may arrive at a time."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def take(self, piece: bytes) -> list[dict]:
        """Return the header of each frame that is complete now; the frames' arrays are dropped.

        piece: the stream's next bytes.

        Raises ValueError for bytes that are no frames.
        """
        self._bytes += piece
        headers = []
        while len(self._bytes) >= _LENGTHS.size:
            text_bytes, body_bytes = _lengths(self._bytes)
            end = _LENGTHS.size + text_bytes + body_bytes
            if len(self._bytes) < end:
                break
            text = bytes(self._bytes[_LENGTHS.size : _LENGTHS.size + text_bytes])
            headers.append(_decode(text, bytes(self._bytes[_LENGTHS.size + text_bytes : end]))[0])
            del self._bytes[:end]
        return headers


def _lengths(start: bytes | bytearray) -> tuple[int, int]:
    """Return (bytes of the header, bytes of the body) of a frame. Raises ValueError for a length above MAX_BYTES.

    start: the frame's beginning.
    """
    text_bytes, body_bytes = _LENGTHS.unpack_from(start)
    if max(text_bytes, body_bytes) > MAX_BYTES:
        raise ValueError(f"a frame of {text_bytes} + {body_bytes} bytes is above the limit: the stream holds no frames")
    return text_bytes, body_bytes


def _decode(text: bytes, body: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    try:
        header = json.loads(text)
    except RecursionError as error:
        raise ValueError("a frame whose header is nested too deep") from error
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
    if start != len(body):
        raise ValueError(f"the arrays of a frame take {start} of its {len(body)} bytes")
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
