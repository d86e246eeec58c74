"""The readers of slices of a model's weights: from a Hugging Face folder's safetensors files, or from memory.

Before a folder's weights are read, its files are checked against the model's shape
(``check_tensors``). A tensor in the files that the model does not use is an error, or is named in a
warning.
"""

from __future__ import annotations

import logging
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import check, field, read_object
from megatron_rl.weights.entry import Entry
from megatron_rl.weights.families.family import FURTHER_TOKENS
from megatron_rl.weights.families.register import FAMILIES, has_text_names, stacking
from megatron_rl.weights.mapping import hf_size, stage_entries
from megatron_rl.weights.model_shape import ModelShape
from megatron_rl.weights.shards import DTYPE_NAMES, INDEX, SINGLE

log = logging.getLogger(__name__)

DTYPE_OF_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# fields of a config.json whose files do not hold full weights
QUANTIZATION = ("compression_config", "quantization_config")
HEAD_NAME, EMBEDDING_NAME, VALUE_NAME = "lm_head.weight", "model.embed_tokens.weight", "score.weight"
ROTARY = "rotary_emb.inv_freq"  # old llama files hold it; the config has it too
ROWS = 8192  # rows of a vocabulary's table that are compared at once


class WeightReader(Protocol):
    def has(self, name: str) -> bool: ...

    def size(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, dimension: int, start: int, stop: int) -> torch.Tensor: ...


