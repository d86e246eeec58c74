"""The server's records on disk, in one SQLite file that outlives a crash. On rank 0 alone; thread-safe.

The file holds sessions, models, samplers, checkpoints, and every accepted operation with its state.
Bodies and answers are not kept. After a crash, operations that were under way are lost, and the file
shows which ones. A killed process loses no committed row (write-ahead log). A machine that loses
power may lose the latest rows.
"""

from __future__ import annotations

import json
import pathlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_rl.errors import CheckpointError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, owner TEXT, created REAL, facts TEXT);
CREATE TABLE IF NOT EXISTS models (id TEXT PRIMARY KEY, owner TEXT, session TEXT, created REAL, facts TEXT);
CREATE TABLE IF NOT EXISTS samplers (id TEXT PRIMARY KEY, owner TEXT, session TEXT, created REAL, facts TEXT);
CREATE TABLE IF NOT EXISTS checkpoints (id TEXT PRIMARY KEY, owner TEXT, model TEXT, created REAL, facts TEXT);
CREATE TABLE IF NOT EXISTS operations (
    id TEXT PRIMARY KEY, owner TEXT, line TEXT, seq INTEGER, kind TEXT, digest TEXT, state TEXT);
CREATE INDEX IF NOT EXISTS by_line ON operations (line, seq);
"""
ACCEPTED, DONE, FAILED = "accepted", "done", "failed"
BUSY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Holds the record of one session, model, sampler or checkpoint.

    owner: a digest of the client's key.
    parent: the session of a model or sampler, or the model of a checkpoint; "" for a session.
    created: time.time() of its creation.
    facts: everything else, as JSON-able values.
    """

    id: str
    owner: str
    parent: str
    created: float
    facts: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRow:
    """Holds the record of one accepted operation.

    line: the name of its model or sampler.
    seq: its number among that model's or sampler's operations.
    digest: a digest of the request, to recognise a repeated one.
    state: ACCEPTED, DONE or FAILED.
    """

    id: str
    owner: str
    line: str
    seq: int
    kind: str
    digest: str
    state: str


_PARENT = {"sessions": "''", "models": "session", "samplers": "session", "checkpoints": "model"}


class Store:
    """Reads and writes the server's SQLite file. Every method is one transaction.

    Raises CheckpointError if the file is damaged, is no SQLite file, or cannot be opened.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.executescript(_SCHEMA)
            found = self._file.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise sqlite3.DatabaseError(found)
            for table in _PARENT:
                self.everything(table)
            self.operations()
        except (OSError, sqlite3.Error, ValueError) as error:
            raise CheckpointError(
                f"{path}, which holds the clients' sessions, models and checkpoints, cannot be read: {error}; put a "
                "copy back, or move it away (with its -wal and -shm) to begin anew: the checkpoints' folders stay"
            ) from error

    def put(self, table: str, id: str, owner: str, parent: str, facts: Mapping[str, object]) -> None:
        """Write a row of the table ``sessions``, ``models``, ``samplers`` or ``checkpoints``.

        A row of the same id is replaced.
        """
        columns = "id, owner, created, facts" if table == "sessions" else f"id, owner, {_PARENT[table]}, created, facts"
        values = [id, owner, *([] if table == "sessions" else [parent]), time.time(), json.dumps(facts)]
        places = ", ".join("?" for _ in values)
        with self._lock:
            self._file.execute(f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({places})", values)

    def update(self, table: str, id: str, **facts: object) -> None:
        """Overwrite the given facts (JSON-able values) of a row. Its other facts stay."""
        with self._lock:
            found = self._file.execute(f"SELECT facts FROM {table} WHERE id = ?", [id]).fetchone()
            merged = {**json.loads(found[0]), **facts}
            self._file.execute(f"UPDATE {table} SET facts = ? WHERE id = ?", [json.dumps(merged), id])

    def get(self, table: str, id: str) -> Row | None:
        rows = list(self._rows(table, "id = ?", [id]))
        return rows[0] if rows else None

    def of_owner(self, table: str, owner: str, parent: str | None = None) -> list[Row]:
        """Return an owner's rows of a table, the newest first.

        parent: the session or model whose rows are returned; None returns all rows of the owner.
        """
        where, values = "owner = ?", [owner]
        if parent is not None:
            where, values = f"{where} AND {_PARENT[table]} = ?", [owner, parent]
        return list(self._rows(table, f"{where} ORDER BY created DESC", values))

    def everything(self, table: str) -> list[Row]:
        return list(self._rows(table, "1 = 1 ORDER BY created", []))

    def _rows(self, table: str, where: str, values: list) -> Iterator[Row]:
        query = f"SELECT id, owner, {_PARENT[table]}, created, facts FROM {table} WHERE {where}"
        with self._lock:
            found = self._file.execute(query, values).fetchall()
        for id, owner, parent, created, facts in found:
            yield Row(id=id, owner=owner, parent=parent, created=created, facts=json.loads(facts))

    def remove(self, table: str, id: str) -> None:
        with self._lock:
            self._file.execute(f"DELETE FROM {table} WHERE id = ?", [id])

    def accept(self, operation: OperationRow) -> None:
        """Record an accepted operation. Call it before the client is told that the operation was accepted."""
        fields = ("id", "owner", "line", "seq", "kind", "digest", "state")
        values = [operation.id, operation.owner, operation.line, operation.seq, operation.kind, operation.digest]
        with self._lock:
            self._file.execute(
                f"INSERT OR REPLACE INTO operations ({', '.join(fields)}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                [*values, operation.state],
            )

    def end(self, id: str, state: str) -> None:
        """Record that an operation has ended. ``state``: DONE or FAILED."""
        with self._lock:
            self._file.execute("UPDATE operations SET state = ? WHERE id = ?", [state, id])

    def operations(self, line: str | None = None) -> list[OperationRow]:
        """Return the operations of a line (a model or sampler), or of all lines if None, ordered by line and number."""
        where, values = ("line = ?", [line]) if line is not None else ("1 = 1", [])
        query = f"SELECT id, owner, line, seq, kind, digest, state FROM operations WHERE {where} ORDER BY line, seq"
        with self._lock:
            found = self._file.execute(query, values).fetchall()
        names = ("id", "owner", "line", "seq", "kind", "digest", "state")
        return [OperationRow(**dict(zip(names, row, strict=True))) for row in found]

    def operation(self, id: str) -> OperationRow | None:
        query = "SELECT id, owner, line, seq, kind, digest, state FROM operations WHERE id = ?"
        with self._lock:
            row = self._file.execute(query, [id]).fetchone()
        names = ("id", "owner", "line", "seq", "kind", "digest", "state")
        return None if row is None else OperationRow(**dict(zip(names, row, strict=True)))

    def forget_operations(self, line: str) -> None:
        with self._lock:
            self._file.execute("DELETE FROM operations WHERE line = ?", [line])

    def close(self) -> None:
        with self._lock:
            self._file.close()
