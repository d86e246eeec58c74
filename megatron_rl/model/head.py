"""The output layer and the value head of a GPTModel whose forward returns hidden states instead of logits.

Log-probs or values are computed from the hidden states later. So logits exist only for loss
positions, a chunk at a time (model/logprob/linear.py), and never for a prompt's tokens.
"""

from __future__ import annotations

import torch

from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)

from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region  # isort: skip


def _in_token_order(hidden: torch.Tensor) -> torch.Tensor:
    """Return the hidden states [T, 1, H] such that backward gives their gradient the strides (H, H, 1).

    GPTModel transposes its output, so without this function the gradient's strides would be (H,
    T·H, 1). With those strides and a frozen weight, torch.matmul would multiply the T rows one by
    one. On a CPU it would also copy the weight for each row (0.16.1 ``tensor_parallel/layers.py``
    LinearWithFrozenWeight; torch 2.13.0 ``LinearAlgebra.cpp`` should_fold).
    """
    return hidden.flatten(0, 1).unsqueeze(1)


def hand_out_hidden(model: GPTModel) -> None:
    """Make the output layer of a last pipeline stage return its input instead of logits.

    The layer then returns the hidden states [T, 1, H] of all T tokens on every tensor rank. It
    keeps its weight, so names, hooks and tied embeddings do not change.
    """
    layer = model.output_layer

    def forward(hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None):
        if layer.sequence_parallel:  # backward sums the gradients of all tensor ranks' columns
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=layer.tp_group
            )
        return _in_token_order(hidden), None

    layer.forward = forward


class ValueHead(torch.nn.Module):
    """Replaces the output layer: holds the value weight [1, H], whole on every tensor rank.

    Forward returns the hidden states; ``values_of`` then applies the weight. Every tensor rank
    computes the same values and the same loss. So each has the whole gradient of the weight and of
    the hidden states, and nothing is summed over tensor ranks. Under sequence parallelism backward
    returns the gradient for the rank's own tokens only.
    """

    def __init__(self, layer) -> None:
        super().__init__()
        self.sequence_parallel, self.group = layer.sequence_parallel, layer.tp_group
        self.weight = torch.nn.Parameter(layer.weight.new_zeros(1, layer.weight.shape[1]))

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ):
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.group)
        return _in_token_order(hidden), None


def put_value_head(model: GPTModel) -> None:
    """Replace the output layer of a last pipeline stage by a ``ValueHead`` with zero weights."""
    model.output_layer = ValueHead(model.output_layer)


def values_of(hidden: torch.Tensor, model: GPTModel) -> torch.Tensor:
    """Return float32 [N], the value head's values of the hidden states [N, H]."""
    return (hidden @ model.output_layer.weight.t())[:, 0].float()


def head_weight(model: GPTModel) -> torch.Tensor:
    """Return [V/TP, H], this tensor rank's rows of the output layer's weight.

    With tied embeddings it is the embedding's weight.
    """
    return (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )
