"""The names of sessions, models, samplers, operations and checkpoints: how they are made and read. No side effects."""

from __future__ import annotations

import pathlib
import re
import secrets
from dataclasses import dataclass

from megatron_rl.errors import quoted
from megatron_rl.serve.values import RequestError

STATE, SAMPLER = "weights", "sampler_weights"  # the two kinds of checkpoints, as written in a path
BASE = "base"  # the sampler name of the base model's own weights
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPath:
    """Holds the parts of a checkpoint's path: ``tinker://<model>/<kind>/<name>``."""

    model: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"

    @property
    def id(self) -> str:
        """Return the checkpoint's id among the model's checkpoints, as clients see it: ``<kind>/<name>``."""
        return f"{self.kind}/{self.name}"

    def folder(self, root: pathlib.Path) -> pathlib.Path:
        """Return the checkpoint's folder under ``root``, the folder of all checkpoints.

        Colons in the model's name are replaced, since not every file system takes them.
        """
        return root / self.model.replace(":", "_") / self.kind / self.name


def parse_checkpoint(path: str) -> CheckpointPath:
    """Return the parts of a checkpoint's path. Raises RequestError for a text that is no such path."""
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in (STATE, SAMPLER):
        raise RequestError(f"path={quoted(path, 200)} is no tinker://<model>/{STATE}/<name>, nor .../{SAMPLER}/<name>")
    return CheckpointPath(model=parts[0], kind=parts[1], name=checked_name(parts[2]))


def checked_name(name: str) -> str:
    """Return a checkpoint's name unchanged. Raises RequestError if it cannot be a folder's name."""
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"the checkpoint's name {quoted(name, 100)} must be letters, digits, '.', '_' and '-', at most 200, and "
            "begin with a letter or a digit"
        )
    return name


def new_session() -> str:
    """Return a session's name that nobody can guess."""
    return f"s-{secrets.token_hex(8)}"


def model_name(session: str, seq: int) -> str:
    """Return the name of a session's ``seq``-th model. The SDK derives the same name."""
    return f"{session}:train:{seq}"


def sampler_name(session: str, seq: int) -> str:
    return f"{session}:sample:{seq}"


def operation_name(line: str, seq: int) -> str:
    return f"{line}:{seq}"


def line_of(operation: str) -> tuple[str, int]:
    """Return (line, number) from an operation's name. Raises RequestError for a text that is no such name.

    The line is the name of the operation's model or sampler.
    """
    line, _, seq = operation.rpartition(":")
    if not line or not seq.isdecimal():
        raise RequestError(f"request_id={quoted(operation, 200)} is none of this server's", status=404)
    return line, int(seq)
