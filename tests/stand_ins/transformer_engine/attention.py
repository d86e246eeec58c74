"""DotProductAttention and the fused rotary embedding over packed sequences, context parallelism included."""

from __future__ import annotations

import os

import torch

from tests.stand_ins.transformer_engine.contract import contract, refuse, require
from tests.stand_ins.transformer_engine.tensor_ranks import Gather

ANY_DTYPE = "STAND_IN_ANY_DTYPE"
"""Variable; "1" lets float32 attend too, which no kernel for packed sequences has, so that sums can be compared."""

BOTTOM_RIGHT = "padding_causal_bottom_right"
MASKS = ("padding_causal", BOTTOM_RIGHT)


def _lengths(bounds: torch.Tensor, what: str) -> list[int]:
    """Return the lengths of whole sequences by their bounds [S + 1]."""
    require(bounds is not None, f"{what} can not be None when qkv_format = thd!")
    require(bounds.dtype == torch.int32, f"{what} must be in dtype torch.int32, not {bounds.dtype}")
    require(bounds.dim() == 1 and int(bounds[0]) == 0, f"{what} must have shape [batch_size + 1] and start at 0")
    return bounds.diff().tolist()


def zigzag(lengths: list[int], rank: int, size: int) -> list[torch.Tensor]:
    """Return the positions that a context rank holds of each sequence: of 2·size chunks r and 2·size − 1 − r."""
    if size == 1:
        return [torch.arange(n) for n in lengths]
    require(all(n % (2 * size) == 0 for n in lengths), f"lengths {lengths} must divide by {2 * size}")
    chunks = [torch.arange(n).chunk(2 * size) for n in lengths]
    return [torch.cat([chunk[rank], chunk[2 * size - 1 - rank]]) for chunk in chunks]


