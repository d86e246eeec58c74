"""Restricted unpicklers for the pickles of torch and Megatron-Core: they know only the classes listed below.

On disk the pickle is ``.metadata``. Between ranks torch sends the plans of a save or a load as
pickled objects. ``guarded`` makes torch use these unpicklers. No listed name opens files, imports
modules, or evaluates or runs code.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import io
import os
import pathlib
import pickle
import stat
import zipfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
import torch.distributed.distributed_c10d as between_ranks
from torch.distributed.checkpoint import filesystem as on_disk
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megatron_rl.checkpoint.folder import DamagedCheckpoint
from megatron_rl.checkpoint.pickle_scan import scan
from megatron_rl.errors import StoreError, quoted, shortened
from megatron_rl.json_text import field, read_bytes, read_object

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

METADATA, COMMON, FORMAT = ".metadata", "common.pt", "metadata.json"
ALLOWED = {  # names in .metadata as 0.16.1 and 0.19.2 write it; 0.19.2 adds BytesStorageMetadata, for its common_state
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
}
DTYPES = {
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
}
OF_ERRORS = {  # a rank sends an error in place of its answer
    "torch.distributed.checkpoint.api": {"CheckpointException"},
    "megatron.core.dist_checkpointing.core": {"CheckpointingException"},
    "traceback": {"StackSummary", "FrameSummary"},
    "builtins": {
        name for name, found in vars(builtins).items() if isinstance(found, type) and issubclass(found, Exception)
    },
    "_pickle": {"UnpicklingError"},
    "megatron_rl.errors": {"StoreError"},
}
BETWEEN_RANKS = {
    "torch.distributed.checkpoint.planner": {"LoadPlan", "ReadItem", "LoadItemType"},
    "torch.distributed.checkpoint.storage": {"WriteResult"},
    "megatron.core.dist_checkpointing.mapping": {"ShardedTensor"},
    **OF_ERRORS,
}
# bounds of an index; a stored tensor takes more bytes than its entries in the index
SMALL_BYTES, MOST_BYTES = 2**20, 2**30
FORCE, FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def member(kind: object, name: object) -> enum.Enum:
    """Return an enum's member by its name. It takes the place of ``getattr`` in a pickle.

    Python 3.11.2, which Debian 12 has, pickles a member as a call of ``getattr`` (its enum.py,
    ``Enum.__reduce_ex__``). Raises UnpicklingError unless ``kind`` is a class of enums and ``name``
    one of its members.
    """
    if not (isinstance(kind, enum.EnumType) and type(name) is str and name in kind.__members__):
        raise pickle.UnpicklingError(f"it asks for {shortened(repr(name), 50)}, a member of no enum that is known")
    return kind[name]


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles ``.metadata``; raises UnpicklingError for a class or function that is not in ALLOWED or DTYPES."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("builtins", "getattr"):
            return member
        if not self.allows(module, name):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint holds")
        return super().find_class(module, name)

    def allows(self, module: str, name: str) -> bool:
        return name in ALLOWED.get(module, ()) or (module == "torch" and name in DTYPES)


class PlanUnpickler(MetadataUnpickler):
    """Unpickles the plans that ranks send one another before a save or a load.

    It allows the classes of MetadataUnpickler, and those in BETWEEN_RANKS.
    """

    def allows(self, module: str, name: str) -> bool:
        return name in BETWEEN_RANKS.get(module, ()) or super().allows(module, name)


def check_pickle(path: pathlib.Path | RemotePath) -> object:
    """Unpickle a ``.metadata`` file and return its object.

    The file is the index of the tensors in the ``*.distcp`` files of its folder. Raises
    DamagedCheckpoint if it names a class or function that is not allowed. The same error is raised,
    before unpickling begins, if the index is larger than all these files plus SMALL_BYTES, or is not
    built like an index of tensors (checkpoint/pickle_scan.py).
    """
    try:
        size = path.stat().st_size
        most = min(MOST_BYTES, SMALL_BYTES + sum(file.stat().st_size for file in path.parent.glob("*.distcp")))
        if size > most:
            raise pickle.UnpicklingError(f"it has {size} bytes, and an index of the tensors beside it at most {most}")
        content = read_bytes(path, "an index of tensors", most_bytes=most, error=DamagedCheckpoint)
        scan(content)
        return MetadataUnpickler(io.BytesIO(content)).load()
    except StoreError:  # the store does not answer: no damage
        raise
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        ImportError,
        OSError,
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        MemoryError,
        OverflowError,
        RecursionError,
    ) as error:
        raise DamagedCheckpoint(f"{path} is refused: {shortened(str(error) or type(error).__name__, 500)}") from error


def check_torch_files(folder: pathlib.Path | RemotePath) -> None:
    """Raise DamagedCheckpoint, naming the file, if one of torch's own files in a checkpoint is damaged.

    These are the index of its tensors (``.metadata``), the format (``metadata.json``) and the
    common state (``common.pt``), which Megatron-Core 0.19.2 does not write.
    """
    read_index(folder)
    read_backend(folder)
    if (common := folder / COMMON).exists():
        try:
            load_plain(common)
        except pickle.UnpicklingError as error:
            raise DamagedCheckpoint(f"{common} is refused: {_reason(error)}") from error


def read_index(folder: pathlib.Path | RemotePath) -> Metadata:
    """Return a checkpoint's index of tensors, after a check that each tensor lies within a regular file of the folder.

    Raises DamagedCheckpoint, naming the file that is missing, cut short or replaced. Tensors are
    not read.
    """
    path = folder / METADATA
    metadata = check_pickle(path)
    sizes: dict[str, int] = {}
    try:
        for index, info in metadata.storage_data.items():
            name = info.relative_path
            size = sizes[name] if name in sizes else sizes.setdefault(name, _size_of(folder, name))
            if not 0 <= info.offset <= info.offset + info.length <= size:
                raise DamagedCheckpoint(
                    f"{folder / name} has {size} bytes, and {METADATA} has {quoted(index.fqn)} at bytes "
                    f"{quoted(info.offset)} to {quoted(info.offset + info.length)} of it: the checkpoint is damaged"
                )
        for key, entry in metadata.state_dict_metadata.items():
            _check_entry(entry, f"{path}: {quoted(key)}")
    except (AttributeError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{path} is no index of tensors: {_reason(error)}") from error
    if not metadata.state_dict_metadata:
        raise DamagedCheckpoint(f"{path} names no tensor")
    return metadata


def _size_of(folder: pathlib.Path, name: str) -> int:
    file = folder / name
    if pathlib.PurePath(name).name != name:
        raise DamagedCheckpoint(f"{folder / METADATA} names {quoted(name)}, which is no file of its folder")
    try:
        facts = file.stat()
    except StoreError:
        raise
    except OSError as error:
        raise DamagedCheckpoint(
            f"{file} cannot be read ({error.strerror}), and {METADATA} has tensors in it: the checkpoint is damaged"
        ) from error
    if not stat.S_ISREG(facts.st_mode):
        raise DamagedCheckpoint(f"{file} is no regular file, and {METADATA} has tensors in it")
    return facts.st_size


def _check_entry(entry: object, where: str) -> None:
    if isinstance(entry, BytesStorageMetadata):
        return
    lists = [entry.size, *(numbers for chunk in entry.chunks for numbers in (chunk.offsets, chunk.sizes))]
    counts = all(type(number) is int and number >= 0 for numbers in lists for number in numbers)
    if not counts or {len(numbers) for numbers in lists} != {len(entry.size)}:
        raise DamagedCheckpoint(f"{where} has sizes that are no tensor's: {quoted(lists)}")
    if not isinstance(entry.properties.dtype, torch.dtype):
        raise DamagedCheckpoint(f"{where} has {quoted(entry.properties.dtype)} for a dtype")


def read_backend(folder: pathlib.Path | RemotePath) -> str:
    """Return the format that ``metadata.json`` names, such as "torch_dist".

    Raises DamagedCheckpoint if it names none.
    """
    kind = read_object(folder / FORMAT, most_bytes=SMALL_BYTES, error=DamagedCheckpoint)
    return field(kind, "sharded_backend", str, str(folder / FORMAT), error=DamagedCheckpoint)


def load_plain(source: pathlib.Path | RemotePath | io.RawIOBase, what: str = "") -> object:
    """Return the object that torch saved in a file, of the types that ``weights_only`` reads.

    source: a path, or a file that is open for reading.
    what: the source's name for messages, if it is an open file.

    Raises UnpicklingError for other types, DamagedCheckpoint for a file that is not torch's.
    """
    if not isinstance(source, io.IOBase):
        what = str(source)
        source = io.BytesIO(read_bytes(source, "torch's", most_bytes=MOST_BYTES, error=DamagedCheckpoint))
    try:
        if not zipfile.is_zipfile(source):  # torch before 1.6 wrote other files; Megatron-Core writes none of them
            raise DamagedCheckpoint(f"{what} is no file of torch's, or was cut short")
        source.seek(0)
        return torch.load(source, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, DamagedCheckpoint, StoreError):
        raise
    except Exception as error:
        raise DamagedCheckpoint(f"{what} is refused: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the first line of an error's text. In torch's messages later lines advise to trust the file."""
    return shortened((str(error).splitlines() or [""])[0] or type(error).__name__, 150)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Return a context in which torch uses this module's unpicklers, and ``torch.load`` only with ``weights_only``.

    ``weights_only`` is forced by torch's environment variable, which overrules the caller's
    argument. This is needed since ``DefaultLoadPlanner.load_bytes`` asks for
    ``weights_only=False``. A forged ``.metadata`` of allowed classes could make that call unpickle
    any bytes of a file.
    """
    loads = SimpleNamespace(**{**vars(pickle), "load": lambda file: MetadataUnpickler(file).load()})
    with (
        patch.object(on_disk, "pickle", loads),
        patch.object(between_ranks, "_unpickler", PlanUnpickler),
        patch.dict(os.environ),
    ):
        os.environ.pop(FORCE_NOT, None)
        os.environ[FORCE] = "1"
        yield
