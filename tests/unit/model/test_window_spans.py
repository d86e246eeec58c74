"""Checks model/{attention,window,chunked}_spans.py, and attention within windows, against masks made pair by pair."""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import ConfigError
from megatron_rl.model.attention import packed as attention
from megatron_rl.model.attention.chunked_spans import chunked_spans
from megatron_rl.model.attention.layout import Layout, lay_out
from megatron_rl.model.attention.packed import TorchAttention, pack, window_of
from megatron_rl.model.attention.spans import ContextShard, SpanBatch, batch_spans, context_positions
from megatron_rl.model.attention.window_spans import windowed_spans
from megatron_rl.model.build import _window_fields
from megatron_rl.model.hf_config import read_shape
from megatron_rl.model.invariant.parts import require_shown
from megatron_rl.weights.families.layer_fields import windows_of
from tests.reference import tiny_config
from tests.unit.backend.packed import CPU, attention_config


def naive_mask(layout: Layout, sees: Callable[[int, int], bool]) -> np.ndarray:
    """Return bool [T, T]: which earlier keys of its sample and its prompt, but no pads, a query ``sees``."""
    owner, position = np.repeat(np.arange(len(layout.lengths)), layout.lengths), layout.positions().tolist()
    prompt_of = {segment: x for x in layout.shared for segment in layout.responses_of(x)}
    mask = np.zeros((layout.num_tokens, layout.num_tokens), dtype=bool)
    for q, k in np.ndindex(mask.shape):
        prompt = prompt_of.get(owner[q])
        of_prompt = prompt is not None and owner[k] == prompt.segment and position[k] < prompt.tokens
        own = owner[q] == owner[k] or of_prompt
        mask[q, k] = own and position[k] <= position[q] and sees(position[q], position[k])
    return mask


def spans_mask(batches: tuple[SpanBatch, ...], num_queries: int, num_keys: int) -> np.ndarray:
    """Return int [queries, keys], how often the spans hold each pair; assert that the first batch holds each query."""
    found = np.zeros((num_queries, num_keys), dtype=int)
    for number, batch in enumerate(batches):
        queries = np.zeros(num_queries, dtype=int)
        for span in batch.spans:
            kind = (batch.causal, batch.mirrored)
            assert span.num_queries > 0 < span.num_keys and (span.causal, span.mirrored) == kind
            assert not span.causal or span.num_queries == span.num_keys
            block = np.ones((span.num_queries, span.num_keys), dtype=int)
            if span.causal:
                block = np.triu(block) if span.mirrored else np.tril(block)
            found[span.queries, span.keys] += block
            queries[span.queries] += 1
        assert (queries == 1).all() if number == 0 else (queries <= 1).all()
    return found


def window_mask(layout: Layout, window: int) -> np.ndarray:
    return naive_mask(layout, lambda q, k: q - k < window)


@st.composite
def layouts(draw) -> tuple[Layout, ContextShard]:
    """Draw sequences on their own, or responses to one shared prompt, and a context rank that holds a part of them."""
    size = draw(st.sampled_from([1, 2, 4]))
    shard = ContextShard(rank=draw(st.integers(0, size - 1)), size=size)
    if draw(st.booleans()):
        chunks = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
        return Layout.of(tuple(n * 2 * size if size > 1 else n for n in chunks)), shard
    responses = np.array(draw(st.lists(st.integers(0, 12), min_size=2, max_size=5)))
    prompts, group = np.full(len(responses), draw(st.integers(1, 9))), np.zeros(len(responses), dtype=int)
    return lay_out(prompts, responses, group, pad_multiple=2 * size), shard


@pytest.mark.parametrize("kind", ["causal", "window", "chunk"])
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(drawn=layouts(), reach=st.integers(1, 24))
def test_spans_are_the_mask(kind: str, drawn: tuple[Layout, ContextShard], reach: int) -> None:
    """Spans hold each pair that a window or a chunk of positions leaves once and no other, on every context rank."""
    layout, shard = drawn
    held, packed = context_positions(layout.lengths, shard.rank, shard.size), pack(layout, CPU, shard)
    cut = {"causal": None, "window": windowed_spans, "chunk": chunked_spans}[kind]
    batches = packed.spans
    if cut is not None:
        batches = batch_spans(cut(layout, shard, reach), len(held), layout.num_tokens, CPU)
    sees = {
        "causal": lambda q, k: True,
        "window": lambda q, k: q - k < reach,
        "chunk": lambda q, k: q // reach == k // reach,
    }[kind]
    found = spans_mask(batches, len(held), layout.num_tokens)
    assert np.array_equal(found, naive_mask(layout, sees)[held].astype(int))
    assert packed.qkv_format == "thd" and packed.layout.lengths == layout.lengths and packed.cu_seqlens_q is None


def test_the_mask_is_that_of_transformers_and_a_window_megatron_cores_and_one() -> None:
    from transformers.masking_utils import sliding_window_causal_mask_function

    for window in (1, 2, 5, 9):
        seen = sliding_window_causal_mask_function(window)
        wanted = [[bool(seen(0, 0, torch.tensor(q), torch.tensor(k))) for k in range(9)] for q in range(9)]
        assert np.array_equal(window_mask(Layout.of((9,)), window), wanted)
    # Megatron-Core counts the tokens before the token; transformers, and we, count the token too
    config = attention_config(6, 6, 0)
    assert config.window_size == (5, 0) and [window_of(config, layer) for layer in (1, 2, 3)] == [6, 6, None]
    assert window_of(attention_config(), 1) is None


