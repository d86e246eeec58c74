"""Checks model/logprob/linear.py's path from hidden states and the head's weight against the path over logits."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.model.logprob import chunks as logit_chunks
from megatron_rl.model.logprob.chunks import MAX_BUFFER_BYTES, bytes_per_logit, default_chunk_tokens
from megatron_rl.model.logprob.linear import linear_logprob
from tests.pairwise import pairwise
from tests.unit.model.heads import (
    CLOSE,
    CLOSE_BFLOAT16,
    PADDED,
    SINGLE,
    TOKENS,
    VOCAB,
    WIDTH,
    assert_near,
    gradients,
    head_gradients,
    linear_path,
    make_head,
    plain_path,
    reference,
    shard_of_linear,
)
from tests.vocab_parallel import vocab_parallel_logprob


@pytest.mark.parametrize("chunk_tokens", [1, 3, TOKENS, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("train_entropy", [False, True])
def test_linear_equals_log_softmax_and_the_logits_path(
    chunk_tokens: int, temperature: float, train_entropy: bool
) -> None:
    hidden, weight, targets, coefficients = make_head()

    def double(h, w):
        return reference(functional.linear(h, w), targets, temperature, VOCAB)

    options = dict(temperature=temperature, train_entropy=train_entropy)
    found = linear_path(hidden, weight, targets, coefficients, chunk_tokens=chunk_tokens, **options)
    doubles = (x.double() for x in (hidden, weight, coefficients))
    assert_near(found, head_gradients(double, *doubles, train_entropy), CLOSE)
    assert_near(found, plain_path(hidden, weight, targets, coefficients, **options), CLOSE)
    assert not found[3][VOCAB:].any(), "a pad of the vocabulary has a gradient"


@pytest.mark.parametrize("train_entropy", [False, True])
def test_linear_in_bfloat16_equals_the_logits_path(train_entropy: bool) -> None:
    head = make_head(dtype=torch.bfloat16)
    found = linear_path(*head, temperature=0.7, train_entropy=train_entropy, chunk_tokens=4)
    assert [x.dtype for x in found] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    assert_near(found, plain_path(*head, temperature=0.7, train_entropy=train_entropy), CLOSE_BFLOAT16)


def test_linear_passes_gradcheck_in_double() -> None:
    hidden, weight, targets, _ = make_head(3, torch.float64)

    def lean(h, w):
        return linear_logprob(h, w, targets, temperature=1.3, vocab_size=VOCAB, train_entropy=True, chunk_tokens=2)

    assert torch.autograd.gradcheck(lean, (hidden.requires_grad_(), weight.requires_grad_()), fast_mode=True)


def test_linear_gives_only_the_gradients_asked_for_and_trains_entropy_only_where_asked() -> None:
    """With a frozen output layer, or hidden states from a frozen trunk, the other gradient is unchanged, bit by bit."""
    hidden, weight, targets, coefficients = make_head()
    for index, gradient in enumerate(linear_path(hidden, weight, targets, coefficients)[2:]):
        leaves = [hidden.clone(), weight.clone()]
        leaves[index].requires_grad_()
        (coefficients[0] * linear_logprob(*leaves, targets, vocab_size=VOCAB)[0]).sum().backward()
        assert torch.equal(leaves[index].grad, gradient) and leaves[1 - index].grad is None
    hidden, weight, targets, _ = make_head()
    for train_entropy in (False, True):
        leaf = hidden.clone().requires_grad_()
        logprobs, entropy = linear_logprob(leaf, weight, targets, vocab_size=VOCAB, train_entropy=train_entropy)
        assert logprobs.requires_grad and entropy.requires_grad == train_entropy


def test_linear_of_no_rows_gives_zero_gradients_and_stays_in_lockstep_without_collectives(pool) -> None:
    wanted = torch.zeros(0), torch.zeros(0), torch.zeros(0, WIDTH), torch.zeros(PADDED, WIDTH)
    assert all(map(torch.equal, linear_path(*make_head(0), train_entropy=True), wanted))
    for found, calls in pool.run(2, shard_of_linear, 0, False, dict(train_entropy=True), timeout_s=60):
        assert calls == 0 and found[0].shape == (0,) and torch.equal(found[3], torch.zeros(PADDED // 2, WIDTH))


@pytest.mark.parametrize("train_entropy", [False, True])
def test_masked_logits_take_no_probability_and_no_nan(train_entropy: bool) -> None:
    """Rows of weight that send a logit to −inf, here the last ones, equal a vocabulary without them."""
    hidden, weight, targets, coefficients = make_head()
    hidden, targets, kept = hidden.abs(), targets % 30, 30
    options, used = dict(train_entropy=train_entropy), coefficients[: 1 + train_entropy]
    wanted = linear_path(hidden, weight[:kept], targets, coefficients, vocab_size=kept, **options)
    leaf = weight[:kept].clone().requires_grad_()  # hidden's gradient is 0 · (−inf) there, as for any such layer
    masked = torch.cat([leaf, torch.full((VOCAB - kept, WIDTH), float("-inf"))])
    outputs = linear_logprob(hidden, masked, targets, vocab_size=VOCAB, **options)
    sum((c * x).sum() for c, x in zip(used, outputs, strict=False)).backward()
    assert_near((*(x.detach() for x in outputs), wanted[2], leaf.grad), wanted, CLOSE)
    logits = functional.linear(hidden, masked.detach())
    path = gradients(
        lambda x: vocab_parallel_logprob(x, targets, vocab_size=VOCAB, **options), logits, coefficients=used
    )
    torch.testing.assert_close(path[0], wanted[0], **SINGLE)
    assert path[2].isfinite().all() and not path[2][:, kept:].any()


class LargestResult(TorchDispatchMode):
    """Records the most elements that any operation gave back, in backward too."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in (result,) if isinstance(x, torch.Tensor))])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_never_holds_more_than_a_chunk_of_logits(dtype: torch.dtype) -> None:
    """The logits' path meets all 400 x 40 of them; hidden and weight are smaller than a chunk."""
    head = make_head(400, dtype)
    with LargestResult() as lean:
        linear_path(*head, vocab_size=PADDED, train_entropy=True, chunk_tokens=150)
    with LargestResult() as plain:
        plain_path(*head, train_entropy=True)
    assert (lean.elements, plain.elements) == (150 * PADDED, 400 * PADDED)


