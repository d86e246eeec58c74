"""The policy's LoRA adapters in a vLLM worker, for ``weight_sync.adapters=alone``: their checks and their activation.

This module runs in the engine's process, with the receiver. An adapter of one projection is a pair
of matrices, A and B. vLLM (0.32.0, lora/model_manager.py) ignores a pair that no layer of the model
takes, without an error. It copies a pair of a wrong shape into a part of the layer's memory. So
this module checks names and shapes. vLLM itself multiplies B by alpha / rank, and slices pairs for
tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import QKVParallelLinear

from megatron_rl.rollout.weight_sync.transport import is_adapter

ADAPTER_ID = 1  # id of the only adapter, whose values every sync replaces


def policy_request() -> LoRARequest:
    """Return the LoRARequest that makes vLLM compute a request with the policy's current adapters.

    The LoRARequest's path names no file, since the adapters come by weight sync. So a request
    before the first adapters would end the engine.
    """
    return LoRARequest(
        lora_name="policy", lora_int_id=ADAPTER_ID, lora_path="/no file: adapters come by megatron_rl's weight sync"
    )


class PolicyAdapters:
    """Holds the adapter tensors that a weight sync brings, until vLLM computes with them.

    tensors: name → tensor, by PEFT's names without ``base_model.model.``.
    model: vLLM's LoRAModel of the tensors, from the sync's end on; None if the sync brought no
        adapters.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.model: LoRAModel | None = None

    def begin(self) -> None:
        """Forget the tensors of an earlier sync."""
        self.tensors = {}

    def taken_from(self, weights: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Store copies of the adapter tensors among a bucket's tensors; return the other (name, tensor) pairs."""
        self.tensors |= {name: tensor.clone() for name, tensor in weights if is_adapter(name)}
        return [(name, tensor) for name, tensor in weights if name not in self.tensors]

    def build(self, settings: Mapping[str, float], manager: LoRAModelManager) -> None:
        """Set ``model`` to vLLM's LoRAModel of the stored tensors. Raises ValueError (see ``adapter_model``).

        settings: rank and alpha; {} if the sync brings no adapters, and then ``model`` becomes
            None.
        """
        self.model = None
        if settings:
            self.model = adapter_model(self.tensors, **settings, manager=manager)

    def put_in_place(self, manager: LoRAModelManager) -> None:
        """Make vLLM use the adapters of ``self.model`` instead of the earlier ones; ``self.model`` is then None."""
        manager.remove_adapter(self.model.id)
        manager.add_adapter(self.model)
        manager.activate_adapter(self.model.id)
        self.tensors, self.model = {}, None


def adapter_model(tensors: Mapping[str, torch.Tensor], rank: int, alpha: float, manager: LoRAModelManager) -> LoRAModel:
    """Return vLLM's LoRAModel of the adapters. It holds copies of the tensors.

    tensors: name → tensor, by PEFT's names without ``base_model.model.``.

    Raises ValueError if A or B of a pair is missing, or if a pair fits no layer of the engine in
    name and size.
    """
    halves = {name.removesuffix(".weight").rpartition(".lora_")[::2] for name in tensors}
    lacking = sorted(f"{name}.lora_{side}" for name, _ in halves for side in "AB" if (name, side) not in halves)
    if lacking or not halves:
        raise ValueError(f"{len(lacking)} halves of the adapters' pairs did not arrive: {', '.join(lacking[:8])}")
    _check_layers({name for name, _ in halves}, tensors, rank, manager)
    helper = PEFTHelper(r=rank, lora_alpha=alpha, target_modules=sorted({x.rpartition(".")[2] for x, _ in halves}))
    helper.validate_legal(manager.lora_config)
    # Copies, since vLLM multiplies B in place, and the bucket's memory may belong to the sender.
    own = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    return LoRAModel.from_lora_tensors(
        ADAPTER_ID, own, helper, device="cpu", dtype=manager.lora_config.lora_dtype, model_vocab_size=manager.vocab_size
    )


def _check_layers(
    projections: set[str], tensors: Mapping[str, torch.Tensor], rank: int, manager: LoRAModelManager
) -> None:
    """Raise ValueError if the engine lacks a projection, or if a layer's adapters do not have the layer's size.

    projections: the names of the projections that have adapters. A layer of vLLM may join several
        projections, such as q, k and v. Then all of them must have adapters.
    tensors: as for ``adapter_model``.
    """
    layers = {name: manager.packed_modules.get(name, [name]) for name in manager.modules}
    unknown = sorted(projections - {part for parts in layers.values() for part in parts})
    if unknown:
        raise ValueError(f"the engine has no layer for {len(unknown)} of the adapters: {', '.join(unknown[:8])}")
    for name, parts in layers.items():
        adapted = [part for part in parts if part in projections]
        if not adapted:
            continue
        rows, columns = _size(manager.modules[name].base_layer)
        sizes_a = {tuple(tensors[f"{part}.lora_A.weight"].shape) for part in adapted}
        sizes_b = [tuple(tensors[f"{part}.lora_B.weight"].shape) for part in adapted]
        if adapted != parts or sizes_a != {(rank, columns)} or sum(x for x, _ in sizes_b) != rows:
            raise ValueError(
                f"the engine's layer {name} is [{rows}, {columns}], of {', '.join(parts)}, and its adapters of rank "
                f"{rank} are A {sorted(sizes_a)} and B {sizes_b}"
            )
        if {x for _, x in sizes_b} != {rank}:
            raise ValueError(f"B of the engine's layer {name} is {sizes_b} and the rank is {rank}")


def _size(linear: torch.nn.Module) -> tuple[int, int]:
    """Return (rows, columns) of a linear layer's whole weight, before slicing for tensor parallelism."""
    if isinstance(linear, QKVParallelLinear):  # output_size counts heads of keys and values again if ranks repeat them
        kv = linear.total_num_kv_heads * (linear.head_size + linear.v_head_size)
        return linear.total_num_heads * linear.head_size + kv, linear.input_size
    return linear.output_size, linear.input_size
