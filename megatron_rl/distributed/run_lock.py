"""A lock on a run's folder: one run at a time, on one host or on several hosts that share the file system.

The lock is a small JSON file that names its holder by host, machine, process id and a random token.
A "machine" here is one boot of a host, with one namespace of process ids, such as a container's. The
file also holds the process's start, in clock ticks since boot. The holder touches the file every
BEAT_S seconds. A process that finds a lock decides:

1. The holder is on the same machine: the lock is stale if no process of that id and start lives. So
   a crash is seen at once.
2. The holder is on another machine: the lock is stale if nothing touches it for STALE_S seconds.
   Clocks are not compared; only changes of the file count.

A stale lock is replaced. If two processes replace it at once, the last one holds it: each reads the
lock again after SETTLE_S seconds. A holder that was stopped for longer than STALE_S may lose its
lock. It learns so at its next touch of the file, and ends. So two runs write side by side for at
most BEAT_S seconds.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Callable

from megatron_rl.errors import ConfigError
from megatron_rl.json_text import field, parse_json

log = logging.getLogger(__name__)
LOCK = "lock.json"
BEAT_S, STALE_S, SETTLE_S, POLL_S = 5.0, 60.0, 1.0, 0.5
MOST_BYTES = 1 << 16


def machine() -> str | None:
    """Return a name of this host's current boot and of its namespace of process ids; None if it is not known."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def started_ticks(pid: int) -> int | None:
    """Return when a process of this machine started, in clock ticks since boot; None if the process does not live."""
    try:
        # the process's name, in parentheses, may itself hold spaces and parentheses
        after_name = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if after_name[0] in "ZXx" else int(after_name[19])
    except (OSError, IndexError, ValueError):
        return None


