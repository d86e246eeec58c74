"""A small output layer for the tests of logprob/linear.py, its gradients, and the interpreter of its Triton kernels."""

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from megatron_rl.model.logprob.linear import linear_logprob
from tests.vocab_parallel import vocab_parallel_logprob

TOKENS, WIDTH, VOCAB, PADDED = 11, 12, 37, 40
# ‖found − wanted‖ / ‖wanted‖: sums of float32 products over H = 12 or V = 37, every term rounded to 6e-8
CLOSE = 1e-6
# bfloat16 logits of some 4 are rounded to 2^-8 relative, a target's log-prob is such a number; the reference does the
# same, and where its matrix product adds in another order a logit falls on the next bfloat16
CLOSE_BFLOAT16 = 2**-7
# Float32 throughout: logits up to 20 carry some 1e-6 of rounding each, and a sum over the vocabulary adds its own.
SINGLE = {"rtol": 1e-5, "atol": 1e-5}


def reference(logits: torch.Tensor, targets: torch.Tensor, temperature: float, vocab_size: int):
    """Return log-probs and entropies by torch.log_softmax in float64, over the true vocabulary."""
    distribution = (logits.double()[:, :vocab_size] / temperature).log_softmax(-1)
    return distribution.gather(1, targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


def gradients(function, *tensors: torch.Tensor, coefficients) -> tuple[torch.Tensor, ...]:
    """Return (log-probs, entropies, a gradient of each tensor) of Σ coefficient · output."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    outputs = function(*leaves)
    total = sum((c * x).sum() for c, x in zip(coefficients, outputs, strict=False))
    return *(x.detach() for x in outputs), *torch.autograd.grad(total, leaves)


def make_head(tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Return hidden [tokens, H], weight [PADDED, H], targets [tokens], and coefficients [2, tokens] of the outputs."""
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, WIDTH, generator=random).to(dtype)
    weight = torch.randn(PADDED, WIDTH, generator=random).to(dtype)
    targets = torch.randint(0, VOCAB, (tokens,), generator=random)
    return hidden, weight, targets, torch.randn(2, tokens, generator=random).to(dtype)


def head_gradients(function, hidden, weight, coefficients, train_entropy: bool) -> tuple[torch.Tensor, ...]:
    """Return (log-probs, entropies, gradient of hidden, gradient of weight) of Σ coefficient · output."""
    return gradients(function, hidden, weight, coefficients=coefficients if train_entropy else coefficients[:1])


def linear_path(hidden, weight, targets, coefficients, *, train_entropy: bool = False, **options):
    options = dict(vocab_size=VOCAB, train_entropy=train_entropy) | options

    def lean(h, w):
        return linear_logprob(h, w, targets, **options)

    return head_gradients(lean, hidden, weight, coefficients, train_entropy)


def plain_path(hidden, weight, targets, coefficients, *, train_entropy: bool = False, temperature: float = 1.0):
    def logits_first(h, w):
        options = dict(temperature=temperature, vocab_size=VOCAB, train_entropy=train_entropy)
        return vocab_parallel_logprob(functional.linear(h, w), targets, **options)

    return head_gradients(logits_first, hidden, weight, coefficients, train_entropy)


def assert_near(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], bound: float) -> None:
    names = ("log-probs", "entropies", "hidden's gradient", "weight's gradient")
    for name, x, y in zip(names, found, wanted, strict=True):
        assert x.shape == y.shape, f"{name}: {x.shape} and {y.shape}"
        error = ((x.double() - y.double()).norm() / y.double().norm()).item()
        assert error <= bound, f"{name}: relative error {error:.2e} over {bound:.2e}"


@contextlib.contextmanager
def interpreted(block_columns: int = 16) -> Iterator[ModuleType]:
    """Yield model/logprob/kernels.py run by Triton's interpreter, which needs no GPU, in blocks of a few columns.

    The kernels of a process that has imported them stay interpreted.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        kernels = importlib.import_module("megatron_rl.model.logprob.kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "BLOCK_COLUMNS", block_columns)
        yield kernels


def shard_of_linear(rank: int, world: int, tokens: int, masked: bool, options: dict):
    """Return this tensor rank's results and all-reduces; where ``masked``, all of rank 1's logits are −inf."""
    hidden, weight, targets, coefficients = make_head(tokens)
    width, calls, all_reduce = PADDED // world, [], dist.all_reduce
    interpreter = interpreted() if options.get("kernel") == "triton" else contextlib.nullcontext()
    if masked:
        hidden, targets, weight[width:] = hidden.abs(), targets % width, float("-inf")
    own = weight[rank * width : (rank + 1) * width]
    with interpreter, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *args, **named: (calls.append(None), all_reduce(*args, **named)))
        found = linear_path(hidden, own, targets, coefficients, tensor_rank=rank, group=dist.group.WORLD, **options)
    return found, len(calls)
