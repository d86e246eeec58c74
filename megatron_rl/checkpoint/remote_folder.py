"""The writing of checkpoints to an object store: the layout and guarantees of checkpoint/folder.py, without a rename.

    s3://bucket/run/
        latest_checkpointed_iteration.txt
        iter_0000030/                         complete: it has a manifest.json, which is uploaded last
        iter_0000040/                         no manifest: being written, or left by a killed run

Invariants (tests/unit/checkpoint/test_remote_folder.py, tests/s3/test_checkpoints.py):

1. A folder counts as a checkpoint iff its manifest.json is there. The manifest is uploaded after
   every other object of the folder was listed with the bytes that were sent.
2. Removing a checkpoint removes its manifest first, so that the checkpoint becomes invisible before
   it becomes incomplete.
3. A folder without a manifest is never read; the next save removes it.

A run that skipped a damaged checkpoint comes to the same iteration again. It then removes the
damaged checkpoint before it writes the new one. Until the new one is complete, a resume uses the
checkpoint of an earlier iteration.
"""

from __future__ import annotations

import errno
import logging
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence

from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item

from megatron_rl.checkpoint.folder import (
    LATEST,
    MANIFEST,
    manifest_text,
    name_of,
    numbered_folders,
    remove,
    whole_checkpoints,
)
from megatron_rl.errors import StoreError
from megatron_rl.storage.remote import LEAVE_S, RemotePath

log = logging.getLogger(__name__)


def begin(root: RemotePath, iteration: int) -> None:
    """Remove the folders without a manifest under ``root``, and an older checkpoint of the number ``iteration``.

    Killed runs leave folders without a manifest.
    """
    whole = set(whole_checkpoints(root)) - {iteration}
    for leftover in set(numbered_folders(root)) - whole:
        remove(root / name_of(leftover))


class RemotePlace:
    """Uploads one checkpoint's files: each rank its own files, the main rank also the small files and the manifest.

    scratch: a temporary folder on this rank's disk, for the files that Megatron-Core itself writes:
        the index of the tensors and ``common.pt``. Tensors go from memory to the store.
    """

    def __init__(self, root: RemotePath, iteration: int) -> None:
        self.root, self.iteration = root, iteration
        self.folder = root / name_of(iteration)
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix=f"megatron_rl-checkpoint-{iteration}-"))

    def begin(self) -> None:
        begin(self.root, self.iteration)

    def write_bucket(self, transforms: Sequence, _: int, bucket: tuple) -> tuple[list, str, dict[str, object]]:
        """Upload one file of tensors; return (torch's WriteResult of each tensor, the file's name, its digest).

        Each tensor is written by torch's ``_write_item``, as in Megatron-Core's
        ``FileSystemWriterAsync.write_preloaded_data`` (0.16.1 and 0.19.2), which writes to a disk.

        transforms: the arguments of ``_write_item`` before the file.
        bucket: Megatron-Core's triple (path, file name, (objects, tensors)).
        """
        _, name, (raw, tensors) = bucket
        with (self.folder / name).open("wb") as upload:
            results = [
                _write_item(*transforms, upload, data, item, name, SerializationFormat.TORCH_SAVE)
                for item, data in (*raw, *tensors)
            ]
        return results, name, upload.digest()

    def write_file(self, name: str, content: bytes) -> dict[str, object]:
        """Upload a small file and return its digest: bytes and SHA-256."""
        with (self.folder / name).open("wb") as upload:
            upload.write(content)
        return upload.digest()

    def write_prefix(self, name: str, path: pathlib.Path, size: int) -> dict[str, object]:
        """Upload the first ``size`` bytes of a file that others append to, and return their digest."""
        with path.open("rb") as source, (self.folder / name).open("wb") as upload:
            while (left := size - upload.tell()) > 0 and (block := source.read(min(left, 1 << 22))):
                upload.write(block)
        return upload.digest()

    def complete(self, digests: Mapping[str, Mapping[str, object]]) -> None:
        """Check the uploaded objects, then upload the manifest, which completes the checkpoint. On the main rank.

        Raises OSError if an object is missing, unexpected, or of another size than was sent.

        digests: file name → digest (bytes and SHA-256) of every rank's files.
        """
        own = {path.name: self.write_file(path.name, path.read_bytes()) for path in sorted(self.scratch.iterdir())}
        sent, found = {**digests, **own}, self.folder.files()
        for name in sorted(sent.keys() | found.keys()):
            wanted = sent[name]["bytes"] if name in sent else None
            if wanted != found.get(name):
                words = f"{found.get(name)} bytes are there and {wanted} were sent"
                raise StoreError(errno.EIO, words, str(self.folder / name))
        (self.folder / MANIFEST).write_text(manifest_text(self.iteration, sent))
        (self.root / LATEST).write_text(f"{self.iteration}")

    def free(self, names: Sequence[str]) -> None:
        """Do nothing: a failed save's objects take no room on this host's disk, and ``abandon`` removes them."""

    def close(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)

    def abandon(self) -> None:
        """Remove the uploaded objects, on the main rank; the next save removes any that are left."""
        try:
            remove(self.folder.within(LEAVE_S))
        except OSError as error:
            log.warning("%s stays unfinished until the next save: %s", self.folder, error)
        self.close()
