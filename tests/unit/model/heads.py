"""A small output layer for the tests of model/logprob.py, its gradients, and the interpreter of its Triton kernels."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from types import ModuleType

import torch
import torch.distributed as dist
from torch.nn import functional

from megatron_rl.model.logprob import linear_logprob
from tests.vocab_parallel import vocab_parallel_logprob

TOKENS, WIDTH, VOCAB, PADDED = 11, 12, 37, 40
# ‖found − wanted‖ / ‖wanted‖: sums of float32 products over H = 12 or V = 37, every term rounded to 6e-8
CLOSE = 1e-6
# bfloat16 logits of some 4 are rounded to 2^-8 relative, a target's log-prob is such a number; the reference does the
# same, and where its matrix product adds in another order a logit falls on the next bfloat16
CLOSE_BFLOAT16 = 2**-7


def make_head(tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Return hidden [tokens, H], weight [PADDED, H], targets [tokens] and coefficients [2, tokens].

    The coefficients are of log-probs and entropies.
    """
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
    """Return (log-probs, entropies, gradient of hidden, gradient of weight) of Σ coefficient · output."""
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


@contextlib.contextmanager
def interpreted(block_columns: int = 16) -> Iterator[ModuleType]:
    """Yield model/logprob_kernels.py run by Triton's interpreter, which needs no GPU, in blocks of a few columns.

    The kernels of a process that has imported them stay interpreted.
    """
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        kernels = importlib.import_module("megatron_rl.model.logprob_kernels")
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    width, kernels.BLOCK_COLUMNS = kernels.BLOCK_COLUMNS, block_columns
    try:
        yield kernels
    finally:
        kernels.BLOCK_COLUMNS = width


def shard_of_linear(
    rank: int, world: int, tokens: int, masked: bool, options: dict
) -> tuple[tuple[torch.Tensor, ...], int]:
    """Return this tensor rank's outputs and gradients, and the number of all-reduces.

    Where ``masked``, all of rank 1's logits are −inf.
    """
    hidden, weight, targets, coefficients = make_head(tokens)
    width, calls, all_reduce = PADDED // world, [], dist.all_reduce
    interpreter = interpreted() if options.get("kernel") == "triton" else contextlib.nullcontext()
    if masked:
        hidden, targets, weight[width:] = hidden.abs(), targets % width, float("-inf")
        hidden.requires_grad_(False)
    dist.all_reduce = lambda *args, **kwargs: (calls.append(None), all_reduce(*args, **kwargs))
    try:
        with interpreter:
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
