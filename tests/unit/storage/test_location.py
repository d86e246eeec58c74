"""Locations: a URL's objects are read and written as a disk's files are, and every failure is a sentence."""

import io
import os
import pathlib
import sys
import threading
import tracemalloc

import pytest
import torch
from fsspec.registry import _registry
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.errors import ConfigError, StoreError
from megatron_rl.storage.location import is_url, location
from megatron_rl.storage.remote import READ_AHEAD_BYTES, WRITE_BYTES, RemotePath


@pytest.fixture(params=["memory", "disk"])
def folder(request, tmp_path):
    """Give an empty folder: of memory:// or of the disk."""
    if request.param == "disk":
        yield tmp_path
        return
    place = location(f"memory://{tmp_path.name}")
    yield place
    place.remove_tree()


@pytest.fixture
def store(tmp_path):
    place = location(f"memory://of-{tmp_path.name}")
    yield place
    place.remove_tree()


def test_a_url_is_told_from_a_path() -> None:
    assert [is_url(x) for x in ("s3://b/f", "memory://f", "GS://b", "C:/f", "/a://b", "a/b://c", "")] == [
        *(True, True, True),
        *(False, False, False, False),
    ]
    assert location("runs/a") == pathlib.Path("runs/a") and location("file:///a%20b") == pathlib.Path("/a b")


def test_an_object_equals_a_file(folder) -> None:
    """Names, sizes and bytes: the same calls give the same answers on a disk and in a store."""
    path = folder / "a" / "x.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        assert file.tell() == 0 and file.write(b"0123") == 4
        file.write(b"456789")
        assert file.tell() == 10
    (folder / "note.txt").write_text("é", encoding="utf-8")
    assert path.read_bytes() == b"0123456789" and (folder / "note.txt").read_text(encoding="utf-8") == "é"
    assert path.stat().st_size == 10 and path.is_file() and path.exists() and not (folder / "b").exists()
    assert (folder / "a").is_dir() and (folder / "a").exists() and not path.is_dir() and not (folder / "b").is_dir()
    assert sorted(x.name for x in folder.iterdir()) == ["a", "note.txt"]
    assert [x.stat().st_size for x in (folder / "a").glob("*.bin")] == [10]
    assert (path.name, path.suffix, path.parent, path.with_name("y")) == ("x.bin", ".bin", folder / "a", folder / "a/y")
    path.unlink()
    path.unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        path.stat()
    with pytest.raises(FileNotFoundError):
        path.open("rb")
    with pytest.raises(FileNotFoundError):
        path.read_bytes()


@given(
    size=st.integers(0, 3000),
    moves=st.lists(st.tuples(st.integers(-3100, 3100), st.sampled_from([0, 1, 2]), st.integers(-1, 3100)), max_size=12),
)
def test_seeks_and_reads_equal_those_of_bytes(size: int, moves) -> None:
    content = os.urandom(size)
    path = location("memory://seeks/x")
    path.write_bytes(content)
    mine, wanted = path.open("rb"), io.BytesIO(content)
    for offset, whence, count in moves:
        if (place := offset + {0: 0, 1: wanted.tell(), 2: size}[whence]) >= 0:
            assert mine.seek(offset, whence) == place == wanted.seek(offset, whence)
            assert mine.read(count) == wanted.read(count) and mine.tell() == wanted.tell()


def test_torch_reads_from_a_store_what_it_wrote_there(store) -> None:
    tensor = torch.arange(100_000)
    with (store / "t.pt").open("wb") as file:
        torch.save(tensor, file)
        second = file.tell()
        torch.save(tensor + 1, file)
    assert torch.equal(torch.load((store / "t.pt").open("rb")), tensor)
    assert torch.equal(torch.load(io.BytesIO((store / "t.pt").read_bytes()[second:])), tensor + 1)


