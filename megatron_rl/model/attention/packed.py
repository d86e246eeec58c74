"""Packed sequences for Megatron-Core, and a core attention that computes on them with torch's flash kernels.

Sequences are whole or split over context-parallel ranks. Megatron-Core's ``DotProductAttention``
refuses packed (THD) input and leaves context parallelism to Transformer Engine (0.16.1
``transformer/dot_product_attention.py``).
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
    """Describes which keys each segment's queries see, in the form that Transformer Engine's kernels take.

    A segment is a run of tokens of one sequence (layout.py ``Layout``). The kernels take gathered
    keys: the keys that segment 0 sees, then those that segment 1 sees, and so on. Of a segment's n
    gathered keys the last query sees all n, the query before it the first n − 1, and so on.

    pieces: the lengths of the pieces into which the micro-batch's keys are split. Each segment is
        one piece, except that a padded shared prompt is two: the prompt, and its pads, since
        responses do not see the pads.
    order: the indices of the pieces to gather: those that segment 0 sees, then those that segment 1
        sees, and so on. None if each segment sees only its own piece.
    query_bounds: int32 [segments + 1], the index of each segment's first query, then the number of
        all queries.
    key_bounds: int32 [segments + 1], the index of each segment's first gathered key, then the
        number of all gathered keys.
    longest_query, longest_key: the largest number of queries, and of gathered keys, of one segment.
    """

    pieces: tuple[int, ...]
    order: tuple[int, ...] | None
    query_bounds: torch.Tensor
    key_bounds: torch.Tensor
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> KeySegments:
        """Return the ``KeySegments`` of a layout, with its tensors on ``device``.

        Example: a prompt of 3 tokens with responses of 2 and 1 tokens has ``pieces`` (3, 2, 1). The
        prompt sees piece 0, the first response pieces 0 and 1, the second pieces 0 and 2. So
        ``order`` is (0, 0, 1, 0, 2). The segments see 3, 5 and 4 keys: ``key_bounds`` is [0, 3, 8,
        12].
        """
        pieces: list[int] = []
        own: list[list[int]] = []  # each segment's pieces
        tokens = {prompt.segment: prompt.tokens for prompt in layout.shared}
        for segment, length in enumerate(layout.lengths):
            parts = [x for x in (tokens.get(segment, length), length - tokens.get(segment, length)) if x]
            own.append(list(range(len(pieces), len(pieces) + len(parts))))
            pieces += parts
        # a response sees its prompt's piece before its own
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
        """Return one tensor [gathered, g, d] of the keys (or values) that each segment sees, segment after segment.

        keys: [T, g, d], the keys of the micro-batch, split into ``pieces``.

        A shared prompt's piece is repeated for each response to the prompt. Backward adds up the
        gradients of a piece's copies in a fixed order.
        """
        if self.order is None:
            return keys
        pieces = torch.split(keys, self.pieces)
        return torch.cat([pieces[i] for i in self.order])

    def attend(
        self, key: torch.Tensor, value: torch.Tensor, attention: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return ``attention(keys, values)`` of keys and values in which each response's rows follow its prompt's.

        key, value: [T, g, d], before ``gather`` repeats the prompts' rows.
        attention: a function of the gathered keys and values that returns the attention output.

        A prompt of p tokens with n responses has (n + 1)·p rows in each gathered tensor. Kept in
        every layer, these tensors would outgrow all other activations. So only key and value are
        kept, and backward gathers them again.
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
    """Holds Megatron-Core's packed-sequence parameters, and where each sequence's tokens lie.

    The lengths are in host memory, so attention need not wait for a read from the device.

    layout: where the tokens of all sequences lie, over all context ranks.
    position_ids: int64 [T], the position of each of this rank's tokens in its sequence, for the
        rotary embedding.
    context: this rank among the context ranks that share the sequences.
    segments: the keys that each segment sees. Transformer Engine's attention takes them in place of
        sequence bounds (cu_seqlens) if samples may share one copy of their prompt; None otherwise.
    shared: values that the first layer computes from the layout and later layers reuse (``once``).
    angles: a pair: the inverse frequencies [d / 2], and the tensors that the first layer's
        attention computes from them for all layers. These are cosine and sine, or for Transformer
        Engine the angles. None before the first layer.

    For ``TorchAttention`` only:

    spans: which query ranges see which key ranges.
    key_order: int64 [CP·T], each token's row among the keys gathered from all context ranks; None
        without context parallelism.
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
        """Return the spans of a layer whose tokens see only a window or a chunk of their sequence.

        spans_of: ``windowed_spans`` or ``chunked_spans``, which computes the spans.
        tokens: the length of the window or chunk.

        Both are None if a token sees all earlier tokens of its sequence. Layers with equal arguments
        get the same spans, computed once.
        """
        if tokens is None or tokens >= self.layout.longest:
            return self.spans
        return self.once((spans_of, tokens), lambda: self._batches(spans_of, tokens))

    def _batches(self, spans_of: SpansOf, tokens: int) -> tuple[SpanBatch, ...]:
        spans, device = spans_of(self.layout, self.context, tokens), self.position_ids.device
        return batch_spans(spans, len(self.position_ids), self.layout.num_tokens, device)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of ``make()``, which only the first call with ``key`` computes; later calls reuse it."""
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

    layout: where the sequences' tokens lie.
    for_transformer_engine: True gives sequence bounds (cu_seqlens), which Transformer Engine's
        kernels read. False gives spans, ranges of queries with the keys that they see.
    share_prompts: whether samples may share one copy of their prompt. If True, Transformer Engine
        gets ``KeySegments`` instead of bounds. Bounds would make a response a sequence of its own,
        whose positions begin at 0 instead of after its prompt.

    Example: sequences of 2 and 3 tokens have the bounds [0, 2, 5]. As spans they are two causal
    triangles, in one batch.
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
    """Return {field: value} for Transformer Engine: the sequences' bounds, int32 [S + 1], and the longest length.

    Under context parallelism Transformer Engine's FlashAttention also needs the bounds with the pads
    between sequences (2.3 to 2.20, context_parallel.py and backends.py). Here no pad lies between
    sequences, so one tensor is given as both.
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
    """Return int32 [S + 1], the index of the first token of each of S sequences, then the number of all tokens."""
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    bounds[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return bounds


class _GatherContext(torch.autograd.Function):
    """Gathers the tensors [T, …] of all context ranks to [CP·T, …], in rank order.

    Backward sums the gradients of all ranks, and returns the rows of the rank's own tensor.
    """

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


def gather_context(local: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
    """Return the rows [CP·T, …] of all context ranks, in the order of the micro-batch's tokens.

    Backward sums the gradients of all ranks. For torch's layers and Transformer Engine's.

    local: [T, …], this rank's rows.
    """
    order = packed.key_order
    if order is None:
        order = packed.once(
            "key order", lambda: _key_order(packed.layout.lengths, packed.context, packed.position_ids.device)
        )
    return _GatherContext.apply(local, packed.context.group).index_select(0, order)


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Return the number of tokens that a token sees in a layer, itself included; None if it sees all earlier tokens.

    layer_number: the layer's number over all pipeline stages, from 1.

    Megatron-Core's ``window_size`` does not count the token itself (0.16.1
    ``transformer/dot_product_attention.py``).
    """
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    return config.window_size[0] + 1


def _turns(packed: PackedSequences, inv_freq: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return (cosine, sine) of the tokens' rotary angles, each [T, 1, d2 / 2] in ``dtype``.

    The first layer computes them for all layers.

    inv_freq: float32 [d2 / 2], the inverse frequencies of the d2 rotated columns of a head.
    """
    if packed.angles is None or packed.angles[0] is not inv_freq:
        packed.angles = inv_freq, cos_and_sin(token_angles(packed.position_ids, inv_freq), dtype)
    return packed.angles[1]


class TorchAttention(torch.nn.Module):
    """Computes causal attention over packed input: q [T, h, d], k [T, g, d] and v [T, g, e] → [T, h·e].

    A token sees itself and earlier tokens of its own sequence, within the layer's window
    (``window_of``). The kernels need d = e. If they differ (model/latent_attention.py), the
    narrower tensors are padded with zeros, and the output is cut to v's width. The constructor's
    arguments are those of Megatron-Core's core attentions.

    softmax_offset: [h], attention sinks (model/gpt_oss.py); None without sinks.
    inv_freq: float32 [d2 / 2], the inverse frequencies by which the module rotates the first d2 ≤ d
        columns of queries and keys. None if queries and keys come rotated already.
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
        short = key.shape[-1] - width  # latent attention's values and keys differ in width
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
        """Return the spans (query ranges with the key ranges that they see) of this layer, in batches."""
        return packed.spans_cut(self.spans_of, self.window)
