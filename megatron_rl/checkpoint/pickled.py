"""Unpicklers for the pickles that torch and Megatron-Core put around a checkpoint: they know the classes below alone.

On disk the pickle is ``.metadata``; between ranks torch sends the plans of a save or a load as pickled objects.
``guarded`` puts these unpicklers in torch's place. Neither list holds anything that opens, imports, evaluates or runs.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import pathlib
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed.distributed_c10d as between_ranks
from torch.distributed.checkpoint import filesystem as on_disk

from megatron_rl.checkpoint.folder import DamagedCheckpoint
from megatron_rl.checkpoint.pickle_scan import scan
from megatron_rl.errors import quoted, shortened
from megatron_rl.json_text import field, read_object

ALLOWED = {  # of .metadata as 0.16.1 and 0.19.2 write it; the latter has BytesStorageMetadata, of its common_state
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
OF_ERRORS = {  # a rank sends them in place of its answer
    "torch.distributed.checkpoint.api": {"CheckpointException"},
    "megatron.core.dist_checkpointing.core": {"CheckpointingException"},
    "traceback": {"StackSummary", "FrameSummary"},
    "builtins": {
        name for name, found in vars(builtins).items() if isinstance(found, type) and issubclass(found, Exception)
    },
    "_pickle": {"UnpicklingError"},
}
BETWEEN_RANKS = {
    "torch.distributed.checkpoint.planner": {"LoadPlan", "ReadItem", "LoadItemType"},
    "torch.distributed.checkpoint.storage": {"WriteResult"},
    "megatron.core.dist_checkpointing.mapping": {"ShardedTensor"},
    **OF_ERRORS,
}
SMALL_BYTES, MOST_BYTES = 2**20, 2**30  # of an index; a stored tensor takes more bytes than its entries here
FORCE, FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class MetadataUnpickler(pickle.Unpickler):
    """Unpickles ``.metadata``; refuses any class or function that is not in the lists above."""

    def find_class(self, module: str, name: str) -> object:
        if not self.allows(module, name):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint holds")
        return super().find_class(module, name)

    def allows(self, module: str, name: str) -> bool:
        return name in ALLOWED.get(module, ()) or (module == "torch" and name in DTYPES)


class PlanUnpickler(MetadataUnpickler):
    """Unpickles the plans that ranks send one another before a save or a load."""

    def allows(self, module: str, name: str) -> bool:
        return name in BETWEEN_RANKS.get(module, ()) or super().allows(module, name)


def check_pickle(path: pathlib.Path) -> object:
    """Unpickle a ``.metadata`` file and return its object.

    Raises DamagedCheckpoint where it names any other class or function, is larger than the tensors beside it, or would
    build what no index of tensors is (checkpoint/pickle_scan.py); the file is then not unpickled.
    """
    try:
        size = path.stat().st_size
        most = min(MOST_BYTES, SMALL_BYTES + sum(file.stat().st_size for file in path.parent.glob("*.distcp")))
        if size > most:
            raise pickle.UnpicklingError(f"it has {size} bytes, and an index of the tensors beside it at most {most}")
        content = path.read_bytes()
        scan(content)
        return MetadataUnpickler(io.BytesIO(content)).load()
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


def check_torch_files(folder: pathlib.Path) -> None:
    """Raise DamagedCheckpoint, naming the file, where torch's own files of a checkpoint are not whole.

    These are the index of its tensors (``.metadata``), which must lie within the files that it names, the format
    (``metadata.json``) and, of Megatron-Core 0.16.1, the common state (``common.pt``).
    """
    path = folder / ".metadata"
    metadata = check_pickle(path)
    try:
        for info in metadata.storage_data.values():
            size = (folder / info.relative_path).stat().st_size
            if pathlib.PurePath(info.relative_path).name != info.relative_path:
                raise DamagedCheckpoint(f"{path} names {quoted(info.relative_path)}, which is no file of its folder")
            if not 0 <= info.offset <= info.offset + info.length <= size:
                raise DamagedCheckpoint(
                    f"{path} has a tensor at bytes {quoted(info.offset)} to {quoted(info.offset + info.length)} of "
                    f"{info.relative_path}, which has {size}"
                )
        if not metadata.state_dict_metadata:
            raise DamagedCheckpoint(f"{path} names no tensor")
    except (AttributeError, TypeError, ValueError, OSError) as error:
        raise DamagedCheckpoint(f"{path} is no index of tensors: {shortened(str(error), 500)}") from error
    kind = read_object(folder / "metadata.json", error=DamagedCheckpoint)
    field(kind, "sharded_backend", str, str(folder / "metadata.json"), error=DamagedCheckpoint)
    if (common := folder / "common.pt").exists():
        try:
            torch.load(common, map_location="cpu", weights_only=True)
        except Exception as error:
            raise DamagedCheckpoint(f"{common} is refused: {shortened(str(error), 500)}") from error


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Hold torch to these lists for ``.metadata`` and other ranks' plans, and every ``torch.load`` to ``weights_only``.

    The latter is set by torch's own variable, which overrules its callers: ``DefaultLoadPlanner.load_bytes`` asks for
    ``weights_only=False``, and a ``.metadata`` of allowed classes alone could send a tensor there.
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
