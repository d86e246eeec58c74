"""algorithm/value_loss.py against its equation, token by token and case by case, in double precision."""

import pytest
import torch

from megatron_rl.algorithm.value_loss import value_loss

# Both sides in double; what differs is the order of a few operations on numbers below 100.
DOUBLE = {"rtol": 1e-12, "atol": 1e-13}


def make_tokens(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return values, old values, returns and weights [200], on either side of clip and return; some weights are 0."""
    random = torch.Generator().manual_seed(seed)
    values, moved, gap = torch.randn(3, 200, generator=random, dtype=torch.float64)
    weights = torch.rand(200, generator=random, dtype=torch.float64)
    weights[::7] = 0.0
    return values, values + 0.5 * moved, values + gap, weights


def naive_loss(values, old, returns, weights, clip: float | None):
    """Return (sum, gradient, clipped) by cases, token by token."""
    loss, gradient, clipped = 0.0, [], []
    for v, o, r, w in zip(*(x.tolist() for x in (values, old, returns, weights)), strict=True):
        bounded = v if clip is None else o - clip if v < o - clip else o + clip if v > o + clip else v
        takes_clipped = (bounded - r) ** 2 > (v - r) ** 2
        loss += w / 2 * ((bounded - r) ** 2 if takes_clipped else (v - r) ** 2)
        gradient.append(0.0 if takes_clipped else w * (v - r))
        clipped.append(takes_clipped)
    return loss, torch.tensor(gradient, dtype=torch.float64), torch.tensor(clipped)


@pytest.mark.parametrize("clip", [None, 0.2, 0.5, 100.0])
def test_value_loss_equals_equation(clip: float | None) -> None:
    values, old, returns, weights = make_tokens()
    values.requires_grad_()
    term = value_loss(values, old, returns, weights, clip=clip)
    term.loss.backward()
    loss, gradient, clipped = naive_loss(values.detach(), old, returns, weights, clip)
    torch.testing.assert_close(term.loss.item(), loss, **DOUBLE)
    torch.testing.assert_close(values.grad, gradient, **DOUBLE)
    assert (values.grad[weights == 0] == 0).all()
    assert torch.equal(term.clipped, clipped) and not term.clipped.requires_grad
    if clip == 0.2:
        assert 0.1 < clipped.double().mean() < 0.9  # both cases occur often
    if clip in (None, 100.0):
        assert not clipped.any()


def test_no_tokens_give_zero_with_a_gradient_and_the_clip_must_be_positive() -> None:
    """A rank of context parallelism without a loss token runs this; its backward must not fail."""
    values = torch.zeros(0, requires_grad=True)
    term = value_loss(values, *torch.zeros(3, 0), clip=0.2)
    term.loss.backward()
    assert term.loss.item() == 0.0 and values.grad.shape == (0,)
    with pytest.raises(ValueError, match="the value clip is 0"):
        value_loss(*make_tokens(), clip=0)
