"""The gated delta rule by the kernels of flash-linear-attention (package fla-core 0.6), which are Triton's.

The kernels take runs that lie end to end, each with a state to begin with, and return the state after
each run's last token. So runs without a parent are computed first, then the responses that continue
them, each beginning with its prompt's last state. The state is float32, and its gradients flow back.

All indices come from the host (runs.py ``Waves``), so that the kernels ask the device for no number.
"""

from __future__ import annotations

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule

from megatron_rl.model.delta_net.runs import DeltaLayout, repeated
from megatron_rl.weights.model_shape import DELTA_CHUNK, DeltaNetShape


def fla_rule(
    convolved: torch.Tensor, decay: torch.Tensor, step: torch.Tensor, layout: DeltaLayout, shape: DeltaNetShape
) -> torch.Tensor:
    """Compute the gated delta rule, in the dtype of ``convolved``; ``DeltaRule`` describes arguments and result.

    On a GPU that has TF32, the kernels multiply float32 numbers in it.
    """
    waves, key_dim = layout.waves.waves, shape.key_head_dim
    widths = (key_dim, key_dim, convolved.shape[-1] - 2 * key_dim)
    numbers = torch.stack([decay, step], -1)
    outputs: list[torch.Tensor] = []
    states: torch.Tensor | None = None
    for wave in waves:
        query, key, value = wave.rows(convolved).split(widths, -1)
        log_decay, beta = wave.of_tokens(numbers).unbind(-1)
        output, states = chunk_gated_delta_rule(
            query[None],
            key[None],
            value.reshape(1, len(value), -1, shape.value_head_dim),
            log_decay[None],
            beta[None],
            initial_state=None if wave.parents is None else repeated(states, wave.parents),
            output_final_state=wave is not waves[-1],
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=wave.bounds,
            chunk_indices=wave.chunks,
            chunk_size=DELTA_CHUNK,
        )
        outputs.append(output[0])
    return layout.waves.back(outputs[0] if len(outputs) == 1 else torch.cat(outputs))
