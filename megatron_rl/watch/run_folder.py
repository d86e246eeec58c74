"""The reader of a run's folder while the run writes to it."""

from __future__ import annotations

import json
import pathlib

from megatron_rl.distributed.run_lock import LockReader
from megatron_rl.errors import ConfigError
from megatron_rl.json_text import check, open_regular, parse_json, read_bytes
from megatron_rl.observability.completions import FILE_NAME, read_completions
from megatron_rl.observability.report import PHASES, completion_of_page
from megatron_rl.observability.run_status import RunState, read_status
from megatron_rl.observability.saved_rollouts import read_rollout, saved_numbers

METRICS = "metrics.jsonl"
MOST_BYTES = 1 << 22  # the most bytes of one answer's rows; the page asks again until it has them all

MOST_COMPLETIONS_BYTES = 1 << 28


class RunFolder:
    """Reads the data of the web page from a run's files. Raises ConfigError for a folder that holds no run."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self._lock = path, LockReader(path)
        if not (path / METRICS).is_file() and not (path / "config.yaml").is_file():
            raise ConfigError(f"{path} holds no run: neither {METRICS} nor config.yaml is there; name a run's folder")

    def facts(self) -> dict[str, object]:
        """Return {"name": ..., "state": ..., "phases": ..., "config": ..., "rollouts": ...} of the run.

        state: as ``_state`` returns it.
        phases: the titles of a step's phases (observability.report.PHASES).
        config: the text of config.yaml; "" if there is no such file.
        rollouts: the numbers of the saved rollouts.
        """
        return {
            "name": self.path.resolve().name,
            "state": self._state(),
            "phases": PHASES,
            "config": self._config(),
            "rollouts": saved_numbers(self.path),
        }

    def _state(self) -> dict[str, object]:
        """Return {"name": the run's state, "total_steps": ..., "at": ..., "fault": ...}.

        name: "running" if the lock of the run's folder is held. "ended", "preempted", "stopped" or
            "failed" as the run's status file says. "silent" if the run was killed. "unknown" if the
            folder has no readable status, as the folder of a Tinker model.
        total_steps: the number of optimizer steps of the whole run; None if unknown.
        at: a time in seconds since 1970; None if unknown. For "running" it is when the run last
            touched its lock. For "silent" and "unknown" it is the run's last sign, such as the time
            of the last metrics row. For the other states it is when the status was written.
        fault: what is malformed in the status file; None if nothing is.
        """
        status, fault = None, None
        try:
            status = read_status(self.path)
        except ConfigError as error:
            fault = str(error)
        lock, metrics = self._lock.look(), self.path / METRICS
        total = status.total_steps if status is not None else None
        if lock is not None and lock[0]:
            return {"name": "running", "total_steps": total, "at": lock[1], "fault": fault}
        if lock is None and status is not None and status.state is not RunState.RUNNING:
            return {"name": status.state.value, "total_steps": total, "at": status.at, "fault": None}
        signs = [status.at] if status is not None else []
        signs += [lock[1]] if lock is not None else []
        signs += [metrics.stat().st_mtime] if metrics.is_file() else []
        name = "unknown" if lock is None and status is None else "silent"
        return {"name": name, "total_steps": total, "at": max(signs, default=None), "fault": fault}

    def _config(self) -> str:
        file = self.path / "config.yaml"
        if not file.is_file():
            return ""
        return read_bytes(file, "text", most_bytes=MOST_BYTES, error=ValueError).decode("utf-8", "replace")

    def rows(self, offset: int) -> dict[str, object]:
        """Return {"rows": whole rows of metrics.jsonl from byte ``offset`` on, "offset": ..., "restarted": ...}.

        The returned offset is the byte from which the next call reads on. ``restarted`` is True if the file is
        shorter than ``offset``. Then the run resumed from a checkpoint and removed rows, and the
        rows are read from byte 0 again.

        Raises ValueError for a line that is no JSON object.
        """
        file = self.path / METRICS
        size = file.stat().st_size if file.is_file() else 0
        restarted = offset > size
        start = 0 if restarted else offset
        if size == start:
            return {"rows": [], "offset": start, "restarted": restarted}
        with open_regular(file) as opened:
            opened.seek(start)
            part = opened.read(MOST_BYTES)
        if len(part) == MOST_BYTES and b"\n" not in part:
            raise ValueError(f"{file} has a line of more than {MOST_BYTES} bytes behind byte {start}; delete it")
        part = part[: part.rfind(b"\n") + 1]
        rows = []
        for line in part.splitlines():
            where = f"{file}, behind byte {start}"
            rows.append(check(parse_json(line, where, error=ValueError), where, dict, error=ValueError))
        return {"rows": rows, "offset": start + len(part), "restarted": restarted}

    def rollout(self, number: int) -> dict[str, object]:
        """Return the saved rollout ``number`` (from 1), as the dict of ``saved_rollouts.read_rollout``."""
        return read_rollout(self.path, number)

    def completions(self) -> dict[str, object]:
        """Return {"completions": [a dict for each recorded completion]}, for a run that saves no rollouts."""
        file = self.path / FILE_NAME
        if file.is_file() and (size := file.stat().st_size) > MOST_COMPLETIONS_BYTES:
            raise ValueError(f"{file} has {size} bytes; the page shows at most {MOST_COMPLETIONS_BYTES}")
        recorded = read_completions(file) if file.is_file() else ()
        return {"completions": list(map(completion_of_page, recorded))}


def as_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
