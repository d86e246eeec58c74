"""The LM head, taken out of GPTModel's forward: the model hands out what its output layer would take, and log-probs are made of that.

So logits exist for loss positions alone, a chunk at a time (model/logprob.py), and never for a prompt's tokens.
"""

from __future__ import annotations

import torch

from megatron_rl import platform  # noqa: F401  (before megatron.core)

from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region  # isort: skip


def hand_out_hidden(model: GPTModel) -> None:
    """Makes the output layer of a last stage answer with its input, whole: [T, 1, H] on every tensor rank.

    The layer stays a module with its weight, so that names, hooks and tied embeddings are what they were.
    """
    layer = model.output_layer

    def forward(hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None):
        if layer.sequence_parallel:  # the gradients of all tensor ranks' columns are summed on the way back
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=layer.tp_group)
        return hidden, None

    layer.forward = forward


def head_weight(model: GPTModel) -> torch.Tensor:
    """[V/TP, H] this tensor rank's rows of the output matrix: the embedding's where the two are tied on this stage."""
    return model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else model.output_layer.weight
