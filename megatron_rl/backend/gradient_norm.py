"""An accurate norm of large float32 gradients, in place of Megatron-Core's fallback without a fused kernel.

Without Transformer Engine and Apex, Megatron-Core 0.16.1 and 0.19.2 call ``torch.norm`` on each
whole tensor (core/utils.py ``local_multi_tensor_l2_norm``). On a CPU that adds up float32 squares
one after the other. For 28 million elements, an embedding of 49,152 tokens, the norm came out 1.7e-3
too small (torch 2.13.0). Another layout's shards have another error, so clipping scaled the gradient
differently in each layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)

from megatron.core.optimizer import clip_grads  # isort: skip
from megatron.core.utils import local_multi_tensor_l2_norm  # isort: skip

PIECE = 4096  # squares are added up in float32 within a piece of this many elements, in float64 over pieces


def l2_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm over all elements of all ``tensors``, float64 [] on their device.

    Without tensors it is 0, on the CPU.
    """
    norms = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        whole = flat.numel() // PIECE * PIECE
        norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, PIECE), dim=1, dtype=torch.float32))
        norms.append(torch.linalg.vector_norm(flat[whole:], dtype=torch.float32).view(1))
    return torch.linalg.vector_norm(torch.cat(norms).double()) if norms else torch.zeros((), dtype=torch.float64)


def _multi_tensor_l2_norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    per_tensor: bool,
    *_: object,
) -> tuple[torch.Tensor, None]:
    """Replace Megatron-Core's ``local_multi_tensor_l2_norm``, with its parameters.

    Returns (the norm over all tensors, float32 [1]; None).
    """
    assert not per_tensor and len(tensor_lists) == 1
    return l2_norm(tensor_lists[0]).to(noop_flag.device, torch.float32).view(1), None


def use_accurate_norm() -> None:
    """Make Megatron-Core use ``l2_norm`` if it would use its fallback.

    A fused kernel stays in use: it adds up many partial sums, which rounds less.
    """
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _multi_tensor_l2_norm
