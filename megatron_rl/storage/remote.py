"""``RemotePath``: a file or folder of an object store, with the methods of ``pathlib.Path`` that this package calls.

An object store has no folders, no rename and no append. An object appears whole when its upload
ends. A folder exists as long as an object's name begins with the folder's name.

Every request is one call of fsspec (2026.9 ``spec.py``: ``info``, ``ls``, ``find``, ``cat_file``,
``open``, ``rm``), made in a thread. The caller waits for the call at most ``answer_s``. Every
failure is an OSError with the URL and the cause. The cache of fsspec's drivers (such as s3fs) is
not used, so that other ranks' writes are seen.

``RemotePath`` is no ``pathlib.Path`` and has no ``__fspath__``: code that was not written for URLs
fails at the missing method.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import io
import posixpath
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from megatron_rl.errors import StoreError, shortened

ANSWER_S = 300.0
LEAVE_S = 2.0  # for a request that cleans up after an error: the other ranks have raised it already
READ_AHEAD_BYTES = 1 << 23  # fetched even for a smaller read
READ_BYTES = 1 << 26  # the largest range of one request
WRITE_BYTES = 1 << 25  # one part of an upload; S3 takes 10,000 parts: objects of up to 312 GiB
REASON_CHARS = 300

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Facts:
    """Holds an object's size in bytes, and its file type (``st_mode``) as ``os.stat`` gives it."""

    st_size: int
    st_mode: int = stat.S_IFREG


class RemotePath:
    """Names an object, or a folder of objects, in an object store. Comparisons and ``/`` send no request to the store.

    system: fsspec's file system.
    scheme: the URL's scheme.
    key: the object's name within the file system, bucket included, without the scheme.
    answer_s: seconds that the store may take for one request.
    """

    __slots__ = ("_size", "answer_s", "key", "scheme", "system")

    def __init__(self, system, scheme: str, key: str, *, answer_s: float = ANSWER_S, size: int | None = None) -> None:
        self.system, self.scheme, self.key, self.answer_s = system, scheme, key, answer_s
        self._size = size

    def _at(self, key: str, size: int | None = None) -> RemotePath:
        return RemotePath(self.system, self.scheme, key, answer_s=self.answer_s, size=size)

    # ---- names -----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """Return the URL. An http URL loses its query, which may hold a signature."""
        url = self.key if "://" in self.key else f"{self.scheme}://{self.key.lstrip('/')}"
        return url.partition("?")[0] if self.scheme in ("http", "https") else url

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and (self.scheme, self.key) == (other.scheme, other.key)

    def __hash__(self) -> int:
        return hash((self.scheme, self.key))

    def __truediv__(self, name: str) -> RemotePath:
        return self._at(posixpath.join(self.key, name))

    @property
    def name(self) -> str:
        return posixpath.basename(self.key.rstrip("/"))

    @property
    def suffix(self) -> str:
        return posixpath.splitext(self.name)[1]

    @property
    def parent(self) -> RemotePath:
        return self._at(posixpath.dirname(self.key.rstrip("/")))

    def within(self, answer_s: float) -> RemotePath:
        """Return a path to the same object with a deadline of at most ``answer_s`` seconds per request."""
        return RemotePath(self.system, self.scheme, self.key, answer_s=min(answer_s, self.answer_s))

    def bucket(self) -> RemotePath:
        """Return the path of the bucket that this path is in; its name is the first component of ``key``."""
        return self._at(self.key.strip("/").partition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def _below(self, key: str) -> str:
        """Return the name of the object ``key`` relative to this folder.

        Some drivers begin keys with a slash, others do not.
        """
        return key.lstrip("/").removeprefix(self.key.strip("/")).lstrip("/")

    # ---- what is there ---------------------------------------------------------------------------------------------

    def stat(self) -> Facts:
        """Return the object's size.

        Raises FileNotFoundError if there is no object, also for a folder, which has no size.
        """
        if self._size is not None:
            return Facts(self._size)
        facts = self._ask(lambda: self.system.info(self.key))
        if facts["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "it is no object but a folder of objects", str(self))
        return Facts(int(facts["size"] or 0))

    def exists(self) -> bool:
        """Return whether there is an object of this name, or an object below a folder of this name."""
        return self._ask(lambda: self.system.exists(self.key))

    def is_file(self) -> bool:
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        return bool(self.children())

    def children(self) -> dict[str, int | None]:
        """Return {name: bytes} of the objects and folders right below this folder; {} if there are none.

        A folder has None in place of bytes.
        """
        try:
            entries = self._ask(lambda: self.system.ls(self.key, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found = {self._below(x["name"].rstrip("/")): x["size"] if x["type"] == "file" else None for x in entries}
        return {name: found[name] for name in sorted(found) if name}

    def iterdir(self) -> Iterator[RemotePath]:
        for name, size in self.children().items():
            yield self._at((self / name).key, size)

    def files(self) -> dict[str, int]:
        """Return {relative name: bytes} of every object below this folder; {} if there is none."""
        try:
            found = self._ask(lambda: self.system.find(self.key, detail=True))
        except FileNotFoundError:
            return {}
        sizes = {self._below(key): int(facts["size"] or 0) for key, facts in found.items()}
        return {name: sizes[name] for name in sorted(sizes) if name and not name.endswith("/")}

    def versions(self) -> dict[str, str]:
        """Return {relative name: version text} of every object below this folder; {} if there is none.

        The text changes if the object does. If this path is itself an object, its relative name is
        ``""``.
        """
        try:
            found = self._ask(lambda: self.system.find(self.key, detail=True))
        except FileNotFoundError:
            return {}
        return {self._below(key): _version(found[key]) for key in sorted(found) if not key.endswith("/")}

    def matches(self) -> list[tuple[RemotePath, str]]:
        """Return (object, version text) of each object that matches this path as a glob pattern, sorted by name.

        The text changes if the object does.
        """
        found = self._ask(lambda: self.system.glob(self.key, detail=True))
        return [(self._at(key), _version(found[key])) for key in sorted(found) if found[key]["type"] == "file"]

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yield the objects right below this folder whose names match ``pattern``.

        Their ``stat`` sends no request, since the folder's listing gives the sizes.
        """
        for path in self.iterdir():
            if path._size is not None and fnmatch.fnmatchcase(path.name, pattern):
                yield path

    # ---- reading ---------------------------------------------------------------------------------------------------

    def open(self, mode: str = "rb") -> io.BufferedReader | io.BufferedWriter:
        """Open the object for reading at any position (``rb``), or for an upload that replaces it (``wb``).

        A reader holds READ_AHEAD_BYTES in memory. An upload holds a few parts of WRITE_BYTES. The
        uploaded object appears when the file is closed. It does not appear if the file's ``with``
        block raises.
        """
        if mode == "rb":
            return io.BufferedReader(_Ranges(self, self.stat().st_size), READ_AHEAD_BYTES)
        if mode == "wb":
            return Upload(self)
        raise ValueError(f"{self} can be opened by rb and wb, not by {mode}: an object store appends nothing")

    def read_bytes(self) -> bytes:
        with self.open("rb") as file:
            return file.read()

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    # ---- writing ---------------------------------------------------------------------------------------------------

    def write_bytes(self, content: bytes) -> None:
        """Write an object at once, so that a reader sees the old object or the new one."""
        self._ask(lambda: self.system.pipe_file(self.key, content))

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder of an object store begins with its first object."""

    def unlink(self, *, missing_ok: bool = False) -> None:
        try:
            self._ask(lambda: self.system.rm_file(self.key))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Remove every object below this folder, and an object of the folder's own name; no error if there is none."""
        if self.files() or self.is_file():
            with contextlib.suppress(FileNotFoundError):  # another host removed them first
                self._ask(lambda: self.system.rm(self.key, recursive=True))

    def _ask(self, call: Callable[[], T]) -> T:
        return answered(call, self)


def answered(call: Callable[[], T], path: RemotePath) -> T:
    """Return the result of ``call``, a callable without arguments that runs in a thread.

    Raises OSError with the URL of ``path`` if the call fails, or takes more than ``path.answer_s``
    seconds. A thread that does not answer in time is left running, since no driver can be
    interrupted.
    """
    results: list[T] = []
    raised: BaseException | None = None

    def run() -> None:
        nonlocal raised
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 (raised below, in the thread that asked)
            raised = error

    thread = threading.Thread(target=run, name="store", daemon=True)
    thread.start()
    thread.join(path.answer_s)
    if thread.is_alive():
        raise StoreError(errno.ETIMEDOUT, f"the store has not answered for {path.answer_s:g} s", str(path))
    if raised is not None:
        raise _named(raised, path) from raised
    return results[0]


def _named(error: BaseException, path: RemotePath) -> BaseException:
    """Return an error of a store's driver as an OSError with the URL of ``path`` and the cause in one line."""
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "there is no such object, folder or bucket", str(path))
    words = " ".join(str(error.strerror if isinstance(error, OSError) and error.strerror else error).split())
    if isinstance(error, PermissionError):
        return StoreError(errno.EACCES, f"the store refuses it: {shortened(words, REASON_CHARS)}", str(path))
    if not isinstance(error, Exception):
        return error
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    return StoreError(number, f"{type(error).__name__}: {shortened(words, REASON_CHARS)}", str(path))


def _version(facts: Mapping[str, object]) -> str:
    """Return a text that changes if the object does: its size and the tags that the driver gives (ETag, digest, time).

    facts: what fsspec says of the object.
    """
    tags = ("ETag", "etag", "md5Hash", "generation", "LastModified", "updated", "mtime", "created")
    return " ".join(str(facts[name]) for name in ("size", *tags) if facts.get(name) is not None)


class Window(io.RawIOBase):
    """Holds the length and the position of a file that is read, and moves the position in ``seek``.

    A subclass defines ``readinto``, which reads at ``position`` and moves it forward.
    """

    def __init__(self, length: int) -> None:
        self.length, self.position = length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence] + offset
        return self.position


class _Ranges(Window):
    """Reads an object by ranges of bytes: each read is one request for at most READ_BYTES."""

    def __init__(self, path: RemotePath, size: int) -> None:
        super().__init__(size)
        self.path = path

    def readinto(self, buffer) -> int:
        count = max(0, min(len(buffer), READ_BYTES, self.length - self.position))
        if not count:
            return 0
        start, end = self.position, self.position + count
        content = answered(lambda: self.path.system.cat_file(self.path.key, start=start, end=end), self.path)
        if len(content) != count:
            raise StoreError(
                errno.EIO, f"bytes {start} to {end} were asked for and {len(content)} came", str(self.path)
            )
        memoryview(buffer)[:count] = content
        self.position = end
        return count


class Upload(io.BufferedWriter):
    """Uploads one object in parts; an error in its ``with`` block, or a call of ``abort``, leaves no object."""

    raw: _Parts

    def __init__(self, path: RemotePath) -> None:
        super().__init__(_Parts(path), WRITE_BYTES)

    def digest(self) -> dict[str, object]:
        """Return ``{"bytes": int, "sha256": hex}`` of the uploaded bytes, after the file is closed."""
        return {"bytes": self.raw.position, "sha256": self.raw.sha.hexdigest()}

    def abort(self) -> None:
        self.raw.abort()
        self.close()

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            self.raw.abort()
        self.close()


class _Parts(io.RawIOBase):
    """Uploads an object by fsspec, in parts of at most WRITE_BYTES; after ``abort``, further bytes are dropped."""

    def __init__(self, path: RemotePath) -> None:
        self.path, self.position, self.aborted = path, 0, False
        self.sha = hashlib.sha256()
        self.file = answered(lambda: path.system.open(path.key, "wb", block_size=WRITE_BYTES), path)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def write(self, content) -> int:
        part = memoryview(content).cast("B")[:WRITE_BYTES]
        if not self.aborted:
            try:
                answered(lambda: self.file.write(part), self.path)
            except OSError:
                self.abort()
                raise
        self.sha.update(part)
        self.position += len(part)
        return len(part)

    def abort(self) -> None:
        """Cancel the upload, and remove its parts from the store if the store answers."""
        if self.aborted:
            return
        self.aborted, file = True, self.file
        with contextlib.suppress(OSError):  # the error that caused the abort is raised, not this one
            answered(lambda: _discard(file), self.path)

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if not self.aborted:
            try:
                answered(self.file.close, self.path)
            except OSError:
                self.abort()
                raise


def _discard(file) -> None:
    """Cancel the upload of ``file``, a file of fsspec, which ``close`` or ``__del__`` would otherwise complete."""
    file.autocommit = False
    try:
        file.discard()
    finally:
        if isinstance(file, io.BytesIO):  # memory://, whose object exists as soon as it is opened
            file.fs.store.pop(file.path, None)
        else:
            file.closed = True