def test_large_objects_pass_in_bounded_memory(store, monkeypatch) -> None:
    """Parts and ranges are cut at their bounds, so a write of any size holds a few parts beside its own bytes."""
    parts: list[int] = []

    class Sink:
        def write(self, content) -> int:
            parts.append(len(content))
            return len(content)

        def close(self) -> None:
            pass

    monkeypatch.setattr(store.system, "open", lambda *_, **__: Sink())
    content = bytes(5 * WRITE_BYTES + 17)
    tracemalloc.start()
    try:
        with (store / "x").open("wb") as file:
            file.write(b"head")
            file.write(content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(parts) <= WRITE_BYTES and sum(parts) == len(content) + 4
    assert peak < 2 * WRITE_BYTES  # its own buffer, of one part


def test_small_reads_share_a_request(store, monkeypatch) -> None:
    content = os.urandom(3 * READ_AHEAD_BYTES)
    (store / "x").write_bytes(content)
    asked, cat = [], store.system.cat_file
    monkeypatch.setattr(
        store.system, "cat_file", lambda key, start, end: asked.append(end - start) or cat(key, start, end)
    )
    with (store / "x").open("rb") as file:
        assert b"".join(file.read(1000) for _ in range(1000)) == content[:1_000_000]
        assert asked == [READ_AHEAD_BYTES]
        file.seek(-10, io.SEEK_END)
        assert file.read() == content[-10:] and sum(asked) == READ_AHEAD_BYTES + 10


def test_a_block_that_raises_leaves_no_object(store) -> None:
    with pytest.raises(RuntimeError, match="^told$"), (store / "x").open("wb") as file:
        file.write(bytes(10))
        raise RuntimeError("told")
    assert not (store / "x").exists() and file.closed
    file = (store / "y").open("wb")
    file.write(b"1")
    file.abort()
    assert store.files() == {}


def test_a_store_that_hangs_ends_by_name(store, monkeypatch) -> None:
    released = threading.Event()
    path = RemotePath(store.system, "memory", "/hangs/x", answer_s=0.05)
    monkeypatch.setattr(store.system, "info", lambda _: released.wait())
    try:
        with pytest.raises(StoreError, match=r"the store has not answered for 0\.05 s: 'memory://hangs/x'"):
            path.stat()
    finally:
        released.set()


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (PermissionError("Access Denied"), StoreError, "the store refuses it: Access Denied: 'memory://x'"),
        (FileNotFoundError("bucket/x"), FileNotFoundError, "there is no such object, folder or bucket: 'memory://x'"),
        (ValueError("two\nlines"), StoreError, "ValueError: two lines: 'memory://x'"),
        (RuntimeError("y" * 999), StoreError, "RuntimeError: " + "y" * 300 + "… (999 characters): 'memory://x'"),
    ],
)
def test_failures_are_one_sentence_with_the_url(store, monkeypatch, raised, kind, said) -> None:
    def fails(*_, **__) -> None:
        raise raised

    monkeypatch.setattr(store.system, "info", fails)
    with pytest.raises(kind) as caught:
        location("memory://x").stat()
    assert str(caught.value).partition("] ")[2] == said


@pytest.mark.parametrize("text", ["s3://key:secret@bucket/f", "http://me:secret@host/f", "memory://secret@x"])
def test_a_password_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match="a URL with a name or a password in it") as caught:
        location(text, "checkpoint.dir")
    assert "secret" not in str(caught.value) and "checkpoint.dir" in str(caught.value)


def test_a_signed_address_is_not_repeated() -> None:
    assert str(RemotePath(None, "https", "https://host/x?sig=secret")) == "https://host/x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nosuch://b/f", "cannot be read as a URL"),
        ("s3:///f", "names no bucket; write s3://bucket/folder"),
        ("memory://a\0b", "holds a control character"),
    ],
)
def test_what_is_no_place_is_refused_by_its_key(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^data.train=.*{said}"):
        location(text, "data.train")


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("gs", "gcs")])
def test_a_missing_driver_names_its_extra(monkeypatch, scheme: str, extra: str) -> None:
    driver = {"s3": "s3fs", "gs": "gcsfs"}[scheme]
    monkeypatch.delitem(_registry, scheme, raising=False)
    monkeypatch.setitem(sys.modules, driver, None)  # as Python has it for a module that is not there
    with pytest.raises(ConfigError, match=rf'is not installed; pip install "megatron_rl\[{extra}\]"$'):
        location(f"{scheme}://bucket/f", "checkpoint.dir")
