"""The conversion from experts fused in memory to one tensor per expert in files: transformers 5 fuses experts.

In memory ``…mlp.experts.gate_up_proj`` is [experts, 2 · ffn, hidden] (gate's rows, then up's) and
``…mlp.experts.down_proj`` [experts, hidden, ffn]. transformers converts when it loads and saves
(5.19 ``conversion_mapping.py``, "mixtral" and "qwen2_moe"). Its own ``revert_weight_conversion``
makes copies. Here the tensors are views, so that an engine fills its parameters through them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_rl.weights.families.register import FAMILIES


def file_tensors(tensors: Mapping[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """Return views of a model's tensors (weights or gradients) under the names of a checkpoint's files.

    tensors: by their names in memory.
    family: the config's ``model_type``. A mixture that is built here has other names in files; any
        other model has the same names. A mixture whose files stack experts also gets a name per
        expert (weights/stacked.py).

    Example: ``model.layers.0.mlp.experts.down_proj`` of a mixtral →
    ``model.layers.0.block_sparse_moe.experts.{0…E−1}.w2.weight``.
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
