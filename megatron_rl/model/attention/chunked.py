"""Llama 4's core attention: tokens attend within chunks of positions, and pairs of neighbouring columns are rotated.

Megatron-Core 0.16.1 cannot compute it. It rotates pairs of neighbouring columns only in tensors of
four dimensions (``models/common/embeddings/rope_utils.py`` _rotate_half), and packed input has
three. It norms q and k before their rotation, in every layer. It neither attends within chunks nor
scales q by position. So Megatron-Core is told to rotate in no layer (``no_rope_freq``). The core
attention here rotates, norms and scales q and k as transformers does (5.19
``Llama4TextAttention``).
"""

from __future__ import annotations

import torch

from megatron_rl.errors import ConfigError
from megatron_rl.model.attention.chunked_spans import chunked_spans
from megatron_rl.model.attention.packed import TorchAttention
from megatron_rl.weights.model_shape import ModelShape

from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip


class ChunkedAttention(TorchAttention):
    """Prepares q and k as Llama 4 does in the given layer, then attends as ``TorchAttention`` does.

    A layer with rotary angles rotates q and k, and norms them if the model has ``l2_norm``. A layer
    without rotary angles may scale q by position.

    frequencies: [d / 2] float32, the rotary embedding's inverse frequencies.
    """

    def __init__(self, config, layer_number, *args, shape: ModelShape, frequencies: torch.Tensor, **kwargs):
        super().__init__(config, layer_number, *args, **kwargs)
        self.shape, self.epsilon = shape.chunked, config.layernorm_epsilon
        self.turns = layer_number - 1 in self.shape.turned_layers  # Megatron-Core counts from 1
        self.chunk_tokens = self.shape.chunk_tokens if layer_number - 1 in self.shape.chunked_layers else None
        self.frequencies = frequencies

    def forward(self, query, key, value, attention_mask, packed_seq_params=None, **given):
        positions = packed_seq_params.position_ids
        if self.turns:
            angles = torch.outer(positions.float(), self.frequencies)
            turn = torch.polar(torch.ones_like(angles), angles)[:, None]
            query, key = (self._turned(x, turn) for x in (query, key))
        elif self.shape.scale:
            steps = torch.floor((positions.float() + 1.0) / self.shape.scale_tokens)
            query = (query * (torch.log1p(steps) * self.shape.scale + 1.0)[:, None, None]).to(query.dtype)
        return super().forward(query, key, value, attention_mask, packed_seq_params=packed_seq_params, **given)

    def spans(self, packed):
        return packed.spans_cut(chunked_spans, self.chunk_tokens)

    def _turned(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """Return x [T, h, d] with each pair of neighbouring columns rotated; then normed, if the model has ``l2_norm``.

        turn: complex64 [T, 1, d / 2], e^(i · angle) of each token and pair.
        """
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
        if not self.shape.l2_norm:
            return turned
        return torch.nn.functional.rms_norm(turned.float(), turned.shape[-1:], None, self.epsilon).to(x.dtype)


def put_chunked_attention(spec: TransformerBlockSubmodules, shape: ModelShape, frequencies: torch.Tensor) -> None:
    """Replace the core attention in the spec of every layer of a model chunk by ``ChunkedAttention``, in place.

    frequencies: float32 [d / 2], the rotary inverse frequencies.

    Raises ConfigError for Transformer Engine's layers. Their kernels neither attend within chunks
    nor rotate pairs of neighbouring columns.
    """
    if shape.layer_spec != "torch":
        raise ConfigError(
            f"model.layer_spec={shape.layer_spec}: Llama 4's attention ({shape.family}) is built of torch's layers "
            "alone; set model.layer_spec=torch"
        )

    def attention(*args, **kwargs) -> ChunkedAttention:
        return ChunkedAttention(*args, shape=shape, frequencies=frequencies, **kwargs)

    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = attention
