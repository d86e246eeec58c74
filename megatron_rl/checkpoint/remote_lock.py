"""The lock of a folder in an object store: one run at a time writes checkpoints there, from whatever host.

``lock.json`` names its holder in the same fields as the lock file of distributed/run_lock.py. A
further field is a number that the holder increases every BEAT_S seconds. The number replaces a
modification time, which the holder of an object cannot renew. Clocks are not compared. Not every
store has conditional writes, so none is used. A process that writes the lock reads it again after
SETTLE_S seconds. If several processes wrote it, the last writer holds it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator

from megatron_rl.distributed.run_lock import MOST_BYTES, SETTLE_S, RunLock
from megatron_rl.errors import ConfigError, StoreError, quoted
from megatron_rl.json_text import field, parse_json
from megatron_rl.storage.remote import LEAVE_S, RemotePath

BUCKETS = ("s3", "s3a", "gs", "gcs")


class RemoteLock(RunLock):
    """Holds the lock of a folder in an object store from ``acquire`` to ``release``. Not a collective."""

    key = "checkpoint.dir"

    def __init__(self, folder: RemotePath, **named) -> None:
        super().__init__(folder, **named)
        self.number = 0

    def _created(self) -> bool:
        return not self.path.is_file() and self._replaced()

    def _replaced(self) -> bool:
        self._touch()
        time.sleep(SETTLE_S)
        return self._is_mine()

    def _touch(self) -> None:
        self.number += 1
        self.path.write_bytes(json.dumps(json.loads(self._content()) | {"number": self.number}).encode())

    def _read(self) -> tuple[dict | None, int | None]:
        """Return (fields that name the holder, a number that the holder increases while it lives) from the lock's file.

        They are (None, None) if there is no lock, and (None, 0) if the file's content is not a lock's.
        """
        try:
            with self.path.open("rb") as file:
                content = file.read(MOST_BYTES)
        except FileNotFoundError:
            return None, None
        where = str(self.path)
        try:
            holder = parse_json(content, where)
            field(holder, "token", str, where)
            field(holder, "pid", int, where)
            number = field(holder, "number", int, where)
            return {name: value for name, value in holder.items() if name != "number"}, number
        except (ConfigError, TypeError):
            return None, 0


def look_at_store(root: RemotePath) -> None:
    """Raise ConfigError if the store cannot be read, has no such bucket, or another run holds the lock."""
    try:
        RemoteLock(root).check_free()
        if root.scheme in BUCKETS and _lacks_bucket(root):
            raise ConfigError(
                f"checkpoint.dir={quoted(str(root), 300)}: there is no such bucket; make it, or name another"
            )
    except OSError as error:
        raise ConfigError(_unwritable(root, error)) from error


def _lacks_bucket(root: RemotePath) -> bool:
    try:
        return not root.bucket().exists()
    except StoreError:  # a key may be allowed to list its own folder only
        return False


@contextlib.contextmanager
def held_store(root: RemotePath, *, is_first: bool) -> Iterator[None]:
    """Return a context that holds the lock of the folder ``root``, on the job's first rank. Not a collective.

    is_first: whether this is the first rank. Other ranks take no lock.

    Raises ConfigError if the store cannot be written or another run holds the lock.
    """
    if not is_first:
        yield
        return
    lock = RemoteLock(root)
    try:
        lock.acquire()
    except OSError as error:
        raise ConfigError(_unwritable(root, error)) from error
    try:
        yield
    except BaseException:
        lock.path = lock.path.within(LEAVE_S)
        raise
    finally:
        lock.release()


def _unwritable(root: RemotePath, error: OSError) -> str:
    return (
        f"checkpoint.dir={quoted(str(root), 300)} cannot be written: {error}; name a folder of a bucket that is there, "
        "and see that the driver's variables (AWS_…, GOOGLE_APPLICATION_CREDENTIALS) name a key that may write to it"
    )
