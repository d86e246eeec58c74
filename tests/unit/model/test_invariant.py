"""Row-invariant operations: a row alone, in any batch and at any place gives the same bits; and the right numbers.

This holds this host's kernels to what model/invariant/operations.py takes for granted of them.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_rl.model.attention.layout import lay_out
from megatron_rl.model.attention.packed import TorchAttention, pack
from megatron_rl.model.invariant import operations as invariant
from megatron_rl.model.invariant.attention import Cache, CachedSequences, InvariantAttention, attend
from megatron_rl.model.invariant.operations import BLOCK_ROWS, PIECE
from megatron_rl.model.invariant.visible_keys import KEY_BLOCK, QUERIES, Sight
from megatron_rl.model.logprob.linear import linear_logprob
from megatron_rl.model.logprob.row_invariant import block_statistics, combine_in_order, rank_logits, rank_logprob
from tests.pairwise import pairwise
from tests.unit.backend.packed import attention_config
from tests.unit.model.heads import SINGLE, gradients

FUNCTIONS = {"silu": F.silu, "exp": torch.exp, "log": torch.log, "cos": torch.cos, "rsqrt": torch.rsqrt}
DTYPES = [torch.float32, torch.bfloat16]
ROWS = (2, 7, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 2 * BLOCK_ROWS + 5)
SHAPES = [(64, 64), (64, 151), (100, 77), (96, 200), (256, 512), (896, 1024)]  # (K, N)
# A norm, a softmax or a product of numbers near 1, in another order; bfloat16 rounds to 8 bits.
CLOSE = {torch.float32: dict(rtol=1e-5, atol=1e-5), torch.bfloat16: dict(rtol=2**-6, atol=2**-6)}


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def on_threads(names: str, *factors, strength: int = 2):
    """Run a test on one thread and on two, with every pair of values of these and of the factors."""
    return pytest.mark.parametrize(
        f"threads, {names}", pairwise([1, 2], *factors, strength=strength), indirect=["threads"]
    )


def normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_row_invariant(function, x: torch.Tensor) -> None:
    """Assert that every row of function(x) has the bits that it has alone, in batches of any size, and elsewhere."""
    wanted = torch.cat([function(row[None]) for row in x])
    for rows in ROWS:
        for start in range(0, len(x) - rows + 1, max(3, rows - 1)):
            assert torch.equal(function(x[start : start + rows]), wanted[start : start + rows]), (rows, start)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    assert torch.equal(function(x[order]), wanted[order])


@on_threads("dtype, shape", DTYPES, SHAPES)
def test_a_row_of_a_product_does_not_depend_on_the_others(shape, dtype):
    inner, outer = shape
    weight = normal(outer, inner, seed=1, dtype=dtype)
    x = normal(ROWS[-1], inner, dtype=dtype)
    assert_row_invariant(lambda rows: invariant.matmul(rows, weight), x)
    wanted = torch.tensor([[math.fsum((a * b).tolist()) for b in weight.double()[:5]] for a in x.double()[:3]])
    found, bound = invariant.matmul(x, weight)[:3, :5].double(), 1e-4 if dtype == DTYPES[0] else 1
    torch.testing.assert_close(found, wanted.double(), rtol=2**-7, atol=bound)


def test_a_weight_that_lies_elsewhere_in_memory_gives_the_same_bits():
    """Megatron's parameters are views of one buffer, an engine's are tensors of their own."""
    x, weight = normal(40, 96), normal(50, 96, seed=1)
    buffer = torch.empty(50 * 96 + 3)
    moved = buffer[3:].view(50, 96).copy_(weight)
    assert moved.data_ptr() % 64 and torch.equal(invariant.matmul(x, moved), invariant.matmul(x, weight))


@on_threads("dtype, function", DTYPES, FUNCTIONS)
def test_a_function_of_elements_does_not_depend_on_their_place(function, dtype):
    x = normal(2 * PIECE + 100, dtype=dtype).abs() + 0.01
    function = FUNCTIONS[function]
    found = invariant.elementwise(function, x)
    for start, stop in [(0, 1), (1, 2), (63, 66), (1, PIECE + 3), (PIECE - 1, 2 * PIECE + 77), (7, 2 * PIECE + 100)]:
        assert torch.equal(invariant.elementwise(function, x[start:stop]), found[start:stop])
    torch.testing.assert_close(found, function(x))


@on_threads("dtype, width", DTYPES, [64, 100, 700])
def test_norm_and_silu(width, dtype):
    x, weight = 3 * normal(ROWS[-1], width, dtype=dtype), normal(width, seed=1, dtype=dtype)
    assert_row_invariant(lambda rows: invariant.rms_norm(rows, weight, 1e-6), x)
    assert_row_invariant(invariant.silu, x)
    wide = x.double()
    naive = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(invariant.rms_norm(x, weight, 1e-6).double(), naive, **CLOSE[dtype])
    torch.testing.assert_close(invariant.silu(x).double(), wide / (1 + (-wide).exp()), **CLOSE[dtype])


def test_gradients_equal_the_ordinary_ones():
    x, weight, matrix = normal(2, 21, 48), normal(48, seed=1), normal(30, 48, seed=2)
    pairs = [
        (invariant.silu, F.silu),
        (lambda t: invariant.rms_norm(t, weight, 1e-6), lambda t: F.rms_norm(t, (48,), weight, 1e-6)),
        (lambda t: invariant.linear(t, matrix), lambda t: F.linear(t, matrix)),
        (lambda w: invariant.rms_norm(x, w[0, 0], 1e-6), lambda w: F.rms_norm(x, (48,), w[0, 0], 1e-6)),
        (lambda w: invariant.linear(x, w[0]), lambda w: F.linear(x, w[0])),
    ]
    for tested, ordinary in pairs:
        found, wanted = (x.clone().requires_grad_() for _ in range(2))
        results = tested(found), ordinary(wanted)
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
        for result in results:
            (result * normal(*result.shape, seed=3)).sum().backward()
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-5, atol=1e-5)


# ---- attention -----------------------------------------------------------------------------------------------------

HEADS, GROUPS, WIDTH = 4, 2, 16
LENGTHS = (3, 1, KEY_BLOCK, KEY_BLOCK + 1, 2 * KEY_BLOCK + 9, QUERIES)


def heads_of(tokens: int, dtype: torch.dtype = torch.float32):
    return normal(tokens, HEADS, WIDTH, dtype=dtype), *(
        normal(tokens, GROUPS, WIDTH, seed=seed, dtype=dtype) for seed in (1, 2)
    )


def naive_attention(query, key, value, scale):
    """Attend with a loop over queries; the sequence is whole."""
    out = torch.zeros_like(query, dtype=torch.float64)
    for t in range(len(query)):
        for h in range(HEADS):
            g = h // (HEADS // GROUPS)
            weights = (key[: t + 1, g].double() @ query[t, h].double() * scale).softmax(0)
            out[t, h] = weights @ value[: t + 1, g].double()
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_packed_sequences_equals_a_loop_and_each_alone(dtype):
    tensors = heads_of(sum(LENGTHS), dtype)
    layout = lay_out(np.array(LENGTHS), np.zeros(len(LENGTHS), dtype=np.int64), None)
    out, lse = attend(*tensors, Sight.of_layout(layout), 0.25)
    for start, stop in zip(layout.starts, layout.starts[1:], strict=False):
        own = [x[start:stop] for x in tensors]
        alone = lay_out(np.array([stop - start]), np.array([0]), None)
        found, found_lse = attend(*own, Sight.of_layout(alone), 0.25)
        assert torch.equal(found, out[start:stop]) and torch.equal(found_lse, lse[:, start:stop])
        torch.testing.assert_close(found.double(), naive_attention(*own, 0.25), **CLOSE[dtype])


def attention_module() -> InvariantAttention:
    module = InvariantAttention(attention_config(), 1, None, None)
    module.inv_freq = 10_000.0 ** -(torch.arange(WIDTH // 2) * 2 / WIDTH)
    return module


@on_threads("prompt", [1, KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, 2 * KEY_BLOCK + 3], strength=1)
def test_steps_beside_a_cache_equal_one_packed_pass(prompt):
    """A prompt at once and then token by token, among others of other lengths, gives the bits of a pass over all."""
    module, steps, others = attention_module(), KEY_BLOCK + 3 if prompt == 1 else 5, 5
    tensors = heads_of(prompt + steps)
    layout = lay_out(np.array([prompt]), np.array([steps]), None)
    wanted = module(*tensors, None, packed_seq_params=pack(layout, torch.device("cpu")))
    width = prompt + steps
    cache = Cache(num_rows=(1 + others) * width)
    noise = heads_of(others * width, torch.float32)

    def run(part: slice, first: int) -> torch.Tensor:
        """Run our tokens between those of other sequences, which are at other positions."""
        own = [x[part] for x in tensors]
        count = part.stop - part.start
        mixed = [torch.cat([n[:others], x]) for n, x in zip(noise, own, strict=True)]
        parts = [(np.array([i]), (first + 7 * i) % width, (1 + i) * width + np.arange(width)) for i in range(others)]
        parts.append((others + np.arange(count), first, np.arange(width)))
        return module(*mixed, None, packed_seq_params=CachedSequences.of(cache, parts))[others:]

    assert torch.equal(run(slice(0, prompt), 0), wanted[:prompt])
    for position in range(prompt, prompt + steps):
        assert torch.equal(run(slice(position, position + 1), position), wanted[position : position + 1]), position


def test_attention_over_a_shared_prompt_equals_each_sample_alone_and_its_gradient_the_kernels():
    prompts, responses = np.array([70, 70, 70, 9]), np.array([5, 66, 0, 3])
    layout = lay_out(prompts, responses, np.array([0, 0, 0, 1]))
    assert layout.shared
    module = attention_module()
    tensors = heads_of(layout.num_tokens)
    packed = pack(layout, torch.device("cpu"))
    shared = module(*tensors, None, packed_seq_params=packed)
    for slot in range(3):
        rows = np.r_[layout.prompts[slot] + np.arange(70), layout.responses[slot] + np.arange(responses[slot])]
        alone = pack(lay_out(prompts[[slot]], responses[[slot]], None), torch.device("cpu"))
        assert torch.equal(module(*(x[rows] for x in tensors), None, packed_seq_params=alone), shared[rows])
    found, wanted = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    ordinary = TorchAttention(attention_config(), 1, None, None)
    turned = module._turned(*wanted[:2], packed.position_ids)
    results = (
        module(*found, None, packed_seq_params=packed),
        ordinary(*turned, wanted[2], None, packed_seq_params=packed),
    )
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    for result in results:
        (result * normal(*result.shape, seed=3)).sum().backward()
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-5)


# ---- log-probs -----------------------------------------------------------------------------------------------------


@on_threads("dtype, temperature", DTYPES, [0.7, 1.0], strength=1)
def test_log_probs_do_not_depend_on_the_other_rows(dtype, temperature):
    tokens, hidden_size, vocab_size = ROWS[-1], 40, 203
    hidden = normal(tokens, hidden_size, dtype=dtype)
    weight = normal(vocab_size + 5, hidden_size, seed=1, dtype=dtype)
    targets = torch.randint(0, vocab_size, (tokens,), generator=torch.Generator().manual_seed(1))
    given = dict(temperature=temperature, vocab_size=vocab_size)

    def tested(rows: torch.Tensor) -> torch.Tensor:
        """Return log-prob and entropy; the last column of a row is its target."""
        own, options = rows[:, -1].long(), dict(kernel="invariant", chunk_tokens=64, **given)
        return torch.stack(linear_logprob(rows[:, :-1].to(dtype), weight, own, **options), dim=1)

    assert_row_invariant(tested, torch.cat([hidden.float(), targets[:, None].float()], dim=1))
    whole, _ = linear_logprob(hidden, weight, targets, kernel="invariant", **given)
    for ranks, most in ((1, 0.0), (3, 1e-5)):  # to the bit on several ranks: tests/equality/test_bitwise.py
        logits = rank_logits(hidden, weight, vocab_size=vocab_size, ranks=ranks)
        assert [x.shape[1] for x in logits] == ([203] if ranks == 1 else [68, 68, 67])
        assert (rank_logprob(logits, targets, temperature=temperature) - whole).abs().max() <= most
    found, wanted = (
        gradients(
            lambda x, more=more: linear_logprob(x, weight, targets, **more, **given),
            hidden,
            coefficients=[normal(tokens, seed=2)],
        )
        for more in ({"kernel": "invariant"}, {})
    )
    torch.testing.assert_close(found[0], wanted[0], **SINGLE)
    torch.testing.assert_close(found[2], wanted[2], rtol=1e-5, atol=1e-5)


def test_entropies_of_several_ranks_equal_those_of_the_whole_vocabulary():
    """Each rank's sums are relative to its own maximum; the ranks' maxima are far apart."""
    whole = normal(BLOCK_ROWS, 90) + torch.tensor([0.0, 6.0, -6.0]).repeat_interleave(30)
    ranks = []
    for own in whole.split(30, dim=1):
        peak, stats = torch.empty(BLOCK_ROWS), torch.empty(3, BLOCK_ROWS)
        block_statistics(own, 0.7, torch.full((BLOCK_ROWS,), -1), peak, stats)
        ranks.append((peak, stats))
    _, (total, moment, _) = combine_in_order(ranks)
    wanted = torch.distributions.Categorical(logits=whole.double() / 0.7).entropy()
    torch.testing.assert_close((total.log() - moment / total).double(), wanted, rtol=1e-5, atol=1e-5)


def test_masked_logits_take_no_probability_and_no_nan():
    """Rows of the weight that send a logit to −inf equal a vocabulary without them, in log-probs and in entropies."""
    hidden, weight, targets = normal(7, 12).abs(), normal(30, 12, seed=1), torch.arange(7)
    masked = torch.cat([weight, torch.full((6, 12), -math.inf)])
    found = linear_logprob(hidden, masked, targets, vocab_size=36, kernel="invariant")
    wanted = linear_logprob(hidden, weight, targets, vocab_size=30, kernel="invariant")
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
