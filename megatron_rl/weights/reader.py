"""Reads slices of a model's weights: of a Hugging Face folder's safetensors files, or of tensors in memory.

A folder's files are checked against the model's shape before anything is read (``check_tensors``): every tensor of the
files is one that the model takes or is named as left over.
"""

from __future__ import annotations

import logging
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import check, field, read_object
from megatron_rl.weights.entry import Entry
from megatron_rl.weights.families.family import ExpertNames
from megatron_rl.weights.mapping import hf_size, stage_entries
from megatron_rl.weights.model_shape import ModelShape
from megatron_rl.weights.mxfp4 import GROUP, PackedExpert
from megatron_rl.weights.quantization import SCALE, block_size, dequantize, trace_of
from megatron_rl.weights.shards import DTYPE_NAMES, INDEX
from megatron_rl.weights.stacked import BLOCKS, SCALES, ExpertOfStack, Slice, is_stack, slices_of, stacking

log = logging.getLogger(__name__)

DTYPE_OF_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}
SINGLE = "model.safetensors"
FP8 = "F8_E4M3"
HEAD_NAME, EMBEDDING_NAME, VALUE_NAME = "lm_head.weight", "model.embed_tokens.weight", "score.weight"
ROTARY = "rotary_emb.inv_freq"  # old llama files hold it, and the config has it
ROWS = 8192  # of a vocabulary's table, compared at once


class WeightReader(Protocol):
    def has(self, name: str) -> bool: ...

    def size(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, dimension: int, start: int, stop: int) -> torch.Tensor: ...


