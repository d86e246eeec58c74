"""linear_logprob by Triton's kernels, run by its interpreter on the CPU, equals that by torch's operations."""

import functools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import ConfigError
from megatron_rl.model.logprob import chunks as logit_chunks
from megatron_rl.model.logprob.linear import linear_logprob
from tests.pairwise import pairwise
from tests.unit.model import heads
from tests.unit.model.heads import CLOSE, TOKENS, VOCAB, assert_near, interpreted, make_head

triton = pytest.importorskip("triton", reason="triton is not installed; `make test-oracles` installs it")

# The logits are those of the torch path to the bit, so that outputs differ by float32 sums in another order, as in
# CLOSE. So do a gradient's float32 numbers, which are then rounded; to bfloat16 the interpreter (3.7.1 and 3.9.0) cuts
# them off, by up to 2^-7, where a GPU rounds to the nearest.
CLOSE_GRADIENT = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def kernels() -> Iterator:
    with interpreted() as module:
        yield module


def both(hidden, weight, targets, coefficients, **options) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Return outputs and gradients by Triton's kernels, and by torch's operations."""
    found = []
    for kernel in ("triton", "torch"):
        by_kernel = functools.partial(linear_logprob, targets=targets, kernel=kernel, **options)
        found.append(heads.head_gradients(by_kernel, hidden, weight, coefficients, options["train_entropy"]))
    return tuple(found)


SHAPES = pairwise((3, TOKENS, 64), (1.0, 0.7), (False, True))


@pytest.mark.parametrize("chunk_tokens, temperature, train_entropy", SHAPES)
def test_kernels_equal_torch(chunk_tokens: int, temperature: float, train_entropy: bool) -> None:
    """Outputs and gradients are equal; 37 columns are no multiple of the kernels' 16, and 3 more are pads."""
    options = dict(temperature=temperature, vocab_size=VOCAB, train_entropy=train_entropy, chunk_tokens=chunk_tokens)
    found, wanted = both(*make_head(), **options)
    assert_near(found, wanted, CLOSE)
    pads = found[3][VOCAB:]
    assert len(pads) == heads.PADDED - VOCAB and not pads.any(), "a pad of the vocabulary has a gradient"


@pytest.mark.parametrize("train_entropy", [False, True])
@pytest.mark.parametrize("dtype", CLOSE_GRADIENT)
def test_kernels_equal_torch_in_half_precision(dtype: torch.dtype, train_entropy: bool) -> None:
    options = dict(temperature=0.7, vocab_size=VOCAB, train_entropy=train_entropy, chunk_tokens=4)
    found, wanted = both(*make_head(dtype=dtype), **options)
    assert [x.dtype for x in found] == [torch.float32, torch.float32, dtype, dtype]
    assert_near(found[:2] + wanted[2:], wanted, CLOSE)
    assert_near(found, wanted, CLOSE_GRADIENT[dtype])


def test_kernels_pass_gradcheck_in_double() -> None:
    hidden, weight, targets, _ = make_head(3, torch.float64)

    def lean(h, w):
        options = dict(temperature=1.3, vocab_size=VOCAB, train_entropy=True, chunk_tokens=2, kernel="triton")
        return linear_logprob(h, w, targets, **options)

    assert torch.autograd.gradcheck(lean, (hidden.requires_grad_(), weight.requires_grad_()), fast_mode=True)


@settings(max_examples=30, derandomize=True)
@given(tokens=st.integers(0, 5), vocab=st.integers(1, 40), pads=st.integers(0, 5),
       block=st.sampled_from([1, 2, 8, 64]), chunk_tokens=st.integers(1, 6),
       temperature=st.sampled_from([0.3, 1.0, 2.0]), scale=st.sampled_from([0.01, 1.0, 100.0]),
       train_entropy=st.booleans(), seed=st.integers(0, 3))
def test_kernels_equal_torch_at_any_shape(tokens, vocab, pads, block, scale, train_entropy, seed, **cut) -> None:
    """Every chunk, block and shape equals torch's operations, in double, where rounding hides nothing."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 3, generator=random, dtype=torch.float64)
    weight = scale * torch.randn(vocab + pads, 3, generator=random, dtype=torch.float64)
    targets = torch.randint(0, vocab, (tokens,), generator=random)
    coefficients = torch.randn(2, tokens, generator=random, dtype=torch.float64)
    with interpreted(block):
        given = dict(vocab_size=vocab, train_entropy=train_entropy, **cut)
        found, wanted = both(hidden, weight, targets, coefficients, **given)
    for x, y in zip(found, wanted, strict=True):
        # logits reach 10³: their log-probs are differences rounded to 1e-13, gradients scale with the weight
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("train_entropy", [False, True])
def test_masked_logits_take_no_probability_and_no_nan(train_entropy: bool) -> None:
    """Rows of weight that send logits to −inf give what torch's operations give, bounded; here whole blocks do."""
    hidden, weight, targets, coefficients = make_head()
    hidden, targets = hidden.abs(), targets % 20
    for masked in (slice(20, VOCAB), slice(0, 16), slice(16, 17)):
        open_weight = weight.clone()
        open_weight[masked] = float("-inf")
        allowed = torch.where((targets >= masked.start) & (targets < masked.stop), 18, targets)
        options = dict(vocab_size=VOCAB, train_entropy=train_entropy)
        found, wanted = both(hidden, open_weight, allowed, coefficients, **options)
        assert all(x.isfinite().all() for x in (found[0], found[1], found[3]))
        # hidden's gradient is 0 · (−inf) there, as for any such layer
        assert_near((*found[:2], wanted[3], found[3]), (*wanted[:2], wanted[3], wanted[3]), CLOSE)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which the interpreter computes with, warns of them
