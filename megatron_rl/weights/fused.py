"""Experts fused in memory ↔ one tensor per expert in files: transformers 5 does the former, checkpoints hold the
latter.

In memory ``…mlp.experts.gate_up_proj`` is [experts, 2 · ffn, hidden] (gate's rows, then up's) and
``…mlp.experts.down_proj`` [experts, hidden, ffn]; transformers converts while it loads and saves (5.19
``conversion_mapping.py``, "mixtral" and "qwen2_moe"). Its own ``revert_weight_conversion`` hands out copies; here they
are views, so that an engine fills its parameters through them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_rl.weights.mapping import EXPERT_NAMES


def file_tensors(tensors: Mapping[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """A model's tensors (weights or gradients, by in-memory name) under the names of a checkpoint's files, as views.

    family: the config's ``model_type``. Any other than a mixture of ``EXPERT_NAMES`` has the same names in both places.

    Example: ``model.layers.0.mlp.experts.down_proj`` of a mixtral →
    ``model.layers.0.block_sparse_moe.experts.{0…E−1}.w2.weight``.
    """
    if family not in EXPERT_NAMES:
        return dict(tensors)
    names = EXPERT_NAMES[family]
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer, mixture, rest = name.partition(".mlp.")
        within = f"{layer}.{names.block}"
        match rest:
            case "experts.gate_up_proj":
                for expert, both in enumerate(tensor):
                    for part, rows in zip((names.gate, names.up), both.chunk(2), strict=True):
                        found[f"{within}.experts.{expert}.{part}.weight"] = rows
            case "experts.down_proj":
                for expert, columns in enumerate(tensor):
                    found[f"{within}.experts.{expert}.{names.down}.weight"] = columns
            case _:
                found[f"{within}.{rest}" if mixture else name] = tensor
    return found