class RunLock:
    """Holds the lock of one folder from ``acquire`` to ``release``. Not a collective: only the main rank has a lock.

    key: the setting that names the folder, for messages.

    checkpoint/remote_lock.py has the lock of a folder in object storage.
    """

    key = "run.dir"

    def __init__(self, folder: pathlib.Path, *, lost: Callable[[str], None] | None = None) -> None:
        """Make the lock of ``folder`` without taking it.

        lost: a function that is called with a message, in a thread, if another run replaces the
            lock. None ends the process instead.
        """
        self.path = folder / LOCK
        self.token = secrets.token_hex(16)
        self._lost = lost or _end_process
        self._released = threading.Event()

    # ---- taking it -------------------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Take the lock, or raise ConfigError naming the run that holds it. Raises OSError if it cannot be written."""
        while not self._created():
            holder, touched = self._read()
            if holder is None and touched is None:  # released meanwhile
                continue
            self._refuse_unless_stale(holder, touched)
            if self._read()[0] == holder and self._replaced():
                log.warning("%s was left by a run that is gone (%s): taken over", self.path, _who(holder))
                break
        threading.Thread(target=self._keep_beating, name="run-lock", daemon=True).start()

    def check_free(self) -> None:
        """Raise ConfigError or OSError as ``acquire`` would, and take nothing."""
        holder, touched = self._read()
        if touched is not None:
            self._refuse_unless_stale(holder, touched)

    def _refuse_unless_stale(self, holder: dict | None, touched: int | None) -> None:
        if not self._is_stale(holder, touched):
            raise ConfigError(
                f"{self.path.parent} is in use by another run ({_who(holder)}); wait for its end, or name another "
                f"{self.key}"
            )

    def _content(self) -> bytes:
        facts = {"host": socket.gethostname(), "machine": machine(), "pid": os.getpid()}
        return json.dumps({**facts, "started_ticks": started_ticks(os.getpid()), "token": self.token}).encode()

    def _created(self) -> bool:
        """Create the file and return True; return False if it exists. This is atomic on shared file systems too."""
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, self._content())
            os.fsync(descriptor)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return True

    def _read(self) -> tuple[dict | None, int | None]:
        """Return (holder, time of the file's last touch in ns); the holder is None if the text is not a lock's.

        Both are None if there is no file. The file is opened each time, so that a network file
        system asks its server.
        """
        try:
            with self.path.open("rb") as file:
                touched = os.fstat(file.fileno()).st_mtime_ns
                content = file.read(MOST_BYTES)
        except FileNotFoundError:
            return None, None
        where = str(self.path)
        try:
            holder = parse_json(content, where)
            field(holder, "token", str, where)
            field(holder, "pid", int, where)
            return holder, touched
        except (ConfigError, TypeError):
            return None, touched

    def _is_stale(self, holder: dict | None, touched: int) -> bool:
        if (lives := _lives_here(holder)) is not None:
            return not lives
        log.warning("%s is held by %s; waiting up to %g s for a sign that it lives", self.path, _who(holder), STALE_S)
        deadline = time.monotonic() + STALE_S
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            found, again = self._read()
            if again is None:
                return True
            if found != holder or again != touched:
                return False
        return True

    def _replaced(self) -> bool:
        unfinished = self.path.with_name(f"{LOCK}.{self.token}.tmp")
        try:
            unfinished.write_bytes(self._content())
            os.replace(unfinished, self.path)
        finally:
            unfinished.unlink(missing_ok=True)
        time.sleep(SETTLE_S)
        return self._is_mine()

    def _is_mine(self) -> bool:
        holder, _ = self._read()
        return holder is not None and holder["token"] == self.token

    # ---- holding it ------------------------------------------------------------------------------------------------

    def _keep_beating(self) -> None:
        while not self._released.wait(BEAT_S):
            try:
                self.beat()
            except OSError as error:  # the file system may be away for a while
                log.warning("%s cannot be touched: %s", self.path, error)

    def beat(self) -> None:
        """Touch the lock file. Create it again if it was removed, and call ``lost`` if another run has replaced it."""
        holder, touched = self._read()
        if self._released.is_set():
            return
        if holder is not None and holder["token"] == self.token:
            self._touch()
        elif touched is not None or not self._created():
            self._released.set()
            self._lost(
                f"another run ({_who(holder)}) has taken over {self.path}: this run ends, or their files would mix"
            )

    def _touch(self) -> None:
        os.utime(self.path)

    def release(self) -> None:
        """Remove the lock file, unless another run has replaced it."""
        self._released.set()
        try:
            if self._is_mine():
                self.path.unlink(missing_ok=True)
        except OSError as error:  # no harm: the lock is stale once this process has ended
            log.warning("%s cannot be removed: %s", self.path, error)


class LockReader:
    """Tells from a folder's lock whether the folder's run lives, without waiting and without taking the lock.

    clock: returns monotonic seconds, to measure how long the lock was not touched.
    wall: returns seconds since 1970.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._lock, self._clock, self._wall = RunLock(folder), clock, wall
        self._touched: int | None = None
        self._silent_since: float | None = None

    def look(self) -> tuple[bool, float] | None:
        """Return (whether the holder lives, its last touch in seconds since 1970); None if there is no lock.

        A holder on another machine counts as alive if it touched its lock in the last STALE_S seconds. The
        first call compares the file's time with this host's clock. Later calls measure the time
        since they saw the file change.
        """
        holder, touched = self._lock._read()
        if touched is None:
            return None
        at_s, now_s = touched / 1e9, self._clock()
        if self._touched is None:
            self._silent_since = now_s - max(0.0, self._wall() - at_s)
        elif touched != self._touched:
            self._silent_since = now_s
        self._touched = touched
        lives = _lives_here(holder)
        return now_s - self._silent_since < STALE_S if lives is None else lives, at_s


def _lives_here(holder: dict | None) -> bool | None:
    """Return whether a lock's holder on this machine lives; None if it is on another machine or names no machine."""
    if holder is None or holder.get("machine") is None or holder["machine"] != machine():
        return None
    ticks = started_ticks(holder["pid"])
    return ticks is not None and ticks == holder.get("started_ticks")


def _who(holder: dict | None) -> str:
    return "a run that it does not name" if holder is None else f"process {holder['pid']} on {holder.get('host')}"


def _end_process(message: str) -> None:
    os.write(2, f"megatron_rl: {message}\n".encode())
    os._exit(1)
