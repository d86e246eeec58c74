"""The embedding times a factor, as Gemma has it."""

from __future__ import annotations

import torch

from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)

from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip


def scale_embedding(model: GPTModel, dtype: torch.dtype) -> None:
    """Multiply a first stage's embeddings [T, 1, H] by sqrt(H), rounded to the weights' ``dtype`` as transformers does.

    The weight itself, which a tied head shares, stays as it is.
    """
    factor = float(torch.tensor(model.config.hidden_size**0.5, dtype=dtype))
    model.embedding.register_forward_hook(lambda module, given, embedded: embedded * factor)
