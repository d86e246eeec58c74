"""Packed sequences for Megatron-Core, and a core attention over torch's flash kernels that takes them.

The sequences are whole or split over context-parallel ranks. Megatron-Core's own
``DotProductAttention`` refuses packed (THD) input and leaves context parallelism to Transformer
Engine (read, 0.16.1 ``transformer/dot_product_attention.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.distributed.platform import send
from megatron_rl.model.attention.apply_rotary import cos_and_sin, token_angles, turn
from megatron_rl.model.attention.flash import span_attention
from megatron_rl.model.attention.layout import Layout
from megatron_rl.model.attention.spans import (
    WHOLE,
    ContextShard,
    Span,
    SpanBatch,
    batch_spans,
    context_positions,
)

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip
from megatron.core.transformer.utils import is_layer_window_attention  # isort: skip

SpansOf = Callable[[Layout, ContextShard, int], list[Span]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeySegments:
    """Says which keys each segment's queries see, for a kernel that aligns both at their ends.

    pieces: the lengths into which this micro-batch's keys are cut: segments, a shared prompt's pads
        apart.
    order:  the pieces that are gathered, segment after segment; None where each segment sees its
            own alone.
    query_bounds, key_bounds: int32 [segments + 1], of the queries and of the gathered keys.
    """

    pieces: tuple[int, ...]
    order: tuple[int, ...] | None
    query_bounds: torch.Tensor
    key_bounds: torch.Tensor
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> KeySegments:
        """Return the segments of a layout.

        Example: a prompt of 3 tokens with answers of 2 and 1: pieces 3, 2, 1 in the order 0, 0, 1,
        0, 2; queries end at 3, 5, 6, and their keys at 3, 8, 12.
        """
        pieces: list[int] = []
        own: list[list[int]] = []  # of each segment
        tokens = {prompt.segment: prompt.tokens for prompt in layout.shared}
        for segment, length in enumerate(layout.lengths):
            parts = [x for x in (tokens.get(segment, length), length - tokens.get(segment, length)) if x]
            own.append(list(range(len(pieces), len(pieces) + len(parts))))
            pieces += parts
        seen = [list(x) for x in own]
        for prompt in layout.shared:
            for segment in layout.responses_of(prompt):
                seen[segment] = [own[prompt.segment][0], *own[segment]]
        lengths = [sum(pieces[i] for i in x) for x in seen]
        return cls(
            pieces=tuple(pieces),
            order=tuple(i for x in seen for i in x) if layout.shared else None,
            query_bounds=send(_bounds_of(layout.lengths), device),
            key_bounds=send(_bounds_of(lengths), device),
            longest_query=max(layout.lengths),
            longest_key=max(lengths),
        )

    def gather(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the keys (or values) [T, g, d] of all segments, one after the other.

        The gradient of a piece that several segments see is their sum, added up in one order.
        """
        if self.order is None:
            return keys
        pieces = torch.split(keys, self.pieces)
        return torch.cat([pieces[i] for i in self.order])

    def attend(
        self, key: torch.Tensor, value: torch.Tensor, attention: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return ``attention`` of the gathered keys and values, whose backward gathers them anew.

        A prompt of p tokens with n answers has n·p rows in each gathered tensor: kept for the
        backward in every layer, they would outgrow all other activations. What is kept are key and
        value themselves.
        """
        gathered = self.gather(key), self.gather(value)
        if self.order is None:
            return attention(*gathered)
        places = {(x.data_ptr(), x.shape, x.stride()): i for i, x in enumerate(gathered)}
        sources = key.detach(), value.detach()

        def pack(tensor: torch.Tensor) -> torch.Tensor | int:
            return places.get((tensor.data_ptr(), tensor.shape, tensor.stride()), tensor)

        def unpack(kept: torch.Tensor | int) -> torch.Tensor:
            return self.gather(sources[kept]) if isinstance(kept, int) else kept

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return attention(*gathered)


@dataclass
class PackedSequences(PackedSeqParams):
    """Adds host-side lengths to Megatron-Core's packed-sequence parameters, so that attention asks the device nothing.

    layout: the places of all sequences, over all context ranks.

    For ``TorchAttention``, and empty where Transformer Engine attends:
    position_ids: int64 [T], the position of each of this rank's tokens in its own sequence, for the
        rotary embedding.
    spans: which queries see which keys.
    key_order: int64 [CP·T], the row of each of the micro-batch's tokens among those gathered from
               all context ranks; None without them.
    context: this rank among those that share the sequences.
    segments: for Transformer Engine where prompts may be shared, in place of the bounds.
    shared: what the first layer that needs it has made of the layout, for the others (``once``).
    angles: inverse frequencies [d / 2] and what the first attention that applies them made of them,
        for the others.
    """

    layout: Layout | None = None
    position_ids: torch.Tensor | None = None
    spans: tuple[SpanBatch, ...] = ()
    key_order: torch.Tensor | None = None
    context: ContextShard = WHOLE
    segments: KeySegments | None = None
    shared: dict[Hashable, Any] = field(default_factory=dict)
    angles: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None

    def spans_cut(self, spans_of: SpansOf | None, tokens: int | None) -> tuple[SpanBatch, ...]:
        """Return which queries see which keys within a window or a chunk of this many tokens; None sees all.

        spans_of: ``windowed_spans`` or ``chunked_spans``; None where all is seen. Layers of one
            width share the spans.
        """
        if tokens is None or tokens >= self.layout.longest:
            return self.spans
        return self.once((spans_of, tokens), lambda: self._batches(spans_of, tokens))

    def _batches(self, spans_of: SpansOf, tokens: int) -> tuple[SpanBatch, ...]:
        spans, device = spans_of(self.layout, self.context, tokens), self.position_ids.device
        return batch_spans(spans, len(self.position_ids), self.layout.num_tokens, device)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what ``make`` gives, made by the first layer that asks for ``key``."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]


def pack(
    layout: Layout,
    device: torch.device,
    context: ContextShard = WHOLE,
    *,
    for_transformer_engine: bool = False,
    share_prompts: bool = False,
) -> PackedSequences:
    """Return packed-sequence parameters for sequences laid one after the other.

    layout: where the sequences lie.
    for_transformer_engine: gives the bounds (cu_seqlens) that its kernels read, in place of the
        spans. Without a fused kernel Megatron-Core asks the device for the lengths then, twice in
        every layer; without bounds it applies rotary angles token by token (model/rotary.py).
    share_prompts: prompts may be shared, so that Transformer Engine gets segments in place of the
        bounds, whose positions all begin at 0.

    Example: sequences of 2 and 3 tokens make cu_seqlens [0, 2, 5], or one batch of two triangles.
    """
    lengths = layout.lengths
    positions = layout.positions()[context_positions(lengths, context.rank, context.size)]
    shared = dict(
        qkv_format="thd",
        layout=layout,
        position_ids=send(torch.from_numpy(positions), device),
        context=context,
    )
    if for_transformer_engine:
        if share_prompts:
            return PackedSequences(**shared, segments=KeySegments.of(layout, device))
        return PackedSequences(**shared, **_bounds(lengths, device, context))
    batches = batch_spans(layout.spans(context), len(positions), layout.num_tokens, device)
    return PackedSequences(**shared, spans=batches, key_order=_key_order(lengths, context, device))


def _key_order(lengths: tuple[int, ...], context: ContextShard, device: torch.device) -> torch.Tensor | None:
    if context.size == 1:
        return None
    gathered = np.concatenate([context_positions(lengths, rank, context.size) for rank in range(context.size)])
    return send(torch.from_numpy(np.argsort(gathered)), device)


def _bounds(lengths: tuple[int, ...], device: torch.device, context: ContextShard) -> dict[str, object]:
    """Return the fields that Transformer Engine reads, of the whole sequences: int32 [S + 1] and the longest.

    Under context parallelism its FlashAttention asserts on the padded bounds, FusedAttention alone
    makes them itself (2.3 to 2.20, context_parallel.py and backends.py). No pad lies between
    sequences here, and the very same tensor says so without a question to the device.
    """
    cu_seqlens = send(_bounds_of(lengths), device)
    fields: dict[str, object] = dict(
        cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
    )
    if context.size > 1:
        fields |= dict(cu_seqlens_q_padded=cu_seqlens, cu_seqlens_kv_padded=cu_seqlens)
        if "pad_between_seqs" in PackedSeqParams.__dataclass_fields__:  # 0.19.2
            fields["pad_between_seqs"] = False
    return fields


def _bounds_of(lengths: Sequence[int]) -> torch.Tensor:
    """Return int32 [S + 1], where each of S sequences begins, and the end."""
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    bounds[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return bounds


class _GatherContext(torch.autograd.Function):
    """Gathers [T, …] of each context rank to [CP·T, …], in rank order; backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.size = group, local.shape
        gathered = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        local = gradient.new_empty(ctx.size)
        dist.reduce_scatter_tensor(local, gradient.contiguous(), group=ctx.group)
        return local, None


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Return the tokens that a token of a layer sees, itself among them; None where it sees all before it.

    layer_number: the layer's over all pipeline stages, from 1 on. Megatron-Core's ``window_size``
        counts the tokens
    before the token alone (0.16.1 ``transformer/dot_product_attention.py``).
    """
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    return config.window_size[0] + 1


def _turns(packed: PackedSequences, inv_freq: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return cosine and sine [T, 1, d2 / 2] of the tokens' angles; all layers share what the first one makes."""
    if packed.angles is None or packed.angles[0] is not inv_freq:
        packed.angles = inv_freq, cos_and_sin(token_angles(packed.position_ids, inv_freq), dtype)
    return packed.angles[1]


class TorchAttention(torch.nn.Module):
    """Computes causal attention over packed input: q [T, h, d], k [T, g, d] and v [T, g, e] → [T, h·e].

    No token sees another sequence's tokens, nor those before its layer's window (``window_of``).
    Where v is narrower than q and k (model/latent_attention.py) it is filled up with zeros, which
    the kernels' outputs then hold too: they take one width. Takes the arguments with which
    Megatron-Core builds a core attention.

    softmax_offset: [h], sinks (model/gpt_oss.py); None without.
    inv_freq: float32 [d2 / 2], d2 ≤ d, where it turns queries and keys; None where they come
        turned.
    """

    inv_freq: torch.Tensor | None = None

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__()
        self.softmax_scale = softmax_scale
        self.softmax_offset: torch.nn.Parameter | None = None
        self.window, self.spans_of = window_of(config, layer_number), None
        if self.window is not None:
            from megatron_rl.model.attention.window_spans import windowed_spans

            self.spans_of = windowed_spans

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None, **_
    ):
        if not isinstance(packed_seq_params, PackedSequences):
            raise TypeError(
                f"TorchAttention takes PackedSequences as packed_seq_params, not {type(packed_seq_params).__name__}"
            )
        if self.inv_freq is not None:
            cos, sin = _turns(packed_seq_params, self.inv_freq, query.dtype)
            query, key = turn(query, cos, sin), turn(key, cos, sin)
        scale, width = self.softmax_scale or query.shape[-1] ** -0.5, value.shape[-1]
        short = key.shape[-1] - width  # latent attention's values and keys differ; zeros make them alike
        if short > 0:
            value = torch.nn.functional.pad(value, (0, short))
        elif short < 0:
            query, key = (torch.nn.functional.pad(x, (0, -short)) for x in (query, key))
        if packed_seq_params.context.size > 1:
            both = _GatherContext.apply(torch.stack([key, value], dim=1), packed_seq_params.context.group)
            key, value = both.index_select(0, packed_seq_params.key_order).unbind(1)
        spans = self.spans(packed_seq_params)
        return span_attention(query, key, value, spans, scale, sinks=self.softmax_offset)[..., :width].flatten(1)

    def spans(self, packed: PackedSequences) -> tuple[SpanBatch, ...]:
        """Return which of the micro-batch's keys this layer's queries see."""
        return packed.spans_cut(self.spans_of, self.window)
