"""Rank 0's records of its clients: sessions, models, samplers, checkpoints, and operations that a restart has lost.

All records are in the store, an SQLite file, so that a restarted server knows its clients' names.
After a restart a model goes on from its latest saved state. That is its start, the checkpoint from
which it was loaded, or a state that ``save_state`` or ``serve.save_every_steps`` wrote. Later
operations are lost, and the model's client is told so before anything else runs.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Mapping

from megatron_rl.errors import quoted
from megatron_rl.serve import naming
from megatron_rl.serve.naming import CheckpointPath
from megatron_rl.serve.store import ACCEPTED, OperationRow, Row, Store
from megatron_rl.serve.values import AdapterSpec, Fault, RequestError

MOVES = ("forward_backward", "optim_step")  # operations that change a model
NAMED = 8  # maximum of lost operations that a message names


class Registry:
    """Holds the server's records of its clients. A client's lookup finds only the client's own records."""

    def __init__(self, store: Store, root: pathlib.Path) -> None:
        """Use the records in ``store``. ``root``: the folder of checkpoints."""
        self.store, self.root = store, root
        self.heard: dict[str, float] = {}  # session → time.monotonic() of its latest request

    def _owned(self, table: str, id: str, owner: str, what: str) -> Row:
        row = self.store.get(table, id)
        if row is None or row.owner != owner:
            raise RequestError(f"{what} {quoted(id, 200)} is not known here, or is another client's", status=404)
        return row

    # ---- sessions ---------------------------------------------------------------------------------------------------

    def open_session(self, owner: str, facts: Mapping[str, object]) -> str:
        session = naming.new_session()
        self.store.put("sessions", session, owner, "", facts)
        self.hear(session)
        return session

    def session(self, id: str, owner: str) -> Row:
        """Return an open session's record, and note the request as a sign of life.

        Raises RequestError if it has ended.
        """
        row = self._owned("sessions", id, owner, "session")
        if row.facts.get("finished"):
            raise RequestError(f"session {id} was finished by its client", status=410)
        self.hear(id)
        return row

    def known_session(self, id: str, owner: str) -> Row:
        """Return a session's record, whether the session is open or ended. Raises RequestError if there is none."""
        return self._owned("sessions", id, owner, "session")

    def finish_session(self, id: str, owner: str) -> None:
        """End a session. Its models may be dropped from memory at once to make room; their checkpoints stay."""
        self._owned("sessions", id, owner, "session")
        self.store.update("sessions", id, finished=True)
        self.heard.pop(id, None)

    def hear(self, session: str) -> None:
        self.heard[session] = time.monotonic()

    def is_silent(self, model: str, seconds: float) -> bool:
        """Return whether a model's session has made no request for more than ``seconds``."""
        session = model.partition(":")[0]
        return time.monotonic() - self.heard.get(session, -float("inf")) > seconds

    # ---- models -----------------------------------------------------------------------------------------------------

    def open_model(self, model: str, owner: str, session: str, facts: Mapping[str, object]) -> None:
        """Record a new model. ``facts``: its adapters, its base model and its first saved state."""
        self.store.put("models", model, owner, session, {"steps": 0, "stepped": -1, "corrupted": False, **facts})

    def model(self, id: str, owner: str) -> Row:
        return self._owned("models", id, owner, "model")

    def spec(self, model: str) -> AdapterSpec | None:
        value = self.store.get("models", model).facts["spec"]
        return None if value is None else AdapterSpec(**value)

    def restore_header(self, model: str) -> dict[str, object]:
        """Return the header of the message that restores a model on all ranks from its last saved state."""
        facts = self.store.get("models", model).facts
        saved = facts["saved"]
        if saved["folder"] is None:
            return {"do": "create", "model": model, "spec": facts["spec"]}
        return {"do": "load", "model": model, "folder": saved["folder"], "with_adam": saved["with_adam"]}

    def note_saved(self, model: str, seq: int, folder: pathlib.Path, *, with_adam: bool) -> None:
        """Record the folder of a model's saved state as the state from which it restarts.

        seq: the number of the last operation that the state includes.
        with_adam: whether the folder holds AdamW's state too.
        """
        saved = {"seq": seq, "folder": str(folder.absolute()), "with_adam": with_adam}
        self.store.update("models", model, saved=saved)

    def lost_since_saved(self, model: str) -> list[OperationRow]:
        """Return the operations that have changed the model since its latest saved state; a restart loses them."""
        saved = self.store.get("models", model).facts["saved"]["seq"]
        return [x for x in self.store.operations(model) if x.seq > saved and x.kind in MOVES and x.state != "failed"]

    def lost_words(self, model: str) -> tuple[str, Fault] | None:
        """Return (message, fault) that tells a model's client which operations were lost; None if none were."""
        lost = self.lost_since_saved(model)
        if not lost:
            return None
        saved = self.store.get("models", model).facts["saved"]
        names = ", ".join(f"{x.kind} {x.seq}" for x in lost[:NAMED])
        more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
        state = "its start" if saved["folder"] is None else f"its state after request {saved['seq']}"
        return (
            f"the server was started again, and model {model} goes on from {state}; lost: {names}{more}. Repeat them, "
            "or load a checkpoint",
            Fault.SERVER,
        )

    def next_seq(self, model: str) -> int:
        """Return the number that a model's next operation must have."""
        return max((x.seq for x in self.store.operations(model)), default=-1) + 1

    # ---- samplers and checkpoints -----------------------------------------------------------------------------------

    def open_sampler(self, id: str, owner: str, session: str, facts: Mapping[str, object]) -> None:
        self.store.put("samplers", id, owner, session, facts)

    def sampler(self, id: str, owner: str) -> Row:
        return self._owned("samplers", id, owner, "sampling session")

    def checkpoint(self, path: str, owner: str) -> Row:
        naming.parse_checkpoint(path)
        row = self._owned("checkpoints", path, owner, "checkpoint")
        expires = row.facts["expires"]
        if expires is not None and expires < time.time():
            raise RequestError(f"checkpoint {quoted(path, 200)} has expired (ttl_seconds)", status=404)
        return row

    def has_checkpoint(self, path: CheckpointPath) -> bool:
        return self.store.get("checkpoints", str(path)) is not None

    def note_checkpoint(
        self, path: CheckpointPath, owner: str, *, seq: int, ttl_s: float | None, metadata: Mapping | None
    ) -> None:
        folder = path.folder(self.root)
        model = self.store.get("models", path.model)
        facts = {
            "folder": str(folder.absolute()),
            "kind": path.kind,
            "seq": seq,
            "spec": model.facts["spec"],
            "base_model": model.facts["base_model"],
            "bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
            "expires": None if ttl_s is None else time.time() + ttl_s,
            "metadata": dict(metadata or {}),
        }
        self.store.put("checkpoints", str(path), owner, path.model, facts)

    def expired(self) -> list[Row]:
        now = time.time()
        return [x for x in self.store.everything("checkpoints") if x.facts["expires"] and x.facts["expires"] < now]

    # ---- operations -------------------------------------------------------------------------------------------------

    def accept(self, id: str, owner: str, line: str, seq: int, kind: str, digest: str) -> None:
        row = OperationRow(id=id, owner=owner, line=line, seq=seq, kind=kind, digest=digest, state=ACCEPTED)
        self.store.accept(row)


def spec_facts(spec: AdapterSpec | None) -> dict[str, object] | None:
    """Return an adapter spec as JSON-able values; None if every weight is trained."""
    return None if spec is None else dataclasses.asdict(spec)