class DotProductAttention(torch.nn.Module):
    @contract("DotProductAttention.__init__")
    def __init__(
        self, *, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, attn_mask_type="causal",
        tp_size=1, tp_group=None, cp_group=None, cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p",
        softmax_scale=None, **unused,
    ):  # fmt: skip
        super().__init__()
        harmless = ("sequence_parallel", "get_rng_state_tracker", "layer_number", "attention_type", "name")
        refuse("DotProductAttention", unused, harmless)
        require(attention_dropout == 0.0, "the stand-in has no dropout")
        require(cp_group is None or cp_comm_type in ("p2p", "all_gather", "a2a"), f"cp_comm_type {cp_comm_type}")
        require(cp_group is None or len(cp_global_ranks) == cp_group.size(), "cp_global_ranks name the cp_group")
        ranks = tp_size if tp_group is None else tp_group.size()
        # The width of k, and of v where it has another; Megatron-Core 0.19 sets the latter around a call with padded v.
        channels = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = channels
        self.softmax_scale = softmax_scale or channels[0] ** -0.5
        self.attn_mask_type, self.cp_group = attn_mask_type, cp_group
        self.heads, self.groups = num_attention_heads // ranks, (num_gqa_groups or num_attention_heads) // ranks

    @contract("DotProductAttention.forward")
    def forward(
        self, *, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None, cu_seqlens_q=None,
        cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None,
        attn_mask_type=None, pad_between_seqs=None, **unused,
    ):  # fmt: skip
        refuse("DotProductAttention.forward", unused)
        require(qkv_format == "thd", f"the stand-in attends over packed sequences only, not qkv_format={qkv_format}")
        mask = attn_mask_type or self.attn_mask_type
        require("padding" in mask, "Attention mask type must be padding or padding_causal for qkv_format=thd!")
        require(mask in MASKS and attention_mask is None, f"the stand-in has the masks {MASKS}, not {mask}")
        require(not pad_between_seqs, "the stand-in has no pads between sequences")
        self._check_states(query_layer, key_layer, value_layer)
        lengths, seen = _lengths(cu_seqlens_q, "cu_seqlens_q"), _lengths(cu_seqlens_kv, "cu_seqlens_kv")
        for name, longest, of in (("max_seqlen_q", max_seqlen_q, lengths), ("max_seqlen_kv", max_seqlen_kv, seen)):
            require(type(longest) is int, f"{name} must be an int, or the host waits for the device's: {longest!r}")
            require(longest >= max(of), f"{name}={longest} is below the longest sequence of {max(of)}")
        size = 1 if self.cp_group is None else self.cp_group.size()
        if mask == BOTTOM_RIGHT:
            require(size == 1, "no backend has a bottom-right mask and context parallelism")
            require(len(lengths) == len(seen) and all(q <= k for q, k in zip(lengths, seen, strict=True)), "q above kv")
            for states, of in ((query_layer, lengths), (key_layer, seen), (value_layer, seen)):
                require(states.shape[0] == sum(of), f"bounds of {of} for {states.shape}")
            return self._attend_at_ends(query_layer, key_layer, value_layer, lengths, seen)
        require(lengths == seen, "bounds differ, and padding_causal then turns FlashAttention off")
        if size > 1:
            for name, bounds in (("q", cu_seqlens_q_padded), ("kv", cu_seqlens_kv_padded)):
                what = f"cu_seqlens_{name}_padded"
                require(bounds is not None, f"{what} can not be None for context parallelism and qkv_format = 'thd'!")
                require(_lengths(bounds, what) == lengths, "no pads between sequences")
        require(sum(lengths) == size * query_layer.shape[0], f"bounds of {lengths} for {query_layer.shape[0]} tokens")
        return self._attend(query_layer, key_layer, value_layer, lengths, size)

    def _check_states(self, query, key, value) -> None:
        half = query.dtype in (torch.bfloat16, torch.float16) or os.environ.get(ANY_DTYPE) == "1"
        require(half, f"no attention backend for packed sequences of {query.dtype}")
        require(query.dtype == key.dtype == value.dtype, "Queries, keys and values must have the same data type!")
        for name, states, heads, channels in (
            ("query", query, self.heads, self.hidden_size_per_attention_head_k),
            ("key", key, self.groups, self.hidden_size_per_attention_head_k),
            ("value", value, self.groups, self.hidden_size_per_attention_head_v),
        ):
            wanted = f"[tokens, {heads}, {channels}]"
            require(states.shape[1:] == (heads, channels), f"{name} of {tuple(states.shape)} is not {wanted}")
            require(states.stride(-1) == 1, "q, k and v must have stride 1 in their last dimension!")

    def _attend_at_ends(self, query, key, value, lengths: list[int], seen: list[int]) -> torch.Tensor:
        """Attend sequence by sequence; a sequence's last query is aligned with its last key."""
        ends = []
        for q, k, v in zip(query.split(lengths), key.split(seen), value.split(seen), strict=True):
            places = torch.arange(len(q)) + len(k) - len(q)
            ends.append(self._softmax(q, k, v, places))
        return torch.cat(ends).to(query.dtype)

    def _softmax(self, q, k, v, places: torch.Tensor) -> torch.Tensor:
        """Attend with queries [Q, h, d], which see the keys up to their ``places`` [Q], to keys [K, g, d]."""
        q = q.transpose(0, 1).float()
        k, v = (x.transpose(0, 1).repeat_interleave(self.heads // self.groups, 0).float() for x in (k, v))
        scores = q @ k.transpose(1, 2) * self.softmax_scale
        future = torch.arange(k.shape[1])[None, :] > places[:, None]
        return (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)

    def _attend(self, query, key, value, lengths: list[int], size: int) -> torch.Tensor:
        """Attend sequence by sequence, to keys that are gathered from all context ranks and put in order."""
        mine, start, ends, rank = 0, 0, [], 0
        if size > 1:
            rank = self.cp_group.rank()
            both = Gather.apply(torch.stack([key, value], 1), self.cp_group)
            key, value = both[_order(lengths, size)].unbind(1)
        for positions, length in zip(zigzag(lengths, rank, size), lengths, strict=True):
            k, v = (x[start : start + length] for x in (key, value))
            ends.append(self._softmax(query[mine : mine + len(positions)], k, v, positions))
            mine, start = mine + len(positions), start + length
        return torch.cat(ends).to(query.dtype)

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None: ...


def _order(lengths: list[int], size: int) -> torch.Tensor:
    """Return the row of each token of the whole sequences among those gathered from all ranks."""
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    rows = [starts[i] + x for rank in range(size) for i, x in enumerate(zigzag(lengths, rank, size))]
    return torch.argsort(torch.cat(rows))


@contract("apply_rotary_pos_emb")
def apply_rotary_pos_emb(
    *, t, freqs, tensor_format="sbhd", fused=False, cu_seqlens=None, cp_size=1, cp_rank=0, **unused
):
    """Turn [T, h, d] by the angles freqs [longest, 1, 1, d2 ≤ d], in float32 and rounded once, as the kernel does.

    In the format ``sbhd``, t is [T, 1, h, d] and freqs have a row for each of its tokens. The rest of each head is
    copied (read in 2.x, common/fused_rope/fused_rope.cu, "copy the rest").
    """
    refuse("apply_rotary_pos_emb", unused)
    require(fused, "the stand-in has the fused kernel only")
    dims = {"thd": 3, "sbhd": 4}.get(tensor_format)
    require(dims == t.dim(), f"the stand-in has no {tensor_format} of {t.dim()} dimensions: [T, h, d] or [T, 1, h, d]")
    require(freqs.dim() == 4 and freqs.shape[1:3] == (1, 1), f"freqs are [s, 1, 1, d], not {tuple(freqs.shape)}")
    require(freqs.dtype == torch.float32, f"freqs of {freqs.dtype} were rounded before the kernel")
    if tensor_format == "sbhd":
        require(t.shape[1] == 1 and len(freqs) == len(t), f"{len(freqs)} angles for {tuple(t.shape)}")
        angles = freqs
    else:
        lengths = _lengths(cu_seqlens, "cu_seqlens")
        require(freqs.shape[0] >= max(lengths), f"{freqs.shape[0]} angles for a sequence of {max(lengths)}")
        angles = freqs[torch.cat(zigzag(lengths, cp_rank, cp_size)), 0]
    turning, rest = t[..., : freqs.shape[3]].float(), t[..., freqs.shape[3] :]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
    return torch.cat([turned.to(t.dtype), rest], dim=-1)
