"""Attention with grouped query heads against a loop over heads, and the embedded engine's model that uses it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.rollout.engines.grouped_queries import FEW_QUERIES, GROUPED, grouped_attention
from megatron_rl.rollout.engines.prefix_rows import run_prompts
from tests.unit.rollout.tiny_model import _model, engine_of

CALLS = "torch.nn.functional.scaled_dot_product_attention"


def by_head(query, key, value, mask, scale) -> torch.Tensor:
    """Return the attention output [B, Q, H, d] in float64, one row, head and query at a time."""
    batch, heads, queries, size = query.shape
    out = torch.zeros(batch, queries, heads, value.shape[-1], dtype=torch.float64)
    for row in range(batch):
        for head in range(heads):
            keys = key[row, head * key.shape[1] // heads].double()
            for place in range(queries):
                scores = keys @ query[row, head, place].double() * scale
                if mask is not None:
                    own = mask[row, 0, place]
                    scores = scores.masked_fill(~own, -math.inf) if own.dtype == torch.bool else scores + own
                out[row, place, head] = scores.softmax(-1) @ value[row, head * key.shape[1] // heads].double()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("kind", ["none", "bool", "added"])
@pytest.mark.parametrize("queries", [1, 4, FEW_QUERIES + 1])
def test_grouped_attention_equals_a_loop_over_heads(dtype, groups, kind, queries) -> None:
    """Any mask, one query or several, heads of other sizes for values; queries above the few are not grouped."""
    draws = torch.Generator().manual_seed(queries)
    shapes = ((3, 6, queries, 8), (3, groups, 23, 8), (3, groups, 23, 5))
    query, key, value = (torch.randn(shape, generator=draws).to(dtype) for shape in shapes)
    mask = None
    if kind != "none":
        seen = torch.rand(3, 1, queries, 23, generator=draws) < 0.6
        seen[..., 0] = True
        mask = seen if kind == "bool" else torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -1e4)
    elif queries > 1:
        mask = torch.ones(queries, 23, dtype=torch.bool).tril(23 - queries).expand(3, 1, -1, -1)
    module = SimpleNamespace(num_key_value_groups=6 // groups, is_causal=True)
    found, weights = grouped_attention(module, query, key, value, mask, scaling=0.3)
    assert weights is None and found.dtype == dtype
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), by_head(query, key, value, mask, 0.3), atol=rounding, rtol=rounding)


def test_keys_are_read_once_for_all_their_heads(monkeypatch) -> None:
    """The kernel gets as many key heads as there are, and no copy of them."""
    given: list[tuple[torch.Size, ...]] = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def seen(query, key, value, **settings):
        given.append((query.shape, key.shape))
        return kernel(query, key, value, **settings)

    monkeypatch.setattr(CALLS, seen)
    key = torch.randn(2, 2, 9, 4)
    mask = torch.ones(2, 1, 3, 9, dtype=torch.bool)
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    grouped_attention(module, torch.randn(2, 6, 1, 4), key, key, None, scaling=0.5)
    grouped_attention(module, torch.randn(2, 6, 3, 4), key, key, mask, scaling=0.5)
    assert given == [((2, 2, 3, 4), key.shape), ((2, 2, 9, 4), key.shape)]


def test_an_engine_on_a_cpu_groups_queries_and_copies_no_head(hf_path) -> None:
    """The engine's logits of padded prompts and of the next tokens equal those of the model's own attention."""
    model, engine = _model(), engine_of(hf_path, _model())
    own = engine._model
    assert own.config._attn_implementation == GROUPED and model.config._attn_implementation == "sdpa"
    prompts = [(5, 9, 3), (4,), (7, 2, 8, 6, 5)]
    # torch multiplies a strided view by a copy of the head's weights for each of its rows
    contiguous: list[bool] = []
    own.lm_head.register_forward_pre_hook(lambda _, given: contiguous.append(given[0].is_contiguous()))
    for each in (prompts, [(5, 9, 3), (4, 4, 4)]):
        with torch.no_grad():
            cache, found, position, mask, _ = run_prompts(own, each)
            wanted_cache, wanted, *_ = run_prompts(model, each)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
        for token in (3, 11):
            mask = torch.cat([mask, mask.new_ones(len(each), 1)], 1)
            ids = torch.full((len(each), 1), token)
            step = {"input_ids": ids, "attention_mask": mask, "position_ids": position, "use_cache": True}
            with torch.no_grad():
                found = own(**step, past_key_values=cache).logits
                wanted = model(**step, past_key_values=wanted_cache).logits
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
            position = position + 1
    assert contiguous == [True] * 6
