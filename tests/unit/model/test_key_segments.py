"""Checks the keys that Transformer Engine's attention gets over shared prompts: a segment's own, after its prompt's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.model.attention.layout import lay_out
from megatron_rl.model.attention.packed import KeySegments

CPU = torch.device("cpu")
LAYOUT = lay_out(np.array([3, 3, 2]), np.array([2, 1, 4]), np.array([5, 5, 6]), pad_multiple=2)


def test_a_prompt_of_three_with_two_answers_and_nothing_is_copied_where_nothing_is_shared() -> None:
    layout = lay_out(np.array([3, 3]), np.array([2, 1]), np.array([5, 5]))
    found = KeySegments.of(layout, CPU)
    assert (found.pieces, found.order) == ((3, 2, 1), (0, 0, 1, 0, 2))
    assert found.query_bounds.tolist() == [0, 3, 5, 6] and found.key_bounds.tolist() == [0, 3, 8, 12]
    assert (found.longest_query, found.longest_key) == (3, 5)
    layout = lay_out(np.array([3, 3]), np.array([2, 1]), np.array([5, 6]))
    found, keys = KeySegments.of(layout, CPU), torch.randn(9, 1, 2)
    assert found.gather(keys) is keys and found.query_bounds.tolist() == found.key_bounds.tolist() == [0, 5, 9]


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    samples=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=9),
    pad_multiple=st.sampled_from([1, 2, 4]),
)
def test_each_query_sees_the_keys_of_its_own_sample(samples: list[tuple[int, int]], pad_multiple: int) -> None:
    """Aligned at their ends, a response's query sees its prompt and its own tokens up to itself, and no pad."""
    groups, responses = (np.array(x) for x in zip(*samples, strict=True))
    layout = lay_out(groups + 2, responses, groups, pad_multiple)
    found = KeySegments.of(layout, CPU)
    names = torch.arange(layout.num_tokens)
    keys = found.gather(names[:, None, None])[:, 0, 0]
    bounds = found.query_bounds.tolist(), found.key_bounds.tolist()
    seen: dict[int, list[int]] = {}
    for q0, q1, k0, k1 in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False):
        for query in range(q0, q1):
            seen[query] = keys[k0 : k1 - (q1 - 1 - query)].tolist()
    for i, (group, response) in enumerate(samples):
        places = [*range(layout.prompts[i], layout.prompts[i] + group + 2)]
        places += range(layout.responses[i], layout.responses[i] + response)
        for position, place in enumerate(places):
            assert seen[place] == places[: position + 1]
    assert len(seen) == layout.num_tokens


def test_the_gradient_of_a_shared_key_is_the_sum_over_its_segments() -> None:
    found = KeySegments.of(LAYOUT, CPU)
    keys = torch.randn(LAYOUT.num_tokens, 2, 3, dtype=torch.float64, requires_grad=True)
    gathered = found.gather(keys)
    weights = torch.randn_like(gathered)
    (gathered * weights).sum().backward()
    origin = found.gather(torch.arange(LAYOUT.num_tokens)[:, None, None])[:, 0, 0]
    wanted = torch.zeros_like(keys)
    for row, place in enumerate(origin.tolist()):
        wanted[place] += weights[row]
    torch.testing.assert_close(keys.grad, wanted, rtol=1e-12, atol=1e-12)


class Kept(torch.autograd.Function):
    """Keeps keys and values for its backward, as a kernel of attention does: (Σ over keys of k ∘ v ∘ v)."""

    @staticmethod
    def forward(ctx, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(keys, values)
        return (keys * values * values).sum()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = ctx.saved_tensors
        return gradient * values * values, gradient * 2 * keys * values


def test_gathered_keys_are_not_kept_for_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are gathered once more there; gradients are those of gathered keys that are kept, to the bit."""
    segments = KeySegments.of(LAYOUT, CPU)
    keys, values = (torch.randn(LAYOUT.num_tokens, 2, 3, requires_grad=True) for _ in range(2))
    wanted = torch.autograd.grad(Kept.apply(segments.gather(keys), segments.gather(values)), (keys, values))
    gathered: list[torch.Tensor] = []
    plain = KeySegments.gather
    monkeypatch.setattr(KeySegments, "gather", lambda self, x: gathered.append(x) or plain(self, x))
    total = segments.attend(keys, values, Kept.apply)
    assert len(gathered) == 2
    found = torch.autograd.grad(total, (keys, values))
    assert [x.data_ptr() for x in gathered[2:]] == [keys.data_ptr(), values.data_ptr()]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
