"""Adapters as a directory of PEFT (adapter_config.json, adapter_model.safetensors) for PeftModel.from_pretrained."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import torch
from safetensors.torch import save_file

from megatron_rl.distributed.atomic_file import replacing_folder
from megatron_rl.weights.mapping import target_entries
from megatron_rl.weights.model_shape import ModelShape

PREFIX = "base_model.model."  # PEFT's, of the model that PeftModel wraps


def adapter_config(shape: ModelShape, hf_path: str) -> dict[str, object]:
    """Return PEFT's LoraConfig (0.21). ``hf_path``: the directory of the frozen model."""
    # one expert of the two kinds of layers: their projections have the same names wherever they lie
    weights = [x for layer in (0, shape.num_layers - 1) for x in target_entries(shape, layer, shape.num_experts or 1)]
    modules = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for x in weights for name in x.hf)
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


def save_peft(tensors: Iterator[tuple[str, torch.Tensor]], config: dict[str, object], path: pathlib.Path) -> None:
    """Write a PEFT directory that appears whole or not at all.

    tensors: by PEFT's names without PREFIX, each valid until the next one.
    """
    with replacing_folder(path) as partial:
        copies = {PREFIX + name: tensor.to("cpu", copy=True) for name, tensor in tensors}
        save_file(copies, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