class MemoryReader:
    """Reads slices of tensors that are in memory already (random weights, tests)."""

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

    A weight of block FP8 is read as the float32 numbers that it stands for; its scales are no tensors of ``files``.
    Nor are stacks of experts (weights/stacked.py), but a tensor for each expert; one of MXFP4 is read as bfloat16.

    files: each tensor's name and its file.
    stacks: the place of each expert's tensor that lies in a stack; mxfp4: the stacks in that format.
    blocks: rows and columns of a block of FP8, None for full weights.

    Raises ConfigError, naming the file, for files that are missing, cut short, malformed or outside the folder, and
    where the index and the files do not hold the same tensors.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        self.open_files: dict[pathlib.Path, object] = {}
        self.files = _list_tensors(self)
        config = self.path / "config.json"
        fields = read_object(config) if config.is_file() else {}
        self.blocks = block_size(fields, str(config))
        self.scales: dict[str, pathlib.Path] = {}
        self.stacks: dict[str, Slice] = {}
        self.mxfp4: dict[str, pathlib.Path] = {}
        if self.blocks is not None:
            for name in [x for x in self.files if x.endswith(SCALE) and x.removesuffix(SCALE) in self.files]:
                if self._dtype_name(name.removesuffix(SCALE)) == FP8:
                    self.scales[name] = self.files[name]
            self.files = {name: file for name, file in self.files.items() if name not in self.scales}
        if names := stacking(fields.get("model_type")):
            self._unstack(names)

    def _unstack(self, names: ExpertNames) -> None:
        """Put a name for each expert in the place of each stack's, in ``files``."""
        held, self.files = self.files, {}
        for name, file in held.items():
            stack = name.removesuffix(BLOCKS)
            if name != stack and is_stack(stack, names) and f"{stack}{SCALES}" in held:
                self.mxfp4 |= {name: file, f"{stack}{SCALES}": held[f"{stack}{SCALES}"]}
                self._check_packed(stack)
            elif not is_stack(name, names):
                self.files[name] = file
                continue
            experts = self.opened(file).get_slice(name).get_shape()[0]
            for expert in range(experts):
                for own, place in slices_of(stack, expert, names):
                    self.stacks[own], self.files[own] = place, file
        self.files = {name: file for name, file in self.files.items() if name not in self.mxfp4}

    def _check_packed(self, stack: str) -> None:
        """Raise ConfigError where a stack in MXFP4 has not a byte of scale for each group of numbers."""
        blocks, scales = (self.opened(self.mxfp4[x]).get_slice(x) for x in (f"{stack}{BLOCKS}", f"{stack}{SCALES}"))
        wanted = ("U8", tuple(blocks.get_shape()[:-1]))
        found = (scales.get_dtype(), tuple(scales.get_shape()))
        if len(wanted[1]) != 3 or blocks.get_shape()[-1] != GROUP // 2 or found != wanted or blocks.get_dtype() != "U8":
            raise ConfigError(
                f"{stack}{SCALES} in {self.path} is {found[0]} of shape {found[1]}; blocks, {blocks.get_dtype()} of "
                f"{tuple(blocks.get_shape())}, of [experts, rows, groups, {GROUP // 2}] want {wanted[0]} of {wanted[1]}"
            )

    def has(self, name: str) -> bool:
        return name in self.files

    def opened(self, file: pathlib.Path):
        """Return safetensors' handle of a file, opened once."""
        if file not in self.open_files:
            try:
                if file.exists() and not file.is_file():  # safetensors would wait for a pipe's writer
                    raise OSError("it is no regular file")
                self.open_files[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError, ValueError, MemoryError) as error:
                reason = "it does not exist" if not file.exists() else " ".join(str(error).split())[:200]
                raise ConfigError(
                    f"{file} cannot be read as safetensors: {reason}; copy or download it again"
                ) from error
        return self.open_files[file]

    def _slice(self, name: str):
        file = self.files.get(name) or self.scales.get(name)
        if file is None:
            raise ConfigError(
                f"{self.path} holds no tensor named {name}; its config and its weights do not belong together"
            )
        if name not in self.stacks:
            return self.opened(file).get_slice(name)
        place = self.stacks[name]
        stack, expert = place.stack, place.expert
        if f"{stack}{BLOCKS}" not in self.mxfp4:
            return ExpertOfStack(self.opened(file).get_slice(stack), place)
        return PackedExpert(
            *(self.opened(self.mxfp4[x]).get_slice(x) for x in (f"{stack}{BLOCKS}", f"{stack}{SCALES}")), expert
        )

    def _dtype_name(self, name: str) -> str:
        return str(self._slice(name).get_dtype())

    def size(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which ``read`` gives a tensor, or raise ConfigError for one that is not read."""
        dtype_name = self._dtype_name(name)
        if dtype_name == FP8 and f"{name}{SCALE}" in self.scales:
            return torch.float32
        if dtype_name not in DTYPE_OF_NAME:
            raise ConfigError(
                f"{name} in {self.path} is {dtype_name}; only {', '.join(DTYPE_OF_NAME)} are read: it may be quantised"
            )
        return DTYPE_OF_NAME[dtype_name]

    def check_scale(self, name: str) -> None:
        """Raise ConfigError where an FP8 weight's scales are not one floating number per block."""
        scale = f"{name}{SCALE}"
        if scale not in self.scales:
            return
        size = self.size(name)
        if len(size) != 2:
            raise ConfigError(f"{name} in {self.path} is {FP8} of shape {size}; blocks are those of a matrix")
        wanted = tuple(-(-length // each) for length, each in zip(size, self.blocks, strict=True))
        if self.size(scale) != wanted or self._dtype_name(scale) not in DTYPE_OF_NAME:
            raise ConfigError(
                f"{scale} in {self.path} is {self._dtype_name(scale)} of shape {self.size(scale)}; blocks of "
                f"{self.blocks} of a weight {size} have {wanted} scales, F32 or BF16"
            )

    def close(self) -> None:
        """Unmap the files, so that the bytes read are no longer resident; the next read maps them again."""
        self.open_files.clear()

    def read(self, name: str, dimension: int, start: int, stop: int) -> torch.Tensor:
        tensor = self._slice(name)
        part = tensor[start:stop] if dimension == 0 else tensor[:, start:stop]
        if f"{name}{SCALE}" not in self.scales:
            return part
        self.check_scale(name)
        first = (start, 0) if dimension == 0 else (0, start)
        return dequantize(part, self._slice(f"{name}{SCALE}")[:], self.blocks, first)


def has_weights(folder: str | pathlib.Path) -> bool:
    """Return whether a folder holds weights: model.safetensors or an index of shards."""
    return any((pathlib.Path(folder) / name).exists() for name in (SINGLE, INDEX))


def _list_tensors(reader: HuggingFaceReader) -> dict[str, pathlib.Path]:
    """Return each tensor's name and file; every file is opened, and its header agrees with the index."""
    folder = reader.path
    index, single = folder / INDEX, folder / SINGLE
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
    """Yield (name, tensor) of the Hugging Face tensors that a Megatron parameter comes from."""
    for name in entry.hf:
        yield name, reader.read(name, 0, 0, hf_size(shape, name)[0])


def used_names(shape: ModelShape) -> set[str]:
    """Return the names of all tensors that a model of this shape is made of."""
    entries = (entry for stage in range(shape.num_stages) for entry in stage_entries(shape, stage, 1))
    return {name for entry in entries for name in entry.held_by(0, shape, 1).hf}


def left_over(reader: HuggingFaceReader, used: Iterable[str]) -> list[str]:
    """Return the names in the files that a model does not use; the rotary frequencies of old llama files are none."""
    return sorted(x for x in reader.files.keys() - set(used) if not x.endswith(ROTARY))


def heads_differ(reader: HuggingFaceReader) -> bool:
    """Return whether the files hold both an LM head and an embedding, and not the same numbers in both."""
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
    """Raise ConfigError unless the files hold the tensors of a model of this shape, in shapes and dtypes that are read.

    Layers that predict further tokens (``num_extra_layers``) are named in a warning and left out, as transformers does.
    allow_unread: tensors of which the model has no part are named in a warning, and not refused
                  (``model.allow_unread_tensors``).
    """
    used = used_names(shape)
    extra = tuple(f"model.layers.{shape.num_layers + i}." for i in range(shape.num_extra_layers))
    ignored = [name for name in reader.files if name.startswith(extra)] if extra else []
    if ignored:
        log.warning(
            "%s holds %d tensors of layers that predict further tokens, %s the first; they are left out",
            *(reader.path, len(ignored), min(ignored)),
        )
    own = set(reader.files) - set(ignored)
    layers = {int(found[1]) for name in own if (found := re.match(r"model\.layers\.(\d{1,9})\.", name))}
    if layers and layers != set(range(shape.num_layers)) and not (allow_unread and max(layers) >= shape.num_layers):
        raise ConfigError(
            f"{reader.path}: config.json says num_hidden_layers={shape.num_layers} and the files hold {len(layers)} "
            f"layers, {min(layers)} to {max(layers)}; give the config that belongs to them"
        )
    unread = left_over(reader, used.union(ignored))
    if shape.tied_embeddings or shape.value_head:  # a tied model's copy of its embedding; a critic has no LM head
        unread = [name for name in unread if name != HEAD_NAME]
    if unread:
        kind = trace_of(unread)
        names = f"{len(unread)} tensors that the model is not made of, {', '.join(unread[:3])}"
        if kind is not None or not allow_unread:
            way_out = f"they are those of {kind}" if kind else "set model.allow_unread_tensors=true to leave them out"
            raise ConfigError(f"{reader.path} holds {names}; {way_out}")
        log.warning("%s holds %s; they are left out", reader.path, names)
    for name in sorted(used - ({VALUE_NAME} if shape.value_head and not reader.has(VALUE_NAME) else set())):
        if reader.size(name) != hf_size(shape, name):
            raise ConfigError(
                f"{name} in {reader.path} has shape {reader.size(name)} and the config asks for {hf_size(shape, name)}"
            )
        reader.dtype(name)
        reader.check_scale(name)
