"""The checkpoint folders on disk: their layout, checksums, completion and pruning, without tensors or torch.

    <run>/checkpoints/
        latest_checkpointed_iteration.txt     "30", as Megatron-LM writes it
        iter_0000030/                         a complete checkpoint
            .metadata, *.distcp, common.pt    the tensors, in Megatron-Core's torch_dist format
            state.json                        everything else that decides the run's next steps
            manifest.json                     bytes and SHA-256 of each other file, SHA-256 of its own other
                                              fields; written last
        iter_0000040.partial/                 being written, or left by a killed run; never read

Invariants (tests/unit/checkpoint/test_folder.py):

1. A folder named iter_NNNNNNN is complete: it gets this name after every file in it, and the
   manifest, has been synced to the disk.
2. ``verify`` passes iff every file of the manifest is there with its recorded bytes, and no other
   file is.
3. Pruning never removes the newest complete checkpoint. A folder that it removes becomes invisible
   before it becomes incomplete.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from megatron_rl import json_text
from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.errors import CheckpointError, StoreError, quoted
from megatron_rl.json_text import read_object

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

FORMAT, VERSION = "megatron_rl", 2
MANIFEST, STATE, LATEST = "manifest.json", "state.json", "latest_checkpointed_iteration.txt"
BLOCK_BYTES = 1 << 22
MANIFEST_BYTES = 2**28  # each file's entry takes about 150 bytes


class DamagedCheckpoint(CheckpointError):
    """Raised if a file of a checkpoint is missing, cut short or changed."""


field = functools.partial(json_text.field, error=DamagedCheckpoint)
check = functools.partial(json_text.check, error=DamagedCheckpoint)


def folder_of(text: str) -> pathlib.Path | RemotePath:
    """Return a Path for a path on a disk, or a RemotePath for a URL, such as ``s3://bucket/run``.

    Raises ConfigError for an invalid URL.
    """
    if "://" not in text:
        return pathlib.Path(text)
    from megatron_rl.storage.location import location  # only a run with URLs needs it

    return location(text)


def name_of(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def whole_checkpoints(root: pathlib.Path | RemotePath) -> list[int]:
    """Return the iterations of the complete checkpoints under ``root``, oldest first; [] if there is no such folder.

    In an object store a checkpoint is complete if it has a manifest. On a disk it is complete if
    its folder is named iter_NNNNNNN, without a suffix.
    """
    if not isinstance(root, pathlib.Path):
        return [number for number in numbered_folders(root) if (root / name_of(number) / MANIFEST).is_file()]
    return _iterations(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def numbered_folders(root: RemotePath) -> list[int]:
    """Return the iterations of an object store's checkpoint folders under ``root``, complete or not, ascending."""
    return _iterations(name for name, size in root.children().items() if size is None)


def _iterations(names: Iterable[str]) -> list[int]:
    matches = [re.fullmatch("iter_([0-9]{7,15})", name) for name in names]
    return sorted(int(match[1]) for match in matches if match)


def digest(path: pathlib.Path | RemotePath) -> dict[str, object]:
    """Return ``{"bytes": int, "sha256": hex}`` of a file."""
    sha, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            sha.update(block)
            size += len(block)
    return {"bytes": size, "sha256": sha.hexdigest()}


def begin(root: pathlib.Path, iteration: int) -> pathlib.Path:
    """Make and return an empty folder ``iter_NNNNNNN.partial``; remove unfinished folders of killed runs."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        if path.is_dir() and path.suffix in (".partial", ".deleting"):
            shutil.rmtree(path)
    folder = root / f"{name_of(iteration)}.partial"
    folder.mkdir()
    return folder


def complete(folder: pathlib.Path, files: Mapping[str, Mapping[str, object]]) -> pathlib.Path:
    """Write the manifest of a ``.partial`` folder, rename the folder to its final name and return its new path.

    files: file's name → its ``digest``, for each file whose digest is known already. All other
        files are digested here.
    """
    iteration = int(folder.name.removeprefix("iter_").removesuffix(".partial"))
    digests = {name: files.get(name) or digest(folder / name) for name in _files_in(folder) if name != MANIFEST}
    for name in digests.keys() - files.keys():
        _sync(folder / name)
    replace_text(folder / MANIFEST, manifest_text(iteration, digests), synced=True)
    _sync(folder)
    final = folder.with_name(name_of(iteration))
    if final.exists():
        remove(final)  # the same iteration, from before the run restarted at an earlier one
    os.rename(folder, final)
    replace_text(final.with_name(LATEST), f"{iteration}", synced=True)
    _sync(final.parent)
    return final


def manifest_text(iteration: int, digests: Mapping[str, Mapping[str, object]]) -> str:
    """Return the text of a checkpoint's manifest. ``digests``: the name of every other file → its ``digest``."""
    content = {"format": FORMAT, "version": VERSION, "iteration": iteration, "files": digests}
    return json.dumps({**content, "sha256": _own_digest(content)}, indent=1) + "\n"


