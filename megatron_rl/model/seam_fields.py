"""The fields of Megatron-Core's TransformerConfig that do not depend on the model's family.

They follow from the token-sum loss (a sum over tokens that nothing divides), from the topology and
from the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.algorithm.signal import UNCOUNTED_FIELDS
from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.topology import Topology
from megatron_rl.errors import ConfigError
from megatron_rl.model.transformer_fields import transformer_fields
from megatron_rl.planning.pipeline_layout import notation
from megatron_rl.weights.model_shape import ModelShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def users_fields(users: Mapping[str, Any], *, lora_rank: int | None) -> dict[str, Any]:
    """Return the user's ``megatron.transformer`` settings in the types of Megatron-Core's TransformerConfig.

    lora_rank: ``lora.rank``; None without LoRA.

    Some fields add a loss or update that is not a sum over tokens (UNCOUNTED_FIELDS, such as
    ``moe_aux_loss_coeff``). They are left out if they are 0, false or null, and Megatron-Core's
    default keeps the feature off. algorithm/signal.py refuses other values.

    Raises ConfigError for a setting that this host cannot run.
    """
    extra = transformer_fields(users, lora_rank=lora_rank)
    extra = {name: value for name, value in extra.items() if name not in UNCOUNTED_FIELDS or value}
    for name in ("attention_dropout", "hidden_dropout"):
        if extra.get(name, 0.0) != 0.0 and not HOST.is_cuda:
            raise ConfigError(
                f"megatron.transformer.{name}={extra[name]} needs CUDA generators; set it to 0 on a host with no GPU"
            )
    return extra


def seam_fields(
    shape: ModelShape, topology: Topology, *, dtype: str, sequence_parallel: bool, deterministic: bool
) -> dict[str, Any]:
    """Return {field: value} of TransformerConfig for parallel sizes, dtypes, the loss and the pipeline schedule.

    The loss is a sum over tokens that nothing divides.

    shape: gives the number of layers of each pipeline stage.
    dtype: the weights' dtype, "float32" or "bfloat16".
    """
    of_weights = DTYPES[dtype]
    return dict(
        tensor_model_parallel_size=topology.tensor_size,
        pipeline_model_parallel_size=topology.pipeline_size,
        expert_model_parallel_size=topology.expert_size,
        expert_tensor_parallel_size=topology.expert_tensor_size,
        context_parallel_size=topology.context_size,
        sequence_parallel=sequence_parallel,
        params_dtype=of_weights,
        pipeline_dtype=of_weights,
        bf16=of_weights is torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=not HOST.is_cuda,
        perform_initialization=False,
        calculate_per_token_loss=True,
        deterministic_mode=deterministic,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths demands it, for dense models too (0.16.1)
        pipeline_model_parallel_layout=notation(shape.stage_layers) if shape.num_stages > 1 else None,
        virtual_pipeline_model_parallel_size=topology.virtual_size if topology.virtual_size > 1 else None,
        # with batched p2p the interleaved schedule at PP=2 receives shapes in the wrong order (0.16.1)
        overlap_p2p_comm=topology.virtual_size > 1,
        batch_p2p_comm=topology.virtual_size == 1,
    )
