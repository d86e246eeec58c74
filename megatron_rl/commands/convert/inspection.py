"""The description of a Hugging Face directory or a Megatron checkpoint, for `megatron-rl convert inspect`.

Only headers and metadata are read; no weights are loaded.
"""

from __future__ import annotations

import math
import pathlib
import pickle
from collections import Counter
from typing import TYPE_CHECKING

from megatron_rl.checkpoint.convert import MODEL_KEYS, check_source, plan_export
from megatron_rl.checkpoint.folder import LATEST, MANIFEST, verify
from megatron_rl.checkpoint.megatron_lm import MegatronFolder, open_folder
from megatron_rl.checkpoint.torch_dist import TorchDistReader
from megatron_rl.commands.convert.source import read_model, read_on_disk
from megatron_rl.errors import ConfigError
from megatron_rl.weights.reader import HuggingFaceReader

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath


def inspect(source: pathlib.Path | RemotePath, hf: pathlib.Path | RemotePath | None, iteration: int | None) -> dict:
    """Return a dict that describes a model's directory; its keys, such as "tensors" and "family", are in display order.

    The value of "convertible" is "yes", or "no: " and the reason.

    source: a Hugging Face directory or the folder of a Megatron checkpoint.
    hf: the directory of the checkpoint's config; None to look for it in the checkpoint's folder.
    iteration: the number of the checkpoint to describe; None for the latest.

    Raises DamagedCheckpoint if a file of a checkpoint is missing, truncated or damaged.
    """
    if (source / "config.json").exists() and not (source / LATEST).exists():
        return _inspect_hugging_face(read_on_disk(source, "SOURCE", weights=True))
    megatron = open_folder(source, iteration)
    folder = hf or megatron.hf
    return _inspect_megatron(megatron, None if folder is None else read_on_disk(folder, "--hf"))


def _sizes(tensors: list[tuple[str, tuple[int, ...], object]]) -> dict:
    """Return {"parameters": number, "gigabytes": size, "dtypes": text}, the totals of all the tensors.

    tensors: (name, shape, dtype) of each tensor.
    """
    kinds = Counter(str(dtype).removeprefix("torch.") for *_, dtype in tensors)
    return {
        "parameters": sum(math.prod(shape) for _, shape, _ in tensors),
        "gigabytes": round(sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in tensors) / 1e9, 6),
        "dtypes": ", ".join(f"{name} ({count} tensors)" for name, count in sorted(kinds.items())),
    }


def _inspect_hugging_face(source: pathlib.Path) -> dict:
    reader = HuggingFaceReader(source)
    tensors = [(name, reader.size(name), reader.dtype(name)) for name in sorted(reader.files)]
    facts = {
        "kind": "Hugging Face",
        "files": len(set(reader.files.values())),
        "tensors": len(tensors),
        **_sizes(tensors),
    }
    try:
        _, shape = read_model(source)
        facts["family"] = shape.family
        check_source(reader, shape)
        facts["convertible"] = "yes"
    except ConfigError as error:
        facts["convertible"] = f"no: {error}"
    facts["tensor_list"] = [f"{name} {list(size)} {dtype}" for name, size, dtype in tensors]
    return facts


def _inspect_megatron(source: MegatronFolder, hf: pathlib.Path | None) -> dict:
    if (source.path / MANIFEST).exists():  # a training run's checkpoint: the names and sizes of its files are checked
        verify(source.path, share=None)
    reader = TorchDistReader(source.path)
    everything = [(key, reader.size(key), reader.dtype(key)) for key in sorted(reader.tensors)]
    weights = [x for x in everything if x[0].startswith(MODEL_KEYS)]
    others = [x for x in everything if x not in weights]
    # The torch spec's name and Transformer Engine's hold the same norm: it is counted once.
    if "decoder.layers.pre_mlp_layernorm.weight" in reader.tensors:
        weights = [x for x in weights if x[0] != "decoder.layers.mlp.linear_fc1.layer_norm_weight"]
    facts = {"kind": "Megatron torch_dist", "checkpoint": str(source.path), "tensors": len(weights), **_sizes(weights)}
    gigabytes = sum(math.prod(size) * dtype.itemsize for _, size, dtype in others) / 1e9
    facts["other_tensors"] = f"{len(others)} ({gigabytes:.3f} GB): an optimizer's, or another model's"
    facts["objects"] = len(reader.objects)
    try:
        facts["common"] = ", ".join(sorted(reader.common()))
    except pickle.UnpicklingError as error:
        facts["common"] = f"not read: it holds more than weights_only takes ({str(error).splitlines()[0]})"
    try:
        if hf is None:
            raise ConfigError(
                f"{source.folder} has no hf/config.json; name a directory with the model's config and tokenizer by --hf"
            )
        _, shape = read_model(hf)
        facts["family"] = shape.family
        plan_export(reader, shape, None)
        facts["convertible"] = "yes"
    except ConfigError as error:
        facts["convertible"] = f"no: {error}"
    facts["tensor_list"] = [f"{name} {list(size)} {dtype}" for name, size, dtype in everything]
    return facts