def test_linear_refuses_a_chunk_of_no_tokens_and_a_main_grad_that_is_not_there() -> None:
    """A weight that is frozen, or passes forward alone, needs no main_grad."""
    hidden, weight, targets, _ = make_head()
    with pytest.raises(ValueError, match="chunk_tokens=0 must be at least 1"):
        linear_logprob(hidden, weight, targets, vocab_size=VOCAB, chunk_tokens=0)
    linear_logprob(hidden, weight, targets, vocab_size=VOCAB, into_main_grad=True)
    weight.requires_grad_()
    with torch.no_grad():
        linear_logprob(hidden, weight, targets, vocab_size=VOCAB, into_main_grad=True)
    with pytest.raises(ValueError, match="into_main_grad=True needs a weight with main_grad"):
        linear_logprob(hidden, weight, targets, vocab_size=VOCAB, into_main_grad=True)


@pytest.mark.parametrize(
    ("device_type", "columns", "kernel", "size", "tokens"),
    [
        ("cpu", 151_936, "torch", 4, 512),
        ("cuda", 151_936, "torch", 2, 768),
        ("cuda", 151_936, "triton", 2, 4096),
        ("cuda", 151_936, "triton", 4, 2176),
        ("cuda", 32_768, "torch", 2, 4096),
        ("cuda", 10**6, "torch", 4, 512),
    ],
)
def test_chunks_of_a_device_hold_their_bytes_within_their_bounds(
    device_type: str, columns: int, kernel: str, size: int, tokens: int
) -> None:
    assert default_chunk_tokens(device_type, columns, kernel, size) == tokens
    held = bytes_per_logit(kernel, size) * columns
    assert device_type == "cpu" or tokens in (512, 4096) or MAX_BUFFER_BYTES - 128 * held < tokens * held
    assert device_type == "cpu" or tokens == 512 or tokens * held <= MAX_BUFFER_BYTES


@pytest.mark.parametrize(
    ("device_type", "fault", "kernel"),
    [("cuda", "", "triton"), ("cuda", "no C compiler", "torch"), ("cpu", "", "torch")],
)
def test_kernel_by_default_is_tritons_on_a_gpu_that_can_build_it(monkeypatch, device_type, fault, kernel) -> None:
    monkeypatch.setattr(logit_chunks, "compiler_fault", lambda: fault)
    assert logit_chunks.settled_kernel("auto", device_type) == kernel
    assert logit_chunks.settled_kernel("torch", device_type) == "torch"


@pytest.mark.parametrize("chunk_tokens, train_entropy", pairwise([1, 3, 64], [False, True], strength=1))
def test_linear_tp2_equals_tp1(pool, chunk_tokens: int, train_entropy: bool) -> None:
    """Two true ranks, the second with the pads, give the results of one, by three all-reduces for any chunks."""
    wanted = plain_path(*make_head(), temperature=0.7, train_entropy=train_entropy)
    options = dict(temperature=0.7, train_entropy=train_entropy, chunk_tokens=chunk_tokens)
    ranks = pool.run(2, shard_of_linear, TOKENS, False, options, timeout_s=60)
    whole_weight = torch.cat([found[3] for found, _ in ranks])
    assert not whole_weight[VOCAB:].any()
    for found, calls in ranks:
        assert_near((*found[:3], whole_weight), wanted, CLOSE)
        assert calls == 3


def test_linear_tp2_leaves_the_sum_of_hiddens_gradient_to_the_caller(pool) -> None:
    """Under sequence parallelism the gather's backward reduces and scatters: the ranks' parts add up to the whole."""
    wanted = plain_path(*make_head())
    options = dict(train_entropy=False, reduce_hidden_grad=False)
    (first, *calls), (second, *others) = pool.run(2, shard_of_linear, TOKENS, False, options, timeout_s=60)
    assert_near((*wanted[:2], first[2] + second[2], wanted[3]), wanted, CLOSE)
    assert calls == others == [2]


def test_linear_tp2_with_one_ranks_logits_all_masked(pool) -> None:
    options = dict(train_entropy=True, reduce_hidden_grad=False)
    (first, _), (second, _) = pool.run(2, shard_of_linear, TOKENS, True, options, timeout_s=60)
    hidden, weight, targets, coefficients = make_head()
    wanted = linear_path(hidden.abs(), weight[:20], targets % 20, coefficients, vocab_size=20, train_entropy=True)
    assert_near(first, wanted, CLOSE)
    assert_near((*second[:2], wanted[2], first[3]), wanted, CLOSE)
    assert not second[3].any(), "a masked logit's row has a gradient"
