"""model/logprob.py against torch.log_softmax in double precision; linear_logprob also against the logits' path, on two
tensor ranks.

vocab_parallel_logprob on several tensor ranks: tests/equality/test_gradient.py and the matrix, through the whole model.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.model import logprob
from megatron_rl.model.logprob import linear_logprob, vocab_parallel_logprob

# Float32 throughout: logits up to 20 carry some 1e-6 of rounding each, and a sum over the vocabulary adds its own.
SINGLE = {"rtol": 1e-5, "atol": 1e-5}
# log p = x − log Z of numbers near 30 is rounded to 2e-6, and the entropy, a difference of such numbers, to some 5e-6;
# a gradient
# is a probability times that, over the temperature.
GRADIENT = {"rtol": 1e-5, "atol": 1e-5}
# A gradient in bfloat16 is the float32 one rounded to 8 bits.
BFLOAT16 = {"rtol": 2**-8, "atol": 1e-5}


def make_logits(
    tokens: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    logits = (5 * torch.randn(tokens, width, generator=random)).to(dtype)
    return logits, torch.randint(0, width, (tokens,), generator=random)


def reference(logits: torch.Tensor, targets: torch.Tensor, temperature: float, vocab_size: int):
    """Log-probs and entropies by torch.log_softmax in float64, over the true vocabulary."""
    distribution = (logits.double()[:, :vocab_size] / temperature).log_softmax(-1)
    return distribution.gather(1, targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


def gradients(
    function, logits: torch.Tensor, *coefficients: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """(outputs, gradient of Σ coefficient · output). A float64 leaf for the reference, the given dtype for what is
    tested."""
    leaf = logits.clone().requires_grad_()
    outputs = function(leaf)
    total = sum((c * x).sum() for c, x in zip(coefficients, outputs, strict=False))
    (gradient,) = torch.autograd.grad(total, leaf)
    return tuple(x.detach() for x in outputs), gradient


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
    """Whatever stands in them: the outputs are bit by bit those without them."""
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
    """Against the function itself, not another formula. Float32 outputs of size 10 over a step of 2^-5 differ by some
    1e-4."""
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
    """A row's arithmetic does not depend on which chunk it falls in: equal bits, last chunk short or not."""
    logits, targets = make_logits(tokens, 11)

    def run():
        return gradients(
            lambda x: vocab_parallel_logprob(x, targets, temperature=0.9, vocab_size=11, train_entropy=True),
            logits,
            *torch.ones(2, tokens),
        )

    (whole, gradient) = run()
    monkeypatch.setattr(logprob, "CHUNK_TOKENS", 4)
    (chunked, chunked_gradient) = run()
    assert all(map(torch.equal, whole, chunked)) and torch.equal(gradient, chunked_gradient)


def test_more_tokens_than_a_chunk_equal_log_softmax() -> None:
    tokens = 2 * logprob.CHUNK_TOKENS + 3
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
    """The peak is taken off before the exponential; rounding of logits near 1e4 is 1e-3, over the sum of the row's two
    peaks."""
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4], [-1e4, -1e4, -1e4]])
    targets = torch.tensor([1, 2])
    logprobs, entropy = vocab_parallel_logprob(logits, targets, vocab_size=3)
    wanted = reference(logits, targets, 1.0, 3)
    torch.testing.assert_close(logprobs.double(), wanted[0], rtol=0, atol=2e-3)
    torch.testing.assert_close(entropy.double(), wanted[1], rtol=0, atol=2e-3)


def test_a_rank_without_true_columns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor rank 3 .* vocab_size=12; lower parallel.tensor"):
        vocab_parallel_logprob(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), vocab_size=12, tensor_rank=3)


# ---- linear_logprob: the same from hidden and weight
# -----------------------------------------------------------------------

TOKENS, WIDTH, VOCAB, PADDED = 11, 12, 37, 40
# ‖found − wanted‖ / ‖wanted‖: sums of float32 products over H = 12 or V = 37, every term rounded to 6e-8
CLOSE = 1e-6
# bfloat16 logits of some 4 are rounded to 2^-8 relative, a target's log-prob is such a number; the reference does the
# same, and
# where its matrix product adds in another order a logit falls on the next bfloat16
CLOSE_BFLOAT16 = 2**-7


