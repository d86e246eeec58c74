"""The LoRA adapters as a PEFT directory (adapter_config.json, adapter_model.safetensors), which PeftModel loads."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from megatron_rl.distributed.atomic_file import replacing_folder
from megatron_rl.errors import ConfigError
from megatron_rl.weights.entry import Entry
from megatron_rl.weights.mapping import target_entries
from megatron_rl.weights.model_shape import ModelShape

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # PEFT's prefix for the model that PeftModel wraps


def adapter_config(shape: ModelShape, hf_path: str) -> dict[str, object]:
    """Return the fields of PEFT's LoraConfig (0.21) for the model's adapters.

    ``target_modules`` names experts' projections as a checkpoint's files do (``gate_proj``, say).
    PEFT itself maps them to the experts that transformers 5 stacks in memory
    (``utils/transformers_weight_conversion.py``).

    hf_path: the directory of the frozen model.

    Raises ConfigError if PEFT would leave out some adapters (``lost_by_peft``).
    """
    lost = lost_by_peft(shape)
    if lost:
        raise ConfigError(lost)
    modules = dict.fromkeys(_projection(name) for entry in _targets(shape) for name in entry.hf)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": shape.lora_rank,
        "lora_alpha": shape.lora_alpha,
        "target_modules": list(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "base_model_name_or_path": hf_path,
    }


def lost_by_peft(shape: ModelShape) -> str:
    """Return the reason why PEFT would not load all adapters of the model; "" if it would.

    If routed experts and other layers (a dense MLP, a shared expert) have projections of the same
    name, PEFT (0.21.2) over transformers 5 loads adapters for the routed experts
    only. It leaves out those of the other layers, with or without a warning.
    """
    targets = _targets(shape)
    routed = {_projection(name) for entry in targets if entry.expert is not None for name in entry.hf}
    both = [x for entry in targets if entry.expert is None for x in map(_projection, entry.hf) if x in routed]
    if not both:
        return ""
    return (
        f"adapters on {both[0]} of {shape.family} are on routed experts and on a shared expert or a dense layer, and "
        "PEFT (0.21.2) over transformers 5 would leave out the latter; take the weights with adapters merged in, hf, "
        "or set lora.targets=[linear_qkv,linear_proj]"
    )


def _targets(shape: ModelShape) -> list[Entry]:
    """Return the ``Entry`` objects of the adapted weights in the first and the last layer.

    These two layers stand for both kinds of layers (dense or mixture). Of a mixture's routed experts
    one is included, which stands for all.
    """
    return [x for layer in (0, shape.num_layers - 1) for x in target_entries(shape, layer, shape.num_experts or 1)]


def _projection(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def save_peft(
    tensors: Iterator[tuple[str, torch.Tensor]], config: dict[str, object], path: pathlib.Path | RemotePath
) -> None:
    """Write a PEFT directory that appears whole or not at all.

    tensors: (name, tensor), with PEFT's names without ``base_model.model.``; each tensor is valid
        until the next one is asked for.
    config: the content of adapter_config.json.
    path: the directory. In an object store it counts as whole if adapter_config.json is there.
    """
    if isinstance(path, pathlib.Path):
        opened = replacing_folder(path)
    else:
        from megatron_rl.weights.store_folder import uploaded

        opened = uploaded(path, CONFIG)
    with opened as partial:
        copies = {PREFIX + name: tensor.to("cpu", copy=True) for name, tensor in tensors}
        save_file(copies, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
