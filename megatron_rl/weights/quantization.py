"""Quantised checkpoints: two kinds are read as the numbers that they stand for, every other one is refused by name.

They are FP8 in blocks, and MXFP4 in the experts of gpt-oss (weights/mxfp4.py).

Block FP8 (DeepSeek-V3, "finegrained fp8" in transformers): ``x.weight`` is float8_e4m3fn [rows, columns] and
``x.weight_scale_inv`` float32 or bfloat16, one number per block of ``weight_block_size`` elements. The weight is their
product in float32, as transformers 5.19 computes it (``integrations/finegrained_fp8.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import check

SCALE = "_scale_inv"
WAY_OUT = "give the folder of the full weights (bfloat16, float16 or float32)"
# ends of tensors' names, and the format that has them
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
    """Return (rows, columns) of a block where a config.json's fields say block FP8, None for full weights and MXFP4.

    where: the file, for messages.

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
    """Return the quantisation that tensors' names tell of, None for names of full weights."""
    for name in names:
        for end, kind in _TRACES.items():
            if name.endswith(end):
                return kind
    return None


def dequantize(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], start: tuple[int, int]
) -> torch.Tensor:
    """Return float32 [r, c], a slice of a weight in blocks times its blocks' scales.

    weight: float8_e4m3fn [r, c], the slice.
    scale: of the whole weight, one number per block.
    start: row and column of the slice's first element in the whole weight.

    Example: at blocks of (2, 2), element (3, 0) of the whole is multiplied by ``scale[1, 0]``.
    """
    rows, columns = (
        torch.arange(first, first + size) // each for first, size, each in zip(start, weight.shape, block, strict=True)
    )
    return weight.float() * scale.float()[rows][:, columns]