def make_head(tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """hidden [tokens, H], weight [PADDED, H], targets [tokens], coefficients [2, tokens] of log-probs and entropies."""
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, WIDTH, generator=random).to(dtype)
    weight = torch.randn(PADDED, WIDTH, generator=random).to(dtype)
    return (
        hidden,
        weight,
        torch.randint(0, VOCAB, (tokens,), generator=random),
        torch.randn(2, tokens, generator=random).to(dtype),
    )


def head_gradients(function, hidden, weight, coefficients, train_entropy: bool) -> tuple[torch.Tensor, ...]:
    """(log-probs, entropies, gradient of hidden, gradient of weight) of Σ coefficient · output."""
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    outputs = function(*leaves)
    total = sum(
        (c * x).sum() for c, x in zip(coefficients if train_entropy else coefficients[:1], outputs, strict=False)
    )
    return *(x.detach() for x in outputs), *torch.autograd.grad(total, leaves)


def plain_path(
    hidden, weight, targets, coefficients, *, temperature: float, train_entropy: bool
) -> tuple[torch.Tensor, ...]:
    def logits_first(h, w):
        options = dict(temperature=temperature, vocab_size=VOCAB, train_entropy=train_entropy)
        return vocab_parallel_logprob(functional.linear(h, w), targets, **options)

    return head_gradients(logits_first, hidden, weight, coefficients, train_entropy)


def assert_near(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], bound: float) -> None:
    for name, x, y in zip(
        ("log-probs", "entropies", "hidden's gradient", "weight's gradient"), found, wanted, strict=True
    ):
        assert x.shape == y.shape, f"{name}: {x.shape} and {y.shape}"
        error = ((x.double() - y.double()).norm() / y.double().norm()).item()
        assert error <= bound, f"{name}: relative error {error:.2e} over {bound:.2e}"


