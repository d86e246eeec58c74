"""The writer of a checkpoint while the run goes on: tensors are copied to the host, then a thread writes them to disk.

Megatron-Core (``dist_checkpointing.save`` with ``async_sharded_save``) plans the write by
collectives. Then it would fork processes that write the tensors. At the end its finalize functions,
which are collectives too, write ``.metadata``. Here a thread takes the place of the processes, and
calls the same function for each file (``FileSystemWriterAsync.write_preloaded_data``, 0.16.1 and
0.19.2). So each rank knows whether its own write succeeded before the last collectives.

The main rank alone writes ``common.pt``, ``.metadata`` and ``metadata.json``, in the middle of
Megatron-Core's collectives. If one of these writes fails, the error is kept until the collectives
are over.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pathlib
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from megatron_rl.checkpoint.folder import begin, complete, digest, name_of
from megatron_rl.checkpoint.pickled import guarded
from megatron_rl.distributed.collectives import gather_json
from megatron_rl.distributed.platform import HOST, on_host
from megatron_rl.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_rl.checkpoint.remote_folder import RemotePlace
    from megatron_rl.storage.remote import RemotePath

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing import serialization  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedBase  # isort: skip
from megatron.core.dist_checkpointing.strategies import common, filesystem_async  # isort: skip
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync  # isort: skip

# 0.19.2 writes no common.pt
COMMON = [(x, "save_common") for name, x in vars(common).items() if name == "TorchCommonSaveStrategy"]
# 0.19.2 would have NVIDIA's resiliency package write; its own writer is still there.
OURS = {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}
SMALL_FILES = (*COMMON, (FileSystemWriterAsync, "finish"), (serialization, "save_config"))


class DiskPlace:
    """Writes one checkpoint's files to a disk that all ranks share, in a folder that ``complete`` renames.

    ``RemotePlace`` (checkpoint/remote_folder.py) has the same methods for an object store.

    scratch: the folder for the files that Megatron-Core writes itself.
    """

    def __init__(self, root: pathlib.Path, iteration: int) -> None:
        self.root, self.iteration = root, iteration
        self.folder = self.scratch = root / f"{name_of(iteration)}.partial"

    def begin(self) -> None:
        begin(self.root, self.iteration)

    def write_bucket(self, transforms: Sequence, number: int, bucket: tuple) -> tuple[list, str, dict[str, object]]:
        """Write one file of tensors; return (torch's WriteResult of each tensor, the file's name, its digest).

        transforms: Megatron-Core's transforms of the written tensors.
        number: the file's index among this rank's files.
        bucket: Megatron-Core's triple (path, file name, (objects, tensors)).
        """
        answers, count = queue.Queue(), queue.Queue()
        count.put(number)
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, answers, count, use_fsync=True)
        _, answer = answers.get_nowait()
        if isinstance(answer, Exception):
            raise answer
        path = pathlib.Path(bucket[0])
        return answer, str(path.relative_to(self.folder)), digest(path)

    def write_file(self, name: str, content: bytes) -> dict[str, object]:
        """Write a small file, flushed to the disk, and return its digest: bytes and SHA-256."""
        with (self.folder / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return digest(self.folder / name)

    def write_prefix(self, name: str, path: pathlib.Path, size: int) -> dict[str, object]:
        raise AssertionError(f"{path} lies on the disk that holds the checkpoint")

    def complete(self, digests: Mapping[str, Mapping[str, object]]) -> None:
        complete(self.folder, digests)

    def free(self, names: Sequence[str]) -> None:
        """Remove this rank's files of these names: on a full disk the run's metrics need the room."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing: unlike RemotePlace, this object has no temporary folder to remove."""

    def abandon(self) -> None:
        """Remove the unfinished folder, on the main rank."""
        shutil.rmtree(self.folder, ignore_errors=True)