def read_manifest(folder: pathlib.Path | RemotePath) -> dict:
    """Return the content of a checkpoint's manifest, after a check of every field.

    Raises DamagedCheckpoint for a manifest that cannot be read, was changed or has invalid fields.
    Raises CheckpointError for an undamaged manifest of a format or version that this code does not
    know.
    """
    path = folder / MANIFEST
    content = read_object(path, most_bytes=MANIFEST_BYTES, error=DamagedCheckpoint)
    kind = (field(content, "format", str, str(path)), field(content, "version", int, str(path)))
    own = content.pop("sha256", None)  # a manifest of another version need not hold its own SHA-256
    if own != _own_digest(content) and (own is not None or kind == (FORMAT, VERSION)):
        raise DamagedCheckpoint(
            f"{path} is not what was written, by the SHA-256 that it ends with: the checkpoint is damaged"
        )
    if kind != (FORMAT, VERSION):
        raise CheckpointError(
            f"{folder} is a checkpoint of format {quoted(kind[0])} version {quoted(kind[1])} and this release reads "
            f"{FORMAT!r} version {VERSION}; use the release that wrote it, or export its weights with "
            "megatron-rl convert"
        )
    if name_of(number := field(content, "iteration", int, str(path), least=0, most=2**53)) != folder.name:
        raise DamagedCheckpoint(f"{path}: iteration is {number}, and the folder's name is {folder.name}")
    files = field(content, "files", dict, str(path))
    for name, facts in files.items():
        where = f"{path}: files.{quoted(name)[1:-1]}"
        check(facts, where, dict)
        field(facts, "bytes", int, where, least=0, most=2**63 - 1)
        if not re.fullmatch("[0-9a-f]{64}", field(facts, "sha256", str, where)):
            raise DamagedCheckpoint(f"{where}: sha256 is no SHA-256: {quoted(facts['sha256'])}")
    if STATE not in files:
        raise DamagedCheckpoint(f"{path}: files lacks {STATE}: the checkpoint is damaged")
    return content


def _own_digest(content: Mapping) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def verify(folder: pathlib.Path | RemotePath, *, share: tuple[int, int] | None = (0, 1)) -> None:
    """Raise DamagedCheckpoint, naming the first damaged file, unless every file is as the manifest says.

    share: (r, n) to digest every n-th file, beginning with the r-th, so that n ranks together
        digest a large checkpoint; None to digest no file. The names and sizes of all files are
        checked in any case.

    Raises StoreError if an object store does not answer, which is no damage.
    """
    # The names: every file of the manifest, and no other.
    files = read_manifest(folder)["files"]
    sizes: Mapping[str, int] = {}  # of a store's objects, by one request
    try:
        if isinstance(folder, pathlib.Path):
            present = set(_files_in(folder)) - {MANIFEST}
        else:
            sizes = folder.files()
            present = set(sizes) - {MANIFEST}
    except StoreError:
        raise
    except OSError as error:
        raise DamagedCheckpoint(f"{folder} cannot be listed ({error}): the checkpoint is damaged") from error
    if missing := sorted(files.keys() - present):
        raise DamagedCheckpoint(
            f"{folder / missing[0]} is missing ({len(missing)} of {len(files)} files are): the checkpoint is damaged"
        )
    if added := sorted(present - files.keys()):
        raise DamagedCheckpoint(f"{folder / added[0]} is not in the manifest; remove it if it was put there by hand")
    # The sizes of all files, and the digests of this share.
    for number, (name, wanted) in enumerate(sorted(files.items())):
        path = folder / name
        try:
            size = sizes[name] if sizes else path.stat().st_size
            sha256 = (
                digest(path)["sha256"]
                if share is not None and size == wanted["bytes"] and number % share[1] == share[0]
                else wanted["sha256"]
            )
        except StoreError:
            raise
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read ({error}): the checkpoint is damaged") from error
        if size != wanted["bytes"]:
            raise DamagedCheckpoint(
                f"{path} has {size} bytes and its manifest says {wanted['bytes']}: the checkpoint is damaged"
            )
        if sha256 != wanted["sha256"]:
            raise DamagedCheckpoint(
                f"{path} has SHA-256 {sha256[:12]}… and its manifest says {wanted['sha256'][:12]}…: it is damaged"
            )


def prune(root: pathlib.Path | RemotePath, keep_last: int | None) -> list[int]:
    """Remove all but the newest ``keep_last`` checkpoints under ``root``; return the removed iterations.

    keep_last: None removes nothing, and 0 counts as 1.
    """
    iterations = whole_checkpoints(root)
    removed = [] if keep_last is None else iterations[: max(len(iterations) - max(keep_last, 1), 0)]
    for iteration in removed:
        remove(root / name_of(iteration))
    return removed


def remove(folder: pathlib.Path | RemotePath) -> None:
    """Remove a checkpoint's folder.

    On a disk the folder is renamed first. In an object store its manifest is deleted first. So no
    reader takes it for a complete checkpoint while its files are removed.
    """
    if not isinstance(folder, pathlib.Path):
        (folder / MANIFEST).unlink(missing_ok=True)
        folder.remove_tree()
        return
    doomed = folder.with_name(f"{folder.name}.deleting")
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def remove_if_empty(root: pathlib.Path | RemotePath) -> None:
    """Remove ``root``, a folder of checkpoints, if it is empty or holds only ``latest_checkpointed_iteration.txt``."""
    if not isinstance(root, pathlib.Path):
        if set(root.children()) == {LATEST}:
            (root / LATEST).unlink(missing_ok=True)
    elif root.is_dir() and {path.name for path in root.iterdir()} <= {LATEST}:
        (root / LATEST).unlink(missing_ok=True)
        root.rmdir()


def _files_in(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