@pytest.mark.parametrize("chunk_tokens", [1, 3, TOKENS, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("train_entropy", [False, True])
def test_linear_equals_log_softmax_and_the_logits_path(
    chunk_tokens: int, temperature: float, train_entropy: bool
) -> None:
    hidden, weight, targets, coefficients = make_head()

    def lean(h, w):
        options = dict(
            temperature=temperature, vocab_size=VOCAB, train_entropy=train_entropy, chunk_tokens=chunk_tokens
        )
        return linear_logprob(h, w, targets, **options)

    def double(h, w):
        return reference(functional.linear(h, w), targets, temperature, VOCAB)

    found = head_gradients(lean, hidden, weight, coefficients, train_entropy)
    assert_near(
        found, head_gradients(double, hidden.double(), weight.double(), coefficients.double(), train_entropy), CLOSE
    )
    assert_near(
        found,
        plain_path(hidden, weight, targets, coefficients, temperature=temperature, train_entropy=train_entropy),
        CLOSE,
    )
    assert torch.equal(found[3][VOCAB:], torch.zeros(PADDED - VOCAB, WIDTH)), "a pad of the vocabulary has a gradient"


@pytest.mark.parametrize("train_entropy", [False, True])
def test_linear_in_bfloat16_equals_the_logits_path(train_entropy: bool) -> None:
    hidden, weight, targets, coefficients = make_head(dtype=torch.bfloat16)

    def lean(h, w):
        return linear_logprob(
            h, w, targets, temperature=0.7, vocab_size=VOCAB, train_entropy=train_entropy, chunk_tokens=4
        )

    found = head_gradients(lean, hidden, weight, coefficients, train_entropy)
    assert [x.dtype for x in found] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    assert_near(
        found,
        plain_path(hidden, weight, targets, coefficients, temperature=0.7, train_entropy=train_entropy),
        CLOSE_BFLOAT16,
    )


def test_linear_passes_gradcheck_in_double() -> None:
    hidden, weight, targets, _ = make_head(3, torch.float64)

    def lean(h, w):
        return linear_logprob(h, w, targets, temperature=1.3, vocab_size=VOCAB, train_entropy=True, chunk_tokens=2)

    assert torch.autograd.gradcheck(lean, (hidden.requires_grad_(), weight.requires_grad_()))


def test_linear_entropy_carries_gradient_only_where_it_is_trained() -> None:
    hidden, weight, targets, _ = make_head()
    for train_entropy in (False, True):
        leaf = hidden.clone().requires_grad_()
        logprobs, entropy = linear_logprob(leaf, weight, targets, vocab_size=VOCAB, train_entropy=train_entropy)
        assert logprobs.requires_grad and entropy.requires_grad == train_entropy


def test_linear_gives_only_the_gradients_asked_for() -> None:
    """A frozen output layer, or hidden states from a frozen trunk: the other gradient is unchanged, bit by bit."""
    hidden, weight, targets, coefficients = make_head()
    wanted = head_gradients(
        lambda h, w: linear_logprob(h, w, targets, vocab_size=VOCAB), hidden, weight, coefficients, False
    )
    for index, gradient in enumerate(wanted[2:]):
        leaves = [hidden.clone(), weight.clone()]
        leaves[index].requires_grad_()
        (coefficients[0] * linear_logprob(*leaves, targets, vocab_size=VOCAB)[0]).sum().backward()
        assert torch.equal(leaves[index].grad, gradient) and leaves[1 - index].grad is None


def test_linear_of_no_rows_gives_no_outputs_and_zero_gradients() -> None:
    hidden, weight, targets, coefficients = make_head(0)
    found = head_gradients(
        lambda h, w: linear_logprob(h, w, targets, vocab_size=VOCAB, train_entropy=True),
        hidden,
        weight,
        coefficients,
        True,
    )
    wanted = torch.zeros(0), torch.zeros(0), torch.zeros(0, WIDTH), torch.zeros(PADDED, WIDTH)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("train_entropy", [False, True])
def test_masked_logits_take_no_probability_and_no_nan(train_entropy: bool) -> None:
    """Rows of weight that send a logit to −inf equal a vocabulary without them, here its last rows, in both
    functions."""
    hidden, weight, targets, coefficients = make_head()
    hidden, targets, kept = hidden.abs(), targets % 30, 30
    masked = torch.cat([weight[:kept], torch.full((VOCAB - kept, WIDTH), float("-inf"))])
    wanted = head_gradients(
        lambda h, w: linear_logprob(h, w, targets, vocab_size=kept, train_entropy=train_entropy),
        hidden,
        weight[:kept],
        coefficients,
        train_entropy,
    )
    leaf = weight[:kept].clone().requires_grad_()  # hidden's gradient is 0 · (−inf) there, as for any such layer
    outputs = linear_logprob(
        hidden, torch.cat([leaf, masked[kept:]]), targets, vocab_size=VOCAB, train_entropy=train_entropy
    )
    sum((c * x).sum() for c, x in zip(coefficients[: 1 + train_entropy], outputs, strict=False)).backward()
    assert_near((*(x.detach() for x in outputs), wanted[2], leaf.grad), wanted, CLOSE)
    logits = functional.linear(hidden, masked)
    found, gradient = gradients(
        lambda x: vocab_parallel_logprob(x, targets, vocab_size=VOCAB, train_entropy=train_entropy),
        logits,
        *coefficients[: 1 + train_entropy],
    )
    torch.testing.assert_close(found[0], wanted[0], **SINGLE)
    assert gradient.isfinite().all() and not gradient[:, kept:].any()


class LargestResult(TorchDispatchMode):
    """The most elements any operation gave back, in backward too."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in (result,) if isinstance(x, torch.Tensor))])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_never_holds_more_than_a_chunk_of_logits(dtype: torch.dtype) -> None:
    """The logits' path meets all 400 x 40 of them, so the measure sees what it should; hidden and weight are smaller
    than a chunk."""
    hidden, weight, targets, coefficients = make_head(400, dtype)
    with LargestResult() as lean:
        head_gradients(
            lambda h, w: linear_logprob(h, w, targets, vocab_size=PADDED, train_entropy=True, chunk_tokens=150),
            hidden,
            weight,
            coefficients,
            True,
        )
    with LargestResult() as plain:
        plain_path(hidden, weight, targets, coefficients, temperature=1.0, train_entropy=True)
    assert (lean.elements, plain.elements) == (150 * PADDED, 400 * PADDED)


def test_linear_refuses_a_chunk_of_no_tokens() -> None:
    hidden, weight, targets, _ = make_head()
    with pytest.raises(ValueError, match="chunk_tokens=0 must be at least 1"):
        linear_logprob(hidden, weight, targets, vocab_size=VOCAB, chunk_tokens=0)


def shard_of_linear(
    rank: int, world: int, tokens: int, masked: bool, options: dict
) -> tuple[tuple[torch.Tensor, ...], int]:
    """This tensor rank's outputs and gradients, and the number of all-reduces; where ``masked``, all of rank 1's logits
    are −inf."""
    hidden, weight, targets, coefficients = make_head(tokens)
    width, calls, all_reduce = PADDED // world, [], dist.all_reduce
    if masked:
        hidden, targets, weight[width:] = hidden.abs(), targets % width, float("-inf")
        hidden.requires_grad_(False)
    dist.all_reduce = lambda *args, **kwargs: (calls.append(None), all_reduce(*args, **kwargs))
    try:
        found = head_gradients(
            lambda h, w: linear_logprob(
                h, w, targets, vocab_size=VOCAB, tensor_rank=rank, group=dist.group.WORLD, **options
            ),
            hidden,
            weight[rank * width : (rank + 1) * width],
            coefficients,
            options["train_entropy"],
        )
    finally:
        dist.all_reduce = all_reduce
    return found, len(calls)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 64])
@pytest.mark.parametrize("train_entropy", [False, True])
def test_linear_tp2_equals_tp1(pool, chunk_tokens: int, train_entropy: bool) -> None:
    """Two true ranks; the second holds the pads. Three all-reduces, however many chunks."""
    hidden, weight, targets, coefficients = make_head()
    wanted = plain_path(hidden, weight, targets, coefficients, temperature=0.7, train_entropy=train_entropy)
    options = dict(temperature=0.7, train_entropy=train_entropy, chunk_tokens=chunk_tokens)
    ranks = pool.run(2, shard_of_linear, TOKENS, False, options, timeout_s=60)
    whole_weight = torch.cat([found[3] for found, _ in ranks])
    assert torch.equal(whole_weight[VOCAB:], torch.zeros(PADDED - VOCAB, WIDTH))
    for found, calls in ranks:
        assert_near((*found[:3], whole_weight), wanted, CLOSE)
        assert calls == 3


def test_linear_tp2_leaves_the_sum_of_hiddens_gradient_to_the_caller(pool) -> None:
    """Under sequence parallelism the gather's backward reduces and scatters: this rank's part, no all-reduce in
    backward."""
    hidden, weight, targets, coefficients = make_head()
    wanted = plain_path(hidden, weight, targets, coefficients, temperature=1.0, train_entropy=False)
    ranks = pool.run(
        2, shard_of_linear, TOKENS, False, dict(train_entropy=False, reduce_hidden_grad=False), timeout_s=60
    )
    parts = [found[2] for found, _ in ranks]
    assert_near((*wanted[:2], parts[0] + parts[1], wanted[3]), wanted, CLOSE)
    assert [calls for _, calls in ranks] == [2, 2]


def test_linear_tp2_of_no_rows_stays_in_lockstep_without_collectives(pool) -> None:
    for found, calls in pool.run(2, shard_of_linear, 0, False, dict(train_entropy=True), timeout_s=60):
        assert calls == 0 and found[0].shape == (0,) and torch.equal(found[3], torch.zeros(PADDED // 2, WIDTH))


def test_linear_tp2_with_one_ranks_logits_all_masked(pool) -> None:
    (first, _), (second, _) = pool.run(
        2, shard_of_linear, TOKENS, True, dict(train_entropy=True, reduce_hidden_grad=False), timeout_s=60
    )
    hidden, weight, targets, coefficients = make_head()
    wanted = head_gradients(
        lambda h, w: linear_logprob(h, w, targets % 20, vocab_size=20, train_entropy=True),
        hidden.abs(),
        weight[:20],
        coefficients,
        True,
    )
    assert_near(first, wanted, CLOSE)
    assert_near((*second[:2], wanted[2], first[3]), wanted, CLOSE)
    assert not second[3].any(), "a masked logit's row has a gradient"