def heads(tokens: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, n, 8, dtype=torch.float64, generator=random).requires_grad_() for n in (4, 2, 2)]


def masked(qkv: list[torch.Tensor], mask: np.ndarray) -> torch.Tensor:
    """Return [T, 32] of one dense masked softmax."""
    query, key, value = qkv
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * 8**-0.5
    scores = scores.masked_fill(~torch.from_numpy(mask), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


def assert_equal_with_gradients(found: torch.Tensor, wanted: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    coefficient = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    for x, y in zip(*(torch.autograd.grad((o * coefficient).sum(), inputs) for o in (found, wanted)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("layer, window", [(1, 4), (2, 100), (3, 4)])
@pytest.mark.parametrize("shared", [False, True])
def test_each_layer_attends_within_its_own_window(layer: int, window: int, shared: bool) -> None:
    """Layers 1 and 3 see 4 tokens and layer 2 all, by the layer's number; output and gradients, in double."""
    groups = np.array([0, 0, 0, 1]) if shared else None
    layout = lay_out(np.array([6, 6, 6, 9]), np.array([5, 1, 8, 4]), groups)
    qkv = heads(layout.num_tokens)
    module = TorchAttention(attention_config(4, 0, 4), layer, None, "self")
    found = module(*qkv, None, packed_seq_params=pack(layout, CPU))
    assert_equal_with_gradients(found, masked(qkv, window_mask(layout, window)), qkv)


@pytest.mark.parametrize("size", [2, 4])
def test_context_ranks_attend_within_the_window(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zig-zag chunks against gathered keys give the window's numbers; the gather is a concatenation here."""
    layout = Layout.of((16, 8, 32))
    qkv = heads(layout.num_tokens)
    held = [context_positions(layout.lengths, rank, size) for rank in range(size)]
    everyone = torch.stack(qkv[1:], dim=1)[np.concatenate(held)]
    monkeypatch.setattr(attention._GatherContext, "apply", lambda local, group: everyone)
    module, found = TorchAttention(attention_config(5), 1, None, "self"), torch.empty(56, 32, dtype=torch.float64)
    for rank, mine in enumerate(held):
        packed = pack(layout, CPU, ContextShard(rank=rank, size=size))
        found[mine] = module(*(x[mine] for x in qkv), None, packed_seq_params=packed)
    assert_equal_with_gradients(found, masked(qkv, window_mask(layout, 5)), qkv)


def test_layers_of_one_window_share_their_spans_and_a_configs_windows_are_by_its_layers() -> None:
    packed = pack(Layout.of((9, 4)), CPU)
    within, cut = (functools.partial(packed.spans_cut, kind) for kind in (windowed_spans, chunked_spans))
    assert within(3) is within(3) is not cut(3) is cut(3) is not packed.spans
    assert within(None) is within(9) is cut(9) is packed.spans
    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows("olmo3", layer_types=mixed) == (4, 0, 4)
    assert windows() == windows(layer_types=mixed[:1] * 3) == (4, 4, 4)
    assert windows(sliding_window=256) == windows(sliding_window=None) == ()
    assert windows(sliding_window=None, layer_types=mixed[1:2] * 3) == ()
    with pytest.raises(ConfigError, match="sliding_window=None of olmo3 with sliding_attention"):
        windows("olmo3", layer_types=mixed, sliding_window=None)
    with pytest.raises(ConfigError, match="layer_types=.* of mistral is not supported: .* every layer sliding_"):
        windows(layer_types=mixed)


def windows(family: str = "mistral", *, sliding_window: int | None = 4, **fields: object) -> tuple[int, ...]:
    config = tiny_config(family, layers=3)
    for name, value in dict(sliding_window=sliding_window, **fields).items():
        setattr(config, name, value)
    return windows_of(config)


def test_each_layer_s_window_reaches_megatron_core_and_where_none_is_computed_it_is_refused() -> None:
    """Megatron-Core's fields name each layer's window; Transformer Engine's ring and the bitwise mode have none."""
    shape = read_shape(tiny_config("olmo3", layers=4), layer_spec="torch")
    assert shape.windows == (5, 0, 5, 0)
    fields = _window_fields(shape, SimpleNamespace(context_size=2))
    assert fields == dict(window_size=(4, 0), window_attn_skip_freq=[1, 0, 1, 0])
    engine = dataclasses.replace(shape, layer_spec="transformer_engine")
    assert _window_fields(engine, SimpleNamespace(context_size=1)) == fields
    with pytest.raises(ConfigError, match="parallel.context=2 with a sliding window of 5 tokens"):
        _window_fields(engine, SimpleNamespace(context_size=2))
    with pytest.raises(ConfigError, match="rollout.bitwise=true .* this mistral model has a sliding window of 5"):
        require_shown(read_shape(tiny_config("mistral_window"), layer_spec="torch"))
