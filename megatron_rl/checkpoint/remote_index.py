"""The loading of a checkpoint from an object store: small files are fetched, tensors are read by byte ranges.

``dist_checkpointing.load`` (0.16.1 and 0.19.2) takes a folder on a disk. So it gets a temporary
folder with the checkpoint's index, format and common state. torch's ``FileSystemReader`` (2.13)
opens every ``*.distcp`` by ``FileSystem.create_stream`` and reads the chunks that the rank asked
for. That function is replaced during a load: it opens the store's object instead.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pathlib
import tempfile
from collections.abc import Iterator
from unittest.mock import patch

from torch.distributed.checkpoint import filesystem as on_disk

from megatron_rl.checkpoint.folder import MANIFEST
from megatron_rl.checkpoint.pickled import COMMON, FORMAT, METADATA
from megatron_rl.checkpoint.writer import raise_everywhere
from megatron_rl.errors import CheckpointError
from megatron_rl.storage.remote import RemotePath


@contextlib.contextmanager
def index_of(folder: RemotePath) -> Iterator[pathlib.Path]:
    """Yield a temporary local folder, from which torch can load a checkpoint in an object store; a collective.

    The local folder holds only the checkpoint's small files. Within the ``with`` block torch reads
    tensors from the store. Raises CheckpointError on every rank if one rank cannot fetch the files.
    """
    error: CheckpointError | None = None
    try:
        kept = _fetched(folder, hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest())
    except OSError as raised:
        error = CheckpointError(f"{folder} cannot be loaded: {raised}")
    raise_everywhere(error)
    index = pathlib.Path(kept.name)
    open_on_disk = on_disk.FileSystem.create_stream

    def create_stream(system: on_disk.FileSystem, path, mode: str):
        path = pathlib.Path(path)
        if path.parent == index and path.suffix == ".distcp":
            return (folder / path.name).open(mode)
        return open_on_disk(system, path, mode)

    with patch.object(on_disk.FileSystem, "create_stream", create_stream):
        yield index


@functools.lru_cache(maxsize=2)  # for policy and critic; one load asks many times
def _fetched(folder: RemotePath, _manifest: str) -> tempfile.TemporaryDirectory:
    kept = tempfile.TemporaryDirectory(prefix="megatron_rl-index-")
    there = folder.files()
    for name in (METADATA, FORMAT, COMMON):
        if name in there:
            pathlib.Path(kept.name, name).write_bytes((folder / name).read_bytes())
    return kept
