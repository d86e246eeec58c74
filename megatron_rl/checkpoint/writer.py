"""Writes a checkpoint while the run goes on: tensors are copied to the host at once, and go to disk in a thread.

Megatron-Core plans the write (``dist_checkpointing.save`` with ``async_sharded_save``: collectives, before anything is written) and ends it
(the request's finalize functions: ``.metadata``). Between the two it would fork processes; here a thread calls the same per-bucket function
(``FileSystemWriterAsync.write_preloaded_data``, 0.16.1 and 0.19.2), so that each rank knows how its own write went before any collective.
"""

from __future__ import annotations

import contextlib
import pathlib
import queue
import shutil
import threading
from collections.abc import Sequence

import torch

from megatron_rl.checkpoint.folder import begin, complete, digest
from megatron_rl.exchange import gather_json
from megatron_rl.types import CheckpointError

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedBase  # isort: skip
from megatron.core.dist_checkpointing.strategies import filesystem_async  # isort: skip
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync  # isort: skip


class _Results(queue.Queue):
    """What ``retrieve_write_results`` reads from; Megatron-Core's own is a manager's, in another process."""


class PendingSave:
    """One checkpoint on its way to disk. ``outcome`` and ``finish`` are collectives, everything else is this rank's alone."""

    def __init__(self, root: pathlib.Path, iteration: int, entries: Sequence[ShardedBase], texts: dict[str, str], *, is_main: bool):
        """texts: small files that the main rank adds, by name. Raises CheckpointError on every rank where the folder cannot be made."""
        self.root, self.iteration, self.is_main = root, iteration, is_main
        self.folder = root / f"iter_{iteration:07d}.partial"
        self.texts = texts if is_main else {}
        self.error: Exception | None = None
        self.digests: dict[str, dict] = {}
        raised: Exception | None = None
        if is_main:
            try:
                begin(root, iteration)
            except OSError as error:
                raised = CheckpointError(f"no checkpoint can be begun in {root}: {error}")
        raise_everywhere(raised)
        with _own_results() as results:
            state = {"tensors": dict(enumerate(entries))}
            self.request = dist_checkpointing.save(state, str(self.folder), validate_access_integrity=True, async_sharded_save=True)
        self.results = results
        self.buckets = [] if self.request.async_fn is None else _on_host(self.request.async_fn_args[1])
        self.transforms = [] if self.request.async_fn is None else self.request.async_fn.args[0]
        self.thread = threading.Thread(target=self._write, name=f"checkpoint-{iteration}")
        self.thread.start()

    def _write(self) -> None:
        """This rank's files, each digested when it is written."""
        try:
            written: dict[int, list] = {}
            for number, bucket in enumerate(self.buckets):
                answers, count = queue.Queue(), queue.Queue()
                count.put(number)
                FileSystemWriterAsync.write_preloaded_data(self.transforms, number, bucket, answers, count, use_fsync=True)
                _, answer = answers.get_nowait()
                if isinstance(answer, Exception):
                    raise answer
                written[number] = answer
                path = pathlib.Path(bucket[0])
                self.digests[str(path.relative_to(self.folder))] = digest(path)
            for name, text in self.texts.items():
                (self.folder / name).write_text(text, encoding="utf-8")
            if self.buckets:
                self.results.put(written)
        except Exception as error:  # noqa: BLE001 (raised on every rank by finish)
            self.error = error
        self.buckets = []

    def is_written(self) -> bool:
        """Whether every rank's thread has ended; a collective."""
        ended = [not self.thread.is_alive()]
        return all(x for (x,) in gather_json(ended))

    def finish(self) -> pathlib.Path:
        """Waits for every rank's thread and makes the folder a checkpoint. Raises CheckpointError on every rank where one could not write;
        the unfinished folder is then removed, and what was there before stays."""
        self.thread.join()
        try:
            raise_everywhere(self.error and CheckpointError(f"checkpoint {self.iteration} in {self.root} was not written: {self.error}"))
        except CheckpointError:
            if self.is_main:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise
        for finalize in self.request.finalize_fns:
            finalize()
        digests = {name: found for theirs in gather_json(self.digests) for name, found in theirs.items()}
        raised: Exception | None = None
        if self.is_main:
            try:
                complete(self.folder, digests)
            except OSError as error:
                shutil.rmtree(self.folder, ignore_errors=True)
                raised = CheckpointError(f"checkpoint {self.iteration} in {self.root} could not be completed: {error}")
        raise_everywhere(raised)
        return self.root / f"iter_{self.iteration:07d}"


@contextlib.contextmanager
def _own_results():
    """The writer's queue of results, ours: Megatron-Core asks for it by this name when it builds the writer."""
    (name,) = [x for x in ("_get_write_results_queue", "get_write_results_queue") if hasattr(filesystem_async, x)]  # 0.16.1, 0.19.2
    results, kept = _Results(), getattr(filesystem_async, name)
    setattr(filesystem_async, name, lambda *_: results)
    try:
        yield results
    finally:
        setattr(filesystem_async, name, kept)


def _on_host(buckets: Sequence[tuple]) -> list[tuple]:
    """Copies of what is to be written: the run goes on changing the tensors."""
    staged = []
    for file_name, storage_key, (raw, tensors) in buckets:
        staged.append((file_name, storage_key, (raw, [(item, tensor.detach().to("cpu", copy=True)) for item, tensor in tensors])))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return staged


def raise_everywhere(error: CheckpointError | None) -> None:
    """Raises on every rank the CheckpointError that one of them met; a collective."""
    for rank, message in enumerate(gather_json(None if error is None else str(error))):
        if message is not None:
            raise CheckpointError(f"rank {rank}: {message}") from error
