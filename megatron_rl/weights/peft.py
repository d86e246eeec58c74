"""The adapters as a PEFT directory (adapter_config.json, adapter_model.safetensors) for PeftModel.from_pretrained."""

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
    """Return PEFT's LoraConfig (0.21). ``hf_path``: the directory of the frozen model.

    Experts' projections have their names in files. PEFT stacks their pairs as transformers 5 stacks
    the experts, gate's and up's block-diagonally (``utils/transformers_weight_conversion.py``).
    Raises ConfigError if PEFT would leave some out (``lost_by_peft``).
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
    """Return the reason why a PEFT directory would not hold all adapters of the model; "" if it would.

    PEFT (0.21.2, read and run) over transformers 5 takes the name of a routed expert's projection
    for the stacked experts' alone. It leaves out the pairs of other layers of the same name, with a
    warning or none.
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
    """Return the targets of both kinds of layers; of the experts, one expert's."""
    return [x for layer in (0, shape.num_layers - 1) for x in target_entries(shape, layer, shape.num_experts or 1)]


def _projection(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def save_peft(
    tensors: Iterator[tuple[str, torch.Tensor]], config: dict[str, object], path: pathlib.Path | RemotePath
) -> None:
    """Write a PEFT directory that appears whole or not at all.

    tensors: by PEFT's names without PREFIX, each valid until the next one.
    path: in an object store the directory is whole if adapter_config.json is there.
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