@pytest.mark.parametrize("planted, column", pairwise((math.nan, math.inf, 3e38, -3e38), (0, 20, 36), strength=1))
def test_nan_infinity_and_huge_logits_equal_torch(planted: float, column: int) -> None:
    """A column of such logits gives what it gives by torch's operations: NaN where they give NaN."""
    hidden, weight, targets, coefficients = make_head(4)
    hidden[:, 0] = 1
    weight[:, 0], weight[column] = 0, 0
    weight[column, 0] = planted  # times 1: the logits of all rows in this column
    hidden = hidden if math.isfinite(planted) else hidden.abs()
    found, wanted = both(hidden, weight, targets, coefficients, vocab_size=VOCAB, train_entropy=True, chunk_tokens=3)
    assert found[0].isnan().all() or math.isfinite(planted)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("train_entropy", [False, True])
def test_kernels_tp2_equal_torch_tp1(pool, train_entropy: bool) -> None:
    """Two true ranks by kernels give the results of one by torch, by three all-reduces; the second holds the pads."""
    hidden, weight, targets, coefficients = make_head()
    options = dict(temperature=0.7, train_entropy=train_entropy, chunk_tokens=4)
    _, wanted = both(hidden, weight, targets, coefficients, vocab_size=VOCAB, **options)
    ranks = pool.run(2, heads.shard_of_linear, TOKENS, False, options | dict(kernel="triton"), timeout_s=60)
    whole_weight = torch.cat([found[3] for found, _ in ranks])
    for found, calls in ranks:
        assert_near((*found[:3], whole_weight), wanted, CLOSE)
        assert calls == 3


def test_kernels_tp2_with_one_ranks_logits_all_masked(pool) -> None:
    options = dict(train_entropy=True, reduce_hidden_grad=False)
    by_torch = pool.run(2, heads.shard_of_linear, TOKENS, True, options | dict(kernel="torch"), timeout_s=60)
    by_triton = pool.run(2, heads.shard_of_linear, TOKENS, True, options | dict(kernel="triton"), timeout_s=60)
    (first, _), (second, _) = by_triton
    (wanted, _), _ = by_torch
    assert_near(first, wanted, CLOSE)
    assert_near((*second[:2], *wanted[2:]), wanted, CLOSE)
    assert not second[3].any(), "a masked logit's row has a gradient"


def test_kernels_hold_one_buffer_of_logits_in_hiddens_dtype(kernels, monkeypatch) -> None:
    """Both kernels work in the product's own memory, which is reused from chunk to chunk."""
    seen = []

    def watched(function):
        def call(logits, *arguments, **options):
            seen.append((logits.data_ptr(), logits.dtype))
            function(logits, *arguments, **options)

        return call

    for name in ("statistics", "turn_into_gradient"):
        monkeypatch.setattr(kernels, name, watched(vars(kernels)[name]))
    both(*make_head(dtype=torch.bfloat16), vocab_size=VOCAB, train_entropy=True, chunk_tokens=3)
    assert len(seen) == 8 and {dtype for _, dtype in seen} == {torch.bfloat16}
    assert len({place for place, _ in seen[:4]}) == len({place for place, _ in seen[4:]}) == 1


def test_a_kernel_that_cannot_run_is_refused(kernels, monkeypatch) -> None:
    hidden, weight, targets, _ = make_head()
    with pytest.raises(ConfigError, match="kernel='cuda' must be one of auto, torch, triton .model.logprob_kernel"):
        linear_logprob(hidden, weight, targets, vocab_size=VOCAB, kernel="cuda")
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "_statistics_of_a_row", triton.runtime.JITFunction(kernels._statistics_of_a_row.fn))
        with pytest.raises(ValueError, match="TRITON_INTERPRET=1 .* or pass kernel='torch'"):
            linear_logprob(hidden, weight, targets, vocab_size=VOCAB, kernel="triton")
    monkeypatch.setattr(logit_chunks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install triton, or take torch"):
        linear_logprob(hidden, weight, targets, vocab_size=VOCAB, kernel="triton")
