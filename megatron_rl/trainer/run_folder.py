"""The run's folder: checks that it can be written, its lock for one run at a time, and the repair of its records."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping

from megatron_rl.checkpoint.run_state import APPENDED, changed_settings
from megatron_rl.config import TrainConfig
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.distributed.agreement import this_job
from megatron_rl.distributed.collectives import gather_json
from megatron_rl.distributed.run_lock import RunLock
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.observability.metrics import METRICS_FILE, Row, read_metrics

log = logging.getLogger(__name__)
# A dry run cannot settle ``auto``: it does not know the run's device.
AUTO_DTYPE = ("model.dtype", "auto")
# Settings in which a finished run and the command that starts it again may differ.
OF_THE_RECORD = ("run.dir", "run.name", "run.deadline_s", "metrics.", "checkpoint.")


def check_run_folder(path: pathlib.Path, *, make: bool = True) -> None:
    """Create the run's folder; raise ConfigError if it cannot be created or written. Not a collective.

    Every rank calls it and raises by itself, before the ranks join a process group. So no rank
    waits for another.

    make: if False, create nothing and only check.
    """
    way_out = "name a folder that can be written by run.dir (or --run-dir)"
    try:
        if make:
            path.mkdir(parents=True, exist_ok=True)
        elif not _exists(path):
            return
    except FileExistsError as error:
        raise ConfigError(f"run.dir={quoted(str(path), 300)} is a file, not a folder; {way_out}") from error
    except (OSError, ValueError) as error:  # ValueError: a path with NUL in it
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"run.dir={quoted(str(path), 300)} cannot be made: {reason}; {way_out}") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        reason = "the file system is read-only" if os.statvfs(path).f_flag & os.ST_RDONLY else "no permission"
        raise ConfigError(f"run.dir={quoted(str(path), 300)} cannot be written: {reason}; {way_out}")


def _exists(path: pathlib.Path) -> bool:
    """Return whether the folder exists; create nothing.

    Raises OSError if ``path`` is a file, or if the folder does not exist and could not be created.
    """
    try:
        path.stat()
    except FileNotFoundError:
        parent = next(each for each in path.absolute().parents if each.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return False
        code = errno.EROFS if os.statvfs(parent).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(code, os.strerror(code), str(parent)) from None
    if not path.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    return True


def look_at_run_folder(folder: pathlib.Path) -> None:
    """Raise ConfigError if the folder cannot be written or another run holds its lock.

    It creates, locks and writes nothing.
    """
    check_run_folder(folder, make=False)
    try:
        RunLock(folder).check_free()
    except OSError as error:
        raise ConfigError(unwritable(folder, error)) from error


@contextlib.contextmanager
def held_run_folder(folder: pathlib.Path, deadline_s: float) -> Iterator[None]:
    """Return a context that holds the lock of the run's folder, on the job's first rank. Not a collective.

    deadline_s: ``run.deadline_s``, the longest wait for the store by which the job's ranks agree.

    Raises ConfigError if the folder cannot be written or another run holds the lock. The other ranks
    then end too, since all ranks must agree before they start (distributed/agreement.py).
    """
    check_run_folder(folder)
    if this_job(deadline_s=deadline_s).rank:
        yield
        return
    lock = RunLock(folder)
    try:
        lock.acquire()
    except OSError as error:
        raise ConfigError(unwritable(folder, error)) from error
    try:
        yield
    finally:
        lock.release()


def unwritable(folder: pathlib.Path, error: OSError) -> str:
    return f"run.dir={quoted(str(folder), 300)} cannot be written: {error}; make room there, or name another folder"


@contextlib.contextmanager
def on_every_rank(folder: pathlib.Path) -> Iterator[None]:
    """Return a context; if its ``with`` block raises ConfigError or OSError on one rank, all raise ConfigError.

    The context is a collective, which all ranks enter; the block must hold no collective.

    folder: the run's folder, which the message for an OSError names.
    """
    error: Exception | None = None
    message = None
    try:
        yield
    except ConfigError as raised:
        error, message = raised, str(raised)
    except OSError as raised:
        error, message = raised, unwritable(folder, raised)
    for said in gather_json(message):
        if said is not None:
            raise ConfigError(said) from error


def repair_records(folder: pathlib.Path) -> None:
    """Cut off the incomplete line that an interrupted write left in the run's records. Main rank only.

    Raises ConfigError for a metrics.jsonl with any other malformed line, which the run's report
    could not read.
    """
    for name in APPENDED:
        path = folder / name
        if path.is_file() and (lost := drop_unfinished_line(path)):
            log.error(
                "%s ended within a line, which an interrupted write has left: its %d bytes are removed", path, lost
            )
    path = folder / METRICS_FILE
    if path.exists():
        try:
            read_metrics(path)
        except ValueError as error:
            raise ConfigError(f"{error}, or move the file away") from error


def drop_unfinished_line(path: pathlib.Path) -> int:
    """Cut a file after its last newline; return the number of bytes removed."""
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - (1 << 16))
            file.seek(start)
            place = file.read(end - start).rfind(b"\n")
            if place >= 0:
                end = start + place + 1
                break
            end = start
        if end < size:
            file.truncate(end)
    return size - end


def refuse_finished(
    run_folder: pathlib.Path,
    train: TrainConfig,
    settings: Mapping,
    prompts: PromptDataset,
    folder: pathlib.Path,
    state: Mapping,
) -> None:
    """Raise ConfigError if a run has ended and the command to resume it changes settings.

    Such a command would train nothing. Not a collective.

    run_folder: the run's folder, which the error names.
    settings: the command's settings, as ``config_to_dict`` gives them.
    prompts: the training data; the call may move its reading position to the checkpoint's.
    folder, state: the checkpoint to resume from, and the content of its state.json.
    """
    if state.get("supervised_steps") is not None or state["feed"]["jobs"]:
        return
    prompts.load_state(state["prompts"])
    if prompts.remain(train.epochs) if train.epochs is not None else state["rollouts"] < train.num_rollouts:
        return
    changes = {
        key: values
        for key, values in changed_settings(state["config"], settings).items()
        if not key.startswith(OF_THE_RECORD) and (key, values[1]) != AUTO_DTYPE
    }
    if changes:
        said = [f"{key}={quoted(now)} (it was {quoted(before)})" for key, (before, now) in changes.items()]
        more = f" and {len(said) - 5} more" if len(said) > 5 else ""
        raise ConfigError(
            f"the run in {run_folder} has ended, with {state['rollouts']} rollouts trained ({folder.name}), and "
            f"this command has {', '.join(said[:5])}{more}: nothing would be trained; raise train.num_rollouts, or "
            "name another run.dir"
        )
    log.info("the run in %s has ended, with %d rollouts trained: nothing is left to do", run_folder, state["rollouts"])


def report_run(folder: pathlib.Path, config_yaml: str) -> None:
    """Write report.html from the metrics so far; if that fails, log an error and raise nothing.

    config_yaml: the run's settings as YAML, which the report shows.
    """
    try:
        if (folder / METRICS_FILE).stat().st_size:
            from megatron_rl.observability.report import write_report

            write_report(folder / METRICS_FILE, config_yaml, folder / "report.html")
    except (OSError, ValueError) as error:
        log.error("report.html was not written (%s); the run is not touched by it", error)


def written_rows(folder: pathlib.Path) -> list[Row]:
    """Return the rows of metrics.jsonl, for the table at the run's end; log an error and return [] if unreadable."""
    try:
        return read_metrics(folder / METRICS_FILE)
    except (OSError, ValueError) as error:
        log.error("the run's last table is left out (%s)", error)
        return []
