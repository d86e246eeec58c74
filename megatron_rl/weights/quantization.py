"""The reading of two kinds of quantised checkpoints as full weights, and the refusal of any other kind by its name.

The two kinds are FP8 in blocks, and MXFP4 in the experts of gpt-oss (weights/mxfp4.py).

Block FP8 (DeepSeek-V3, "finegrained fp8" in transformers): ``x.weight`` is float8_e4m3fn [rows,
columns]. ``x.weight_scale_inv`` is float32 or bfloat16, one number per block of
``weight_block_size`` elements. The full weight is their product in float32, as transformers 5.19
computes it (``integrations/finegrained_fp8.py``).
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import check
from megatron_rl.weights.shards import DTYPE_NAMES

SCALE = "_scale_inv"
FP8 = "F8_E4M3"
WAY_OUT = "give the folder of the full weights (bfloat16, float16 or float32)"
# The ends of tensors' names in each format.
_TRACES = {
    ".SCB": "bitsandbytes int8",
    ".weight_format": "bitsandbytes int8",
    ".absmax": "bitsandbytes 4-bit",
    ".quant_map": "bitsandbytes 4-bit",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    ".weight_packed": "compressed-tensors",
    ".weight_shape": "compressed-tensors",
    ".weight_zero_point": "compressed-tensors",
    SCALE: "FP8",
    ".weight_scale": "FP8 or int8 of compressed-tensors or ModelOpt",
    ".weight_scale_2": "NVFP4 of ModelOpt",
    ".input_scale": "static FP8",
    ".activation_scale": "static FP8",
    "_blocks": "MXFP4",
    "_scales": "MXFP4",
}


def is_mxfp4(fields: Mapping[str, object]) -> bool:
    """Return whether a config.json's fields say that a gpt_oss model's experts are in MXFP4."""
    settings = fields.get("quantization_config")
    return isinstance(settings, dict) and (settings.get("quant_method"), fields.get("model_type")) == (
        "mxfp4",
        "gpt_oss",
    )


def block_size(fields: Mapping[str, object], where: str) -> tuple[int, int] | None:
    """Return (rows, columns) of a block if a config.json's fields say block FP8; None for full weights and for MXFP4.

    fields: the fields of config.json.
    where: the file's name, for messages.

    Raises ConfigError, naming the method, for every other quantisation.
    """
    for name in ("compression_config", "quantization_config"):
        settings = fields.get(name)
        if settings is None:
            continue
        settings = check(settings, f"{where}: {name}", dict)
        if is_mxfp4(fields):
            continue
        method, blocks = settings.get("quant_method"), settings.get("weight_block_size")
        if name == "compression_config" or method != "fp8" or blocks is None:
            label = quoted("fp8 without weight_block_size" if method == "fp8" else method)
            raise ConfigError(f"{where}: {name} says that the weights are quantised by {label}; {WAY_OUT}")
        check(blocks, f"{where}: weight_block_size", list)
        if len(blocks) != 2:
            raise ConfigError(f"{where}: weight_block_size must be two integers, and it is {quoted(blocks)}")
        rows, columns = (check(size, f"{where}: weight_block_size", int, least=1, most=2**20) for size in blocks)
        scheme, code = settings.get("activation_scheme", "dynamic"), settings.get("fmt", "e4m3")
        if scheme != "dynamic" or code != "e4m3" or settings.get("scale_fmt") not in (None, "float"):
            raise ConfigError(
                f"{where}: {name} has activation_scheme={quoted(scheme)}, fmt={quoted(code)}, "
                f"scale_fmt={quoted(settings.get('scale_fmt'))}; read are dynamic, e4m3 and float32 scales: {WAY_OUT}"
            )
        return rows, columns
    return None


def trace_of(names: Iterable[str]) -> str | None:
    """Return the kind of quantisation that the ends of names reveal, such as "GPTQ"; None for full weights.

    names: the names of tensors.
    """
    for name in names:
        for end, kind in _TRACES.items():
            if name.endswith(end):
                return kind
    return None


def dequantize(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], start: tuple[int, int]
) -> torch.Tensor:
    """Return float32 [r, c]: a slice of an FP8 weight, each element multiplied by the scale of its block.

    weight: float8_e4m3fn [r, c], the slice.
    scale: [block rows, block columns], the scales of the whole weight.
    block: rows and columns of a block.
    start: row and column of the slice's first element in the whole weight.

    Example: with blocks of (2, 2), element (3, 0) of the whole weight is multiplied by ``scale[1,
    0]``.
    """
    rows, columns = (
        torch.arange(first, first + size) // each for first, size, each in zip(start, weight.shape, block, strict=True)
    )
    return weight.float() * scale.float()[rows][:, columns]


class BlockWeight:
    """Reads slices of a weight in block FP8 as the float32 numbers that it stands for.

    weight, scale: safetensors' slice objects (``get_slice``) of the weight and of its scales.
    block: rows and columns of a block.
    name, folder: the weight's name and its model folder, for messages.
    """

    def __init__(self, weight: Any, scale: Any, block: tuple[int, int], name: str, folder: pathlib.Path) -> None:
        self.weight, self.scale, self.block, self.name, self.folder = weight, scale, block, name, folder

    def get_shape(self) -> list[int]:
        return self.weight.get_shape()

    def get_dtype(self) -> str:
        return DTYPE_NAMES[torch.float32]

    def check(self) -> None:
        """Raise ConfigError unless the weight's scales are one floating-point number per block."""
        size, scales = tuple(self.get_shape()), tuple(self.scale.get_shape())
        if len(size) != 2:
            raise ConfigError(f"{self.name} in {self.folder} is {FP8} of shape {size}; blocks are those of a matrix")
        wanted = tuple(-(-length // each) for length, each in zip(size, self.block, strict=True))
        dtype = str(self.scale.get_dtype())
        if scales != wanted or dtype not in DTYPE_NAMES.values():
            raise ConfigError(
                f"{self.name}{SCALE} in {self.folder} is {dtype} of shape {scales}; blocks of "
                f"{self.block} of a weight {size} have {wanted} scales, F32 or BF16"
            )

    def __getitem__(self, index: slice | tuple[slice, slice]) -> torch.Tensor:
        part = self.weight[index]
        self.check()
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        return dequantize(part, self.scale[:], self.block, (rows.start or 0, columns.start or 0))


def block_weights(
    files: Mapping[str, pathlib.Path],
    opened: Callable[[pathlib.Path], Any],
    block: tuple[int, int],
    folder: pathlib.Path,
) -> tuple[dict[str, pathlib.Path], dict[str, Callable[[], BlockWeight]]]:
    """Return (``files`` without the scales of block FP8, {name of an FP8 weight: function}).

    Each weight has a function without arguments that returns the weight's reader, a ``BlockWeight``.

    files: {tensor name: file}, scales included.
    opened: called with a file; returns safetensors' handle of the file.
    block: rows and columns of a block.
    folder: the model folder, for messages.
    """
    views: dict[str, Callable[[], BlockWeight]] = {}
    rest = dict(files)
    for scale in [x for x in files if x.endswith(SCALE) and x.removesuffix(SCALE) in files]:
        name = scale.removesuffix(SCALE)
        if str(opened(files[name]).get_slice(name).get_dtype()) == FP8:
            views[name] = partial(_block_weight, files, opened, block, name, folder)
            del rest[scale]
    return rest, views


def _block_weight(
    files: Mapping[str, pathlib.Path],
    opened: Callable[[pathlib.Path], Any],
    block: tuple[int, int],
    name: str,
    folder: pathlib.Path,
) -> BlockWeight:
    weight, scale = (opened(files[x]).get_slice(x) for x in (name, f"{name}{SCALE}"))
    return BlockWeight(weight, scale, block, name, folder)


def refuse_served(fields: Mapping[str, object], where: str) -> None:
    """Raise ConfigError if config.json says that the files are quantised.

    A vLLM engine would then hold quantised weights, and the trainer sends full ones.

    fields: the fields of config.json.
    where: the file's name, for messages.
    """
    if not is_mxfp4(fields) and block_size(fields, where) is None:
        return
    kind = "MXFP4" if is_mxfp4(fields) else "FP8"
    raise ConfigError(
        f"{where} has a quantization_config, and rollout.engine=vllm would hold {kind} weights where the trainer "
        f"sends full ones; {WAY_OUT}: megatron-rl convert import and export write it"
    )