def place_of(root: pathlib.Path | RemotePath, iteration: int) -> DiskPlace | RemotePlace:
    """Return the object that writes the files of checkpoint ``iteration`` under ``root``, on a disk or in a store."""
    if isinstance(root, pathlib.Path):
        return DiskPlace(root, iteration)
    from megatron_rl.checkpoint.remote_folder import RemotePlace

    return RemotePlace(root, iteration)


class PendingSave:
    """Writes this rank's files of one checkpoint in a thread. The constructor and ``finish`` are collectives."""

    def __init__(
        self,
        root: pathlib.Path | RemotePath,
        iteration: int,
        entries: Sequence[ShardedBase],
        texts: dict[str, str],
        *,
        is_main: bool,
        own_files: Mapping[str, bytes] | None = None,
        prefixes: Mapping[str, tuple[pathlib.Path, int]] | None = None,
    ) -> None:
        """Plan the checkpoint, copy its tensors to the host and start the thread.

        entries: the sharded tensors to save.
        texts: name → content of small files that the main rank adds.
        own_files: name → content of files that every rank adds; names differ between ranks.
        prefixes: name → (path, bytes) of files that the main rank adds: the first ``bytes`` bytes
            of the file at ``path``.

        Raises CheckpointError on every rank if the folder cannot be made.
        """
        self.root, self.iteration, self.is_main = root, iteration, is_main
        self.texts = texts if is_main else {}
        self.own_files = dict(own_files or {})
        self.prefixes = dict(prefixes or {}) if is_main else {}
        self.error: Exception | None = None
        self.digests: dict[str, dict] = {}
        raised: Exception | None = None
        try:
            self.place = place_of(root, iteration)
            if is_main:
                self.place.begin()
        except OSError as error:
            raised = CheckpointError(f"no checkpoint can be begun in {root}: {error}")
        raise_everywhere(raised)
        with _own_results() as results, guarded(), _kept_errors() as errors:
            state = {"tensors": dict(enumerate(entries))}
            self.request = dist_checkpointing.save(
                state, str(self.place.scratch), validate_access_integrity=True, async_sharded_save=True, **OURS
            )
        self._raise_everywhere(errors)
        self.results = results
        self.buckets = [] if self.request.async_fn is None else _on_host(self.request.async_fn_args[1])
        self.transforms = [] if self.request.async_fn is None else self.request.async_fn.args[0]
        self.written_s = 0.0
        self.thread = threading.Thread(target=self._write, name=f"checkpoint-{iteration}")
        self.thread.start()

    def _write(self) -> None:
        """Write this rank's files, note the digest of each, and keep an error in ``error``. It runs in the thread."""
        started = time.perf_counter()
        try:
            written: dict[int, list] = {}
            for number, bucket in enumerate(self.buckets):
                written[number], name, found = self.place.write_bucket(self.transforms, number, bucket)
                self.digests[name] = found
            for name, content in self.own_files.items():
                self.digests[name] = self.place.write_file(name, content)
            for name, (path, size) in self.prefixes.items():
                self.digests[name] = self.place.write_prefix(name, path, size)
            for name, text in self.texts.items():
                self.digests[name] = self.place.write_file(name, text.encode())
            if self.buckets:
                self.results.put(written)
        except Exception as error:  # noqa: BLE001 (raised on every rank by finish)
            self.error = error
            self.place.free([*(pathlib.Path(bucket[0]).name for bucket in self.buckets), *self.own_files])
        self.own_files = {}
        self.written_s = time.perf_counter() - started
        self.buckets = []

    @property
    def is_written(self) -> bool:
        """Return whether this rank has written its files, so that ``finish`` need not wait. Not a collective."""
        return not self.thread.is_alive()

    def finish(self) -> pathlib.Path | RemotePath:
        """Wait for every rank's thread, complete the checkpoint and return its folder.

        Raises CheckpointError on every rank if one rank could not write. The unfinished folder is
        then removed, and earlier checkpoints stay.
        """
        self.thread.join()
        self._raise_everywhere([self.error] if self.error else [])
        with guarded(), _kept_errors() as errors:
            for finalize in self.request.finalize_fns:
                finalize()
        digests = {name: value for files in gather_json(self.digests) for name, value in files.items()}
        if self.is_main and not errors:
            try:
                self.place.complete(digests)
            except OSError as error:
                errors.append(error)
        self._raise_everywhere(errors)
        self.place.close()
        return self.root / name_of(self.iteration)

    def abandon(self) -> None:
        """Wait for every rank's thread and remove the unfinished folder; a collective."""
        self.thread.join()
        gather_json(None)  # after this no rank writes any more
        self._leave()

    def _leave(self) -> None:
        """Remove the files of a checkpoint that will not be completed.

        The main rank removes the unfinished folder, another rank its temporary files.
        """
        if self.is_main:
            self.place.abandon()
        else:
            self.place.close()

    def _raise_everywhere(self, errors: Sequence[Exception]) -> None:
        """Raise CheckpointError on every rank if a rank has an error, and remove the unfinished folder. A collective.

        errors: this rank's errors.
        """
        message = (
            f"checkpoint {self.iteration} in {self.root} was not written: {_cause(errors[0], self.root)}"
            if errors
            else ""
        )
        try:
            raise_everywhere(CheckpointError(message) if errors else None)
        except CheckpointError:
            self._leave()
            raise


