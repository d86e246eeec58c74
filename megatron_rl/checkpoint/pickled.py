"""What torch.distributed.checkpoint pickles, ``.metadata``, read by an unpickler that knows nothing but the classes of that file."""

from __future__ import annotations

import pathlib
import pickle

from megatron_rl.checkpoint.folder import DamagedCheckpoint

ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch": {"Size", "device", "strided"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        is_dtype = module == "torch" and name in DTYPES
        if not is_dtype and name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's metadata holds")
        return super().find_class(module, name)


DTYPES = {"float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"}


def check_pickle(path: pathlib.Path) -> object:
    """The file's object. Raises DamagedCheckpoint where it names any other class or function: it is then not unpickled at all."""
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, ValueError, IndexError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} is refused: {error}") from error