class TensorView(Protocol):
    """Reads slices of one tensor, with the methods of safetensors' ``get_slice`` objects."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor: ...


class MemoryReader:
    """Reads slices of tensors that are in memory already (random weights, tests).

    tensors: {name in checkpoint files: tensor}.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.tensors = tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def size(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise ConfigError(
                f"the weights given hold no tensor named {name}; names are those of checkpoint files, and a mixture's "
                "state_dict becomes them by megatron_rl.weights.fused.file_tensors"
            )
        return tuple(self.tensors[name].shape)

    def read(self, name: str, dimension: int, start: int, stop: int) -> torch.Tensor:
        return self.tensors[name].narrow(dimension, start, stop - start)


class HuggingFaceReader:
    """Reads slices of a Hugging Face directory's safetensors files, sharded or not; never a whole file.

    A weight of block FP8 is read as the float32 numbers that it stands for
    (weights/quantization.py), and a stack of experts in MXFP4 as bfloat16.

    files: {tensor name: its file}. A stack of experts has a name for each expert's tensor
        (weights/stacked.py). Scales are left out.
    views: {tensor name: function that takes nothing and returns the tensor's reader}, for FP8
        weights and tensors within a stack.
    scaled: the names of the weights in block FP8.

    Raises ConfigError, naming the file, for files that are missing, cut short, malformed or outside
    the folder, and if the index and the files do not hold the same tensors.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        self.open_files: dict[pathlib.Path, Any] = {}
        self.handle_of: Callable[[Any], Any] = lambda handle: handle
        self.files = _list_tensors(self)
        config = self.path / "config.json"
        fields = read_object(config) if config.is_file() else {}
        if has_text_names(fields.get("model_type")):
            from megatron_rl.weights.text_part import TextHandle, text_fields, text_names

            self.handle_of = TextHandle
            self.files = text_names(self.files, self.path)
            fields = text_fields(fields, str(config))
            self.open_files.clear()
        self.views: dict[str, Callable[[], TensorView]] = {}
        self.scaled: frozenset[str] = frozenset()
        if is_quantized(fields):
            from megatron_rl.weights.quantization import block_size, block_weights

            if (block := block_size(fields, str(config))) is not None:
                self.files, self.views = block_weights(self.files, self.opened, block, self.path)
                self.scaled = frozenset(self.views)
        if names := stacking(fields.get("model_type")):
            from megatron_rl.weights.stacked import unstacked

            self.files, views = unstacked(self.files, self.opened, names, self.path)
            self.views |= views

    def has(self, name: str) -> bool:
        return name in self.files

    def opened(self, file: pathlib.Path):
        """Return safetensors' handle of a file, opened once; its names are those of a text model (``TextHandle``).

        Raises ConfigError if the file cannot be read.
        """
        if file not in self.open_files:
            try:
                if file.exists() and not file.is_file():  # safetensors would wait for a pipe's writer
                    raise OSError("it is no regular file")
                self.open_files[file] = self.handle_of(safe_open(file, framework="pt"))
            except (SafetensorError, OSError, ValueError, MemoryError) as error:
                reason = "it does not exist" if not file.exists() else " ".join(str(error).split())[:200]
                raise ConfigError(
                    f"{file} cannot be read as safetensors: {reason}; copy or download it again"
                ) from error
        return self.open_files[file]

    def _slice(self, name: str) -> TensorView:
        file = self.files.get(name)
        if file is None:
            raise ConfigError(
                f"{self.path} holds no tensor named {name}; its config and its weights do not belong together"
            )
        return self.views[name]() if name in self.views else self.opened(file).get_slice(name)

    def size(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which ``read`` returns the tensor ``name``.

        Raises ConfigError if it is not float32, bfloat16 or float16.
        """
        dtype_name = str(self._slice(name).get_dtype())
        if dtype_name not in DTYPE_OF_NAME:
            raise ConfigError(
                f"{name} in {self.path} is {dtype_name}; only {', '.join(DTYPE_OF_NAME)} are read: it may be quantised"
            )
        return DTYPE_OF_NAME[dtype_name]

    def check_scale(self, name: str) -> None:
        """Raise ConfigError unless an FP8 weight's scales are one floating-point number per block.

        Other tensors are not checked.
        """
        if name in self.scaled:
            self._slice(name).check()

    def close(self) -> None:
        """Unmap the files, so that the bytes read are no longer resident in memory; the next read maps them again."""
        self.open_files.clear()

    def read(self, name: str, dimension: int, start: int, stop: int) -> torch.Tensor:
        tensor = self._slice(name)
        return tensor[start:stop] if dimension == 0 else tensor[:, start:stop]


def is_quantized(fields: Mapping[str, object]) -> bool:
    """Return whether a config.json's fields say that the files hold quantised weights."""
    return any(fields.get(name) is not None for name in QUANTIZATION)


def has_weights(folder: str | pathlib.Path) -> bool:
    """Return whether a folder holds weights: model.safetensors or an index of shards."""
    return any((pathlib.Path(folder) / name).exists() for name in (SINGLE, INDEX))


def _list_tensors(reader: HuggingFaceReader) -> dict[str, pathlib.Path]:
    """Return {tensor name: its file} of a folder, after opening every file and comparing its header with the index."""
    folder = reader.path
    index, single = folder / INDEX, folder / SINGLE
    # One form of weights: a single file, or an index of shards.
    if not has_weights(folder):
        raise ConfigError(
            f"model.hf_path={folder} holds neither {SINGLE} nor {INDEX}; save it with save_pretrained, or start from "
            "random weights with model.init=random"
        )
    if index.exists() and single.exists():
        raise ConfigError(
            f"{folder} holds both {SINGLE} and {INDEX}, which may be two models; remove the one that is stale"
        )
    if not index.exists():
        return dict.fromkeys(reader.opened(single).keys(), single)
    # The index and the files' headers must name the same tensors.
    where = f"{index}: weight_map"
    mapped = field(read_object(index), "weight_map", dict, str(index))
    for name, part in mapped.items():
        check(part, f"{where}.{quoted(name)[1:-1]}", str)
        if pathlib.PurePath(part).name != part or not part.endswith(".safetensors"):
            raise ConfigError(f"{where}.{name} names {quoted(part)}; it must be a .safetensors file in the same folder")
    held = {part: set(reader.opened(folder / part).keys()) for part in sorted(set(mapped.values()))}
    for name, part in mapped.items():
        if name not in held[part]:
            raise ConfigError(f"{where} says that {name} is in {part}, and that file does not hold it")
    for part, names in held.items():
        if strays := sorted(x for x in names if mapped.get(x) != part):
            raise ConfigError(
                f"{folder / part} holds {len(strays)} tensors that {INDEX} does not give to it, {strays[0]} the first; "
                "they may be another model's"
            )
    return {name: folder / part for name, part in mapped.items()}


def whole_tensors(entry: Entry, shape: ModelShape, reader: WeightReader) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each Hugging Face tensor that a Megatron parameter is made of."""
    for name in entry.hf:
        yield name, reader.read(name, 0, 0, hf_size(shape, name)[0])


def used_names(shape: ModelShape) -> set[str]:
    """Return the Hugging Face names of all tensors that a model of this shape is made of."""
    entries = (entry for stage in range(shape.num_stages) for entry in stage_entries(shape, stage, 1))
    return {name for entry in entries for name in entry.held_by(0, shape, 1).hf}


def left_over(reader: HuggingFaceReader, used: Iterable[str]) -> list[str]:
    """Return the sorted names of tensors in the files that are not in ``used``.

    The rotary frequencies in old llama files are not listed, since the config determines them.
    """
    return sorted(x for x in reader.files.keys() - set(used) if not x.endswith(ROTARY))


def heads_differ(reader: HuggingFaceReader) -> bool:
    """Return whether the files hold both an LM head and an embedding, and the two have different values."""
    if not (reader.has(HEAD_NAME) and reader.has(EMBEDDING_NAME)):
        return False
    rows = reader.size(HEAD_NAME)
    if rows != reader.size(EMBEDDING_NAME):
        return True
    pieces = ((start, min(start + ROWS, rows[0])) for start in range(0, rows[0], ROWS))
    return any(
        not torch.equal(*(reader.read(name, 0, start, stop) for name in (HEAD_NAME, EMBEDDING_NAME)))
        for start, stop in pieces
    )


def check_tensors(reader: HuggingFaceReader, shape: ModelShape, *, allow_unread: bool = False) -> None:
    """Raise ConfigError unless the files hold each tensor of a model of this shape, in its shape and a readable dtype.

    Parts that transformers' text model lacks as well are named in a warning and not loaded:
    multi-token-prediction layers (``num_extra_layers``), and the family's ``left_out``.

    allow_unread: whether tensors that the model does not use are named in a warning instead of
        refused (``model.allow_unread_tensors``).
    """
    used = used_names(shape)
    ignored = _without_parts(reader, shape)
    # Layers that the config does not count.
    own = set(reader.files) - set(ignored)
    layers = {int(found[1]) for name in own if (found := re.match(r"model\.layers\.(\d{1,9})\.", name))}
    if layers and layers != set(range(shape.num_layers)) and not (allow_unread and max(layers) >= shape.num_layers):
        raise ConfigError(
            f"{reader.path}: config.json says num_hidden_layers={shape.num_layers} and the files hold {len(layers)} "
            f"layers, {min(layers)} to {max(layers)}; give the config that belongs to them"
        )
    # Other tensors that the model does not use.
    unread = left_over(reader, used.union(ignored))
    if shape.tied_embeddings or shape.value_head:  # a tied model's copy of its embedding; a critic has no LM head
        unread = [name for name in unread if name != HEAD_NAME]
    if unread:
        from megatron_rl.weights.quantization import trace_of

        kind = trace_of(unread)
        names = f"{len(unread)} tensors that the model is not made of, {', '.join(unread[:3])}"
        if kind is not None or not allow_unread:
            way_out = f"they are those of {kind}" if kind else "set model.allow_unread_tensors=true to leave them out"
            raise ConfigError(f"{reader.path} holds {names}; {way_out}")
        log.warning("%s holds %s; they are left out", reader.path, names)
    # The shape, dtype and scales of each tensor that it uses.
    for name in sorted(used - ({VALUE_NAME} if shape.value_head and not reader.has(VALUE_NAME) else set())):
        if reader.size(name) != hf_size(shape, name):
            raise ConfigError(
                f"{name} in {reader.path} has shape {reader.size(name)} and the config asks for {hf_size(shape, name)}"
            )
        reader.dtype(name)
        reader.check_scale(name)


def _without_parts(reader: HuggingFaceReader, shape: ModelShape) -> list[str]:
    """Return the names of the tensors of parts that are left out, and name each part in a warning."""
    parts = {f"model.layers.{shape.num_layers + i}.": FURTHER_TOKENS for i in range(shape.num_extra_layers)}
    parts |= FAMILIES[shape.family].left_out
    ignored = []
    for part in dict.fromkeys(parts.values()):
        starts = tuple(start for start, label in parts.items() if label == part)
        if names := [name for name in reader.files if name.startswith(starts)]:
            log.warning(
                "%s holds %d tensors of %s, %s the first; they are left out",
                *(reader.path, len(names), part, min(names)),
            )
            ignored += names
    return ignored


def check_finite(values: torch.Tensor, sources: Callable[[], Iterable[tuple[str, torch.Tensor]]], way_out: str) -> None:
    """Raise ConfigError if some of ``values`` are NaN or infinite.

    The message names the tensors that the values come from.

    values: weights in the dtype in which they will be used.
    sources: a callable without arguments that returns (name, tensor) of the tensors that the values
        come from, in their own dtype; called only for the error message.
    way_out: advice that names the setting of a wider dtype. It ends the message if all sources are
        finite: then the dtype of ``values`` is too narrow for them.
    """
    if torch.stack(torch.aminmax(values.detach())).isfinite().all():  # one pass, without a copy
        return
    names = []
    for name, whole in sources():
        if wrong := int((~whole.isfinite()).sum()):
            raise ConfigError(
                f"{name} holds {wrong} numbers that are NaN or infinite, of {whole.numel()}: the weights are broken"
            )
        names.append(name)
    raise ConfigError(f"{', '.join(names)} hold numbers that {values.dtype} has no place for; {way_out}")