def _cause(error: BaseException, root: pathlib.Path | RemotePath) -> str:
    """Return the text of the OSError that led to ``error``: torch.save raises another error instead ("unexpected pos").

    If no OSError is found, return the text of ``error`` with the number of free bytes under
    ``root``.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        return str(cause)
    with contextlib.suppress(OSError, TypeError):  # TypeError: an object store is never full
        return f"{error} ({shutil.disk_usage(root).free:,} bytes are free there)"
    return str(error)


@contextlib.contextmanager
def _own_results():
    """Yield a queue of this process, into which Megatron-Core's writer puts its results within the block.

    Megatron-Core gets the queue from a module function, which is replaced here. The original queue
    belongs to a manager in another process.
    """
    # The function's name in 0.16.1 and 0.19.2.
    (name,) = [x for x in ("_get_write_results_queue", "get_write_results_queue") if hasattr(filesystem_async, x)]
    results, true_queue = queue.Queue(), getattr(filesystem_async, name)
    setattr(filesystem_async, name, lambda *_: results)
    try:
        yield results
    finally:
        setattr(filesystem_async, name, true_queue)


@contextlib.contextmanager
def _kept_errors() -> Iterator[list[Exception]]:
    """Yield a list of the errors of the small files that Megatron-Core writes in the block; raise none of them.

    The main rank writes these files (SMALL_FILES) between collectives. If it raised there, the other
    ranks would wait for it in the next collective.
    """
    errors: list[Exception] = []

    def quiet(function: Callable) -> Callable:
        def call(*args, **kwargs) -> None:
            try:
                function(*args, **kwargs)
            except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
                errors.append(error)

        return call

    with contextlib.ExitStack() as patches:
        for owner, name in SMALL_FILES:
            patches.enter_context(patch.object(owner, name, quiet(getattr(owner, name))))
        yield errors


def _on_host(buckets: Sequence[tuple]) -> list[tuple]:
    """Return Megatron-Core's write buckets with each tensor copied to the host, before the run changes the tensors.

    Pinned tensors are copies already.
    """

    def staged(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        return tensor.clone() if tensor.device.type == "cpu" and not tensor.is_pinned() else on_host(tensor)

    copies = [
        (file_name, storage_key, (raw, [(item, staged(tensor)) for item, tensor in tensors]))
        for file_name, storage_key, (raw, tensors) in buckets
    ]
    HOST.synchronize()
    return copies


def raise_everywhere(error: CheckpointError | None) -> None:
    """Raise one rank's CheckpointError on every rank; a collective.

    error: this rank's error; None if it has none.
    """
    for rank, message in enumerate(gather_json(None if error is None else str(error))):
        if message is not None:
            raise CheckpointError(f"rank {rank}: {message}") from error
