"""Messages between a rank and its reward workers: JSON behind its length, over a socket pair, never unpickled."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import numpy as np

_LENGTH = struct.Struct("<Q")
MAX_BYTES = 1 << 33  # a length above it is a broken stream, not a message


def encode(message: Mapping[str, object]) -> bytes:
    """Return a message as bytes, numpy's numbers as numbers; raise TypeError or ValueError if it is not JSON."""
    text = json.dumps(message, default=_number, check_circular=False).encode()
    return _LENGTH.pack(len(text)) + text


def _number(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is not JSON")


def is_json(value: object) -> bool:
    """Return whether ``value`` arrives unchanged: no tuple, no key that is not a text, nothing of numpy."""
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) is list:
        return all(map(is_json, value))
    return type(value) is dict and all(type(key) is str and is_json(inner) for key, inner in value.items())


class Inbox:
    """Cuts a stream into messages, however its bytes are divided into pieces."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def take(self, piece: bytes) -> list[dict]:
        """Return the messages that ``piece`` completes. Raises ValueError for a stream that is not one of messages."""
        self._bytes += piece
        messages = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > MAX_BYTES:
                raise ValueError(f"a message of {length} bytes: the stream is not one of messages")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                break
            message = json.loads(bytes(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]
            if not isinstance(message, dict):
                raise ValueError(f"a message that is a {type(message).__name__}")
            messages.append(message)
        return messages
