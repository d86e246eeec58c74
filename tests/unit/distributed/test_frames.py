"""Frames between a rank and its engine's process come out as they went in, and what is no frame is refused."""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from megatron_rl.distributed import frames
from tests.patience import HANG_S, patient

BOUND_S = patient(HANG_S)


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    left.settimeout(BOUND_S)
    right.settimeout(BOUND_S)
    with left, right:
        yield left, right


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
HEADERS = st.dictionaries(st.text().filter(lambda name: name != "arrays"), JSON, max_size=4)
ARRAYS = st.dictionaries(
    st.text(max_size=5),
    st.sampled_from(frames.DTYPES).flatmap(
        lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, min_side=0, max_side=5))
    ),
    max_size=4,
)


@settings(deadline=None, max_examples=60)
@given(messages=st.lists(st.tuples(HEADERS, ARRAYS), min_size=1, max_size=3))
def test_what_is_received_equals_what_was_sent(messages):
    """Messages come out as they went in, bit by bit, NaN too; frames one after the other stay apart."""
    with pair() as (left, right):
        for header, arrays in messages:
            frames.send(left, header, arrays)
        for header, arrays in messages:
            got, found = frames.receive(right)
            assert got == header and list(found) == list(arrays)
            for name, array in arrays.items():
                assert found[name].dtype == array.dtype and found[name].shape == array.shape
                assert found[name].tobytes() == array.tobytes()


def test_a_large_frame_arrives_a_view_equals_its_copy_and_an_array_of_another_dtype_is_refused():
    with pair() as (left, right):
        array = np.arange(1 << 20)
        sender = threading.Thread(target=frames.send, args=(left, {"kind": "large"}, {"array": array}))
        sender.start()
        header, found = frames.receive(right)
        sender.join(BOUND_S)
        assert header == {"kind": "large"} and np.array_equal(found["array"], array)
    with pair() as (left, right):
        array = np.arange(24, dtype=np.int32).reshape(4, 6)[::2, ::3]
        frames.send(left, {}, {"array": array})
        assert np.array_equal(frames.receive(right)[1]["array"], array)
        frames.send(left, {}, {"array": np.zeros(2, dtype=np.float64)})
        with pytest.raises(ValueError, match="'array' of dtype 'float64'"):
            frames.receive(right)


def test_a_stream_that_ends_anywhere_is_closed():
    with pair() as (left, right):
        frames.send(left, {"kind": "output"}, {"array": np.arange(3)})
        whole = right.recv(1 << 16)
    for length in range(len(whole)):  # 0 too: between two frames
        with pair() as (left, right):
            left.sendall(whole[:length])
            left.close()
            with pytest.raises(frames.Closed):
                frames.receive(right)


def raw(header: bytes | list, body: bytes = b"") -> bytes:
    header = header if isinstance(header, bytes) else json.dumps({"arrays": [header]}).encode()
    return struct.pack("<QQ", len(header), len(body)) + header + body


@pytest.mark.parametrize(
    "sent, told",
    [
        (struct.pack("<QQ", 2**40, 0), "1099511627776 \\+ 0 bytes is above the limit: the stream holds no frames"),
        (struct.pack("<QQ", 2, 2**63), "the stream holds no frames"),
        (raw(b"no json"), "Expecting value"),
        (raw(b"\xff\xfe\xfd\xfc\xfb"), "decode"),
        (raw(["x", "object", [1]], bytes(8)), "array 'x' of dtype 'object' in a frame; these travel"),
        (raw(["x", "float64", [1]], bytes(8)), "'float64'"),
        (raw(["x", "int64", [2]], bytes(8)), "smaller than requested"),
        (raw(["x", "int64", [-3]], bytes(8)), "shape \\[-3\\]"),
        (raw(b"[]"), "lists no arrays"),
        (raw(b"[" * 100_000), "nested too deep"),
        (raw(b"{}"), "lists no arrays"),
        (raw(["x", "int64", [1]], bytes(16)), "take 8 of its 16 bytes"),
    ],
)
def test_what_is_no_frame_is_refused(sent, told):
    """Bytes that are no frame are refused, and nothing of the length that they claim is waited for or allocated."""
    with pair() as (left, right):
        left.sendall(sent)
        with pytest.raises(ValueError, match=told):
            frames.receive(right)
