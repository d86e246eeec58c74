"""Triton kernels for model/logprob/linear.py: each reads a chunk's logits once, from the matrix product's output.

Torch's operations read and write the chunk about ten times in float32. Each row's maximum and sums
are computed by the online softmax (Milakov and Gimelshein, arXiv:1805.02867, algorithm 3), extended
to Σ (x−m) e^{x−m}. Tests compare the kernels with torch's operations in Triton's interpreter. It
runs kernels that were imported under TRITON_INTERPRET=1. On an H100 they ran in Triton 3.6
(docs/evidence/performance.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_COLUMNS = 2048  # logits of a row that a program holds at a time; a power of two, 8 per thread of 8 warps
NUM_WARPS = 8


# triton.language's sum and max are decorated when triton is imported, which may be before a test sets TRITON_INTERPRET.
@triton.jit
def _added(a, b):
    return a + b


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _statistics_of_a_row(
    logits,
    own_column,
    peaks,
    totals,
    moments,
    at_targets,
    stride,
    num_columns,
    TEMPERATURE: tl.constexpr,
    LOWEST: tl.constexpr,
    UNDERFLOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dtype = peaks.dtype.element_ty
    peak = tl.full((), LOWEST, dtype)  # finite: if a row's logits are all masked, −inf − (−inf) would be NaN
    total = tl.full((), 0.0, dtype)
    moment = tl.full((), 0.0, dtype)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + columns, mask=columns < num_columns, other=float("-inf"))
        x = x.to(dtype) / TEMPERATURE
        higher = tl.maximum(peak, tl.reduce(x, 0, _larger))
        # from the maximum m so far to the new m':
        # Σ (x−m') e^{x−m'} = e^{m−m'} (Σ (x−m) e^{x−m} + (m−m') Σ e^{x−m})
        shift = tl.maximum(peak - higher, UNDERFLOW)
        factor = tl.exp(shift)
        moment = factor * (moment + shift * total)
        total = factor * total
        below = x - higher
        e = tl.exp(below)
        total += tl.reduce(e, 0, _added)
        moment += tl.reduce(e * tl.maximum(below, UNDERFLOW), 0, _added)
        peak = higher
    column = tl.load(own_column + row)
    at_target = tl.load(logits + row * stride + column, mask=column >= 0, other=0.0).to(dtype) / TEMPERATURE
    tl.store(peaks + row, peak)
    tl.store(totals + row, total)
    tl.store(moments + row, moment)
    tl.store(at_targets + row, at_target)


@triton.jit
def _gradient_of_a_block(
    logits,
    own_column,
    log_zs,
    entropies,
    at_logprobs,
    at_entropies,
    stride,
    num_columns,
    TEMPERATURE: tl.constexpr,
    UNDERFLOW: tl.constexpr,
    TRAIN_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    dtype = log_zs.dtype.element_ty
    at_logprob = tl.load(at_logprobs + row)
    logit = tl.load(logits + row * stride + columns, mask=inside, other=float("-inf"))
    log_p = logit.to(dtype) / TEMPERATURE - tl.load(log_zs + row)
    slope = at_logprob
    if TRAIN_ENTROPY:  # −p (a + b (log p + H))
        slope += (tl.maximum(log_p, UNDERFLOW) + tl.load(entropies + row)) * tl.load(at_entropies + row)
    gradient = tl.where(columns == tl.load(own_column + row), at_logprob, 0.0) - tl.exp(log_p) * slope
    tl.store(logits + row * stride + columns, gradient.to(logit.dtype), mask=inside)


def check_device(device: torch.device) -> None:
    """Raise ValueError if these kernels cannot run on ``device``: on a CPU they run only in Triton's interpreter."""
    if device.type == "cpu" and isinstance(_statistics_of_a_row, triton.runtime.JITFunction):
        raise ValueError(
            "kernel='triton' on the CPU needs Triton's interpreter: set TRITON_INTERPRET=1 before "
            "megatron_rl.model.logprob.kernels is imported, or pass kernel='torch'"
        )


def statistics(
    logits: torch.Tensor,
    own_column: torch.Tensor,
    peak: torch.Tensor,
    stats: torch.Tensor,
    *,
    temperature: float,
    underflow: float,
) -> None:
    """Fill ``peak`` with each row's maximum m of x = logits / temperature, and ``stats`` with three sums over the row.

    logits:     [N, columns] in any float dtype, without pads; each row is contiguous.
    own_column: int64 [N], the target's column; −1 if another tensor rank has it.
    peak:       [N] float32 (float64 for float64 logits); finite, even if a row's logits are all −inf.
    stats:      [3, N] in peak's dtype: Σ e^{x−m}, Σ (x−m) e^{x−m}, and the target's x, or 0 if another
                tensor rank has the target.
    underflow:  a finite number; at and below it e^x is 0. An x−m below it, such as −inf, is raised to
                it, so that e^{x−m} · (x−m) is 0 and not NaN.
    """
    with torch.cuda.device_of(logits):
        _statistics_of_a_row[(logits.shape[0],)](
            logits,
            own_column,
            peak,
            stats[0],
            stats[1],
            stats[2],
            logits.stride(0),
            logits.shape[1],
            TEMPERATURE=temperature,
            LOWEST=torch.finfo(peak.dtype).min,
            UNDERFLOW=underflow,
            BLOCK=BLOCK_COLUMNS,
            num_warps=NUM_WARPS,
        )


def turn_into_gradient(
    logits: torch.Tensor,
    own_column: torch.Tensor,
    log_z: torch.Tensor,
    entropy: torch.Tensor,
    at_logprob: torch.Tensor,
    at_entropy: torch.Tensor | None,
    *,
    temperature: float,
    underflow: float,
) -> None:
    """Replace a chunk's logits by the loss's gradient with respect to them, in place, by one read and one write.

    logits, own_column, temperature, underflow: as in ``statistics``.
    log_z: [N], log Σ e^x over the whole vocabulary, with x = logits / temperature.
    entropy: [N], each row's entropy in nats.
    at_logprob: [N], ∂loss/∂log-prob of each row, divided by the temperature.
    at_entropy: [N], ∂loss/∂entropy of each row, divided by the temperature; None if it is 0.
    """
    blocks = -(-logits.shape[1] // BLOCK_COLUMNS)
    with torch.cuda.device_of(logits):
        _gradient_of_a_block[(logits.shape[0], blocks)](
            logits,
            own_column,
            log_z,
            entropy,
            at_logprob,
            at_logprob if at_entropy is None else at_entropy,
            logits.stride(0),
            logits.shape[1],
            TEMPERATURE=temperature,
            UNDERFLOW=underflow,
            TRAIN_ENTROPY=at_entropy is not None,
            BLOCK=BLOCK_COLUMNS,
            num_warps=NUM_WARPS,
        )
