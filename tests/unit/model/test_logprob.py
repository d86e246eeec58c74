"""Checks vocab_parallel_logprob, the reference of the tests, against torch.log_softmax in double precision.

On several tensor ranks: tests/equality/test_gradient.py and the matrix, through the whole model. linear_logprob:
test_linear_logprob.py.
"""

from __future__ import annotations

import pytest
import torch

from tests import vocab_parallel
from tests.unit.model.logits import SINGLE, gradients, reference
from tests.vocab_parallel import vocab_parallel_logprob

# log p = x − log Z of numbers near 30 is rounded to 2e-6, and the entropy, a difference of such numbers, to some 5e-6;
# a gradient is a probability times that, over the temperature.
GRADIENT = {"rtol": 1e-5, "atol": 1e-5}
# A gradient in bfloat16 is the float32 one rounded to 8 bits.
BFLOAT16 = {"rtol": 2**-8, "atol": 1e-5}


def make_logits(
    tokens: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    logits = (5 * torch.randn(tokens, width, generator=random)).to(dtype)
    return logits, torch.randint(0, width, (tokens,), generator=random)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(("vocab_size", "width"), [(37, 37), (37, 40), (5, 8)])
@pytest.mark.parametrize("train_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_log_softmax(
    temperature: float, vocab_size: int, width: int, train_entropy: bool, dtype: torch.dtype
) -> None:
    logits, _ = make_logits(13, width, dtype)
    targets = torch.randint(0, vocab_size, (13,), generator=torch.Generator().manual_seed(1))
    coefficients = torch.randn(2, 13, generator=torch.Generator().manual_seed(2))
    weights = coefficients if train_entropy else coefficients[:1]

    def tested(x):
        return vocab_parallel_logprob(
            x, targets, temperature=temperature, vocab_size=vocab_size, train_entropy=train_entropy
        )

    (logprobs, entropy), gradient = gradients(tested, logits, *weights)
    wanted, wanted_gradient = gradients(
        lambda x: reference(x, targets, temperature, vocab_size), logits.double(), *weights.double()
    )
    assert logprobs.dtype == entropy.dtype == torch.float32 and gradient.dtype == dtype
    torch.testing.assert_close(logprobs.double(), wanted[0], **SINGLE)
    torch.testing.assert_close(entropy.double(), wanted[1], **SINGLE)
    torch.testing.assert_close(gradient.double(), wanted_gradient, **(GRADIENT if dtype is torch.float32 else BFLOAT16))
    assert torch.equal(gradient[:, vocab_size:], torch.zeros(13, width - vocab_size, dtype=dtype))


def test_padded_columns_take_no_probability() -> None:
    """Padded columns take no probability: whatever stands in them, the outputs are bit by bit those without them."""
    logits, targets = make_logits(9, 30)
    without = vocab_parallel_logprob(logits, targets, vocab_size=30)
    for pad in (0.0, 1e4, float("inf"), float("nan")):
        padded = torch.cat([logits, torch.full((9, 2), pad)], dim=1)
        assert all(map(torch.equal, vocab_parallel_logprob(padded, targets, vocab_size=30), without))


def test_entropy_carries_gradient_only_where_it_is_trained() -> None:
    logits, targets = make_logits(4, 10)
    for train_entropy in (False, True):
        logprobs, entropy = vocab_parallel_logprob(
            logits.clone().requires_grad_(), targets, vocab_size=10, train_entropy=train_entropy
        )
        assert logprobs.requires_grad and entropy.requires_grad == train_entropy


def test_entropy_alone_has_the_gradient_of_its_definition() -> None:
    logits, targets = make_logits(6, 12)
    ones = torch.ones(6)
    _, gradient = gradients(
        lambda x: vocab_parallel_logprob(x, targets, temperature=0.7, vocab_size=12, train_entropy=True)[1:],
        logits,
        ones,
    )
    _, wanted = gradients(lambda x: reference(x, targets, 0.7, 12)[1:], logits.double(), ones.double())
    torch.testing.assert_close(gradient.double(), wanted, **GRADIENT)


def test_gradient_equals_central_differences() -> None:
    """The gradient equals central differences of the function itself, not of another formula.

    Float32 outputs of size 10 over a step of 2^-5 differ by some 1e-4.
    """
    logits, targets = make_logits(2, 7)
    _, gradient = gradients(
        lambda x: vocab_parallel_logprob(x, targets, temperature=1.3, vocab_size=7), logits, torch.ones(2)
    )
    for row in range(2):
        for column in range(7):
            step = torch.zeros_like(logits)
            step[row, column] = 2**-5
            up, down = (
                vocab_parallel_logprob(logits + s, targets, temperature=1.3, vocab_size=7)[0].sum()
                for s in (step, -step)
            )
            assert gradient[row, column].item() == pytest.approx(((up - down) / 2**-4).item(), abs=3e-4)


@pytest.mark.parametrize("tokens", [1, 4, 5, 8, 19])
def test_chunks_equal_one_chunk(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has equal bits in whichever chunk it falls, last chunk short or not."""
    logits, targets = make_logits(tokens, 11)

    def run():
        return gradients(
            lambda x: vocab_parallel_logprob(x, targets, temperature=0.9, vocab_size=11, train_entropy=True),
            logits,
            *torch.ones(2, tokens),
        )

    (whole, gradient) = run()
    monkeypatch.setattr(vocab_parallel, "CHUNK_TOKENS", 4)
    (chunked, chunked_gradient) = run()
    assert all(map(torch.equal, whole, chunked)) and torch.equal(gradient, chunked_gradient)


def test_more_tokens_than_a_chunk_equal_log_softmax() -> None:
    tokens = 2 * vocab_parallel.CHUNK_TOKENS + 3
    logits, targets = make_logits(tokens, 19)
    found, gradient = gradients(lambda x: vocab_parallel_logprob(x, targets, vocab_size=19), logits, torch.ones(tokens))
    wanted, wanted_gradient = gradients(
        lambda x: reference(x, targets, 1.0, 19), logits.double(), torch.ones(tokens).double()
    )
    torch.testing.assert_close(found[0].double(), wanted[0], **SINGLE)
    torch.testing.assert_close(gradient.double(), wanted_gradient, **GRADIENT)


def test_no_rows_give_no_outputs_and_a_gradient_of_no_rows() -> None:
    """A micro-batch whose samples are all masked still runs forward and backward with its peers."""
    logits = torch.zeros(0, 8, requires_grad=True)
    logprobs, entropy = vocab_parallel_logprob(
        logits, torch.zeros(0, dtype=torch.int64), vocab_size=7, train_entropy=True
    )
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad.shape == (0, 8)


def test_large_logits_do_not_overflow() -> None:
    """Logits near 1e4 do not overflow, as the peak is taken off before the exponential.

    Their rounding is 1e-3, over the sum of the row's two peaks.
    """
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4], [-1e4, -1e4, -1e4]])
    targets = torch.tensor([1, 2])
    logprobs, entropy = vocab_parallel_logprob(logits, targets, vocab_size=3)
    wanted = reference(logits, targets, 1.0, 3)
    torch.testing.assert_close(logprobs.double(), wanted[0], rtol=0, atol=2e-3)
    torch.testing.assert_close(entropy.double(), wanted[1], rtol=0, atol=2e-3)


def test_a_rank_without_true_columns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor rank 3 .* vocab_size=12; lower parallel.tensor"):
        vocab_parallel_logprob(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), vocab_size=12, tensor_rank=3)
