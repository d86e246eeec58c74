"""The splitting of transformers 5's tensors of all experts into one tensor per expert, as checkpoint files hold them.

In memory ``…mlp.experts.gate_up_proj`` is [experts, 2 · ffn, hidden] (gate's rows, then up's).
``…mlp.experts.down_proj`` is [experts, hidden, ffn]. transformers converts files to this form when
it loads, and back when it saves (5.19 ``conversion_mapping.py``, "mixtral" and "qwen2_moe").

transformers' ``revert_weight_conversion`` makes copies. Here the tensors are views: an engine that
copies weights into a view fills its own parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_rl.weights.families.register import FAMILIES


def file_tensors(tensors: Mapping[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """Return {name in a checkpoint's files: view} of a model's tensors (weights or gradients).

    tensors: the tensors by their names in memory.
    family: the config's ``model_type``. The names change only for families with a mixture of experts
        whose model this package builds itself (weights/families). Each expert gets names of its
        own, even if the files hold all experts in one tensor (weights/stacked.py).

    Example: ``model.layers.0.mlp.experts.down_proj`` of a mixtral →
    ``model.layers.0.block_sparse_moe.experts.0.w2.weight``, and so on for each expert.
    """
    names = FAMILIES[family].experts if family in FAMILIES else None
    if names is None:
        return dict(tensors)
    if names.stacked:
        from megatron_rl.weights.stacked import slices

        return dict(slices(tensors.items(), family))
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer, mixture, rest = name.partition(".mlp.")
        within = f"{layer}.{names.block}"
        match rest:
            case "experts.gate_up_proj":
                for expert, both in enumerate(tensor):
                    for part, rows in zip((names.gate, names.up), both.chunk(2), strict=True):
                        renamed[f"{within}.experts.{expert}.{part}.weight"] = rows
            case "experts.down_proj":
                for expert, columns in enumerate(tensor):
                    renamed[f"{within}.experts.{expert}.{names.down}.weight"] = columns
            case _:
                renamed[f"{within}.{rest}" if mixture else name] = tensor
    return renamed
