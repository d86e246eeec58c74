"""Checks log-probs by logprob/linear.py, and by the reference of the tests over whole logits, against torch's own."""

import pytest
import torch

from megatron_rl.model.logprob.linear import linear_logprob
from tests import vocab_parallel
from tests.pairwise import pairwise
from tests.unit.model.heads import SINGLE, VOCAB, WIDTH, gradients, make_head, reference
from tests.vocab_parallel import vocab_parallel_logprob


@pytest.mark.parametrize(
    "temperature, width, train_entropy, chunk", pairwise([0.6, 1.7], [5, 8], [False, True], [4, 1024])
)
def test_the_logits_path_equals_log_softmax(monkeypatch, temperature, width, train_entropy, chunk) -> None:
    """Log p = x − log Z of numbers near 30 is rounded to 2e-6, and the entropy, a difference of such, to some 5e-6."""
    monkeypatch.setattr(vocab_parallel, "CHUNK_TOKENS", chunk)
    random = torch.Generator().manual_seed(0)
    logits, coefficients = 5 * torch.randn(13, width, generator=random), torch.randn(2, 13, generator=random)
    targets, used = torch.randint(0, 5, (13,), generator=random), coefficients[: 1 + train_entropy]
    options = dict(temperature=temperature, vocab_size=5, train_entropy=train_entropy)
    found = gradients(lambda x: vocab_parallel_logprob(x, targets, **options), logits, coefficients=used)
    wanted = gradients(lambda x: reference(x, targets, temperature, 5), logits.double(), coefficients=used.double())
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, **SINGLE)


def test_padded_columns_take_no_probability() -> None:
    """Whatever stands in the rows that pad the vocabulary, the outputs are bit by bit those without them."""
    hidden, weight, targets, _ = make_head()
    without = linear_logprob(hidden, weight[:VOCAB], targets, vocab_size=VOCAB)
    for pad in (0.0, 1e4, float("inf"), float("nan")):
        padded = torch.cat([weight[:VOCAB], torch.full((2, WIDTH), pad)])
        assert all(map(torch.equal, linear_logprob(hidden, padded, targets, vocab_size=VOCAB), without))
    with pytest.raises(ValueError, match=r"tensor rank 3 .* vocab_size=37; lower parallel.tensor"):
        linear_logprob(hidden, weight, targets, vocab_size=VOCAB, tensor_rank=3)


def test_large_logits_do_not_overflow() -> None:
    """The peak of 1e4 is taken off before the exponential; the rounding is 1e-3, over the sum of two peaks."""
    hidden, weight = torch.tensor([[1.0], [-1.0], [0.0]]), torch.tensor([[1e4], [1e4 - 1], [-1e4]])
    targets = torch.tensor([1, 2, 0])
    found, wanted = linear_logprob(hidden, weight, targets, vocab_size=3), reference(hidden @ weight.T, targets, 1.0, 3)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=2e-3)
