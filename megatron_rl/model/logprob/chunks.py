"""The chunks of logits in linear.py: how many tokens a chunk has, its buffers, and the kernel that computes on it.

``model.logprob_kernel`` chooses torch's operations or the Triton kernels of kernels.py, which tests
compare with torch's operations. Under ``rollout.bitwise`` the forward is row-invariant: a row's
result has the same bits in any batch (row_invariant.py).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist

from megatron_rl.distributed.requirements import compiler_fault
from megatron_rl.errors import ConfigError

Kernel = Literal["torch", "triton", "invariant"]
AskedKernel = Literal["auto", "torch", "triton", "invariant"]
# From here down e^x is 0, in float64 too. A masked logit (−inf) is raised to it, so that 0 · x is 0, not NaN.
UNDERFLOW = -1e4

# Every chunk adds a product [V/TP, H] to the weight's gradient, however few its tokens. That reads
# and writes the float32 sum, 4.3 GB per chunk at V/TP = 151,936 and H = 3,584. So on a GPU a chunk
# has as many tokens as fit in 1.25 GiB of buffers: at these sizes in bfloat16 768 for torch's
# operations, and 4,096 for the Triton kernels, which have one buffer. On one H100, 8,192 tokens
# forward and backward at H = 1,536 took the kernels 35.8 ms in chunks of 768, 29.1 of 2,048 and 27.2
# of 4,096. Torch's operations took 74.7 and 66.2 ms in chunks of the first two sizes
# (docs/evidence/performance.md). On the CPU it counts more that the buffers fit in the caches: 512 was
# measured.
CPU_CHUNK_TOKENS = 512
MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS = 512, 4096
MAX_BUFFER_BYTES = 5 * 2**28
TILE_TOKENS = 128  # rows of a matrix product's tile on a GPU


def bytes_per_logit(kernel: Kernel, size: int) -> int:
    """Return the number of bytes that a chunk's buffers take per logit.

    size: the number of bytes of one element of the hidden states, and so of a logit that the matrix
        product returns.
    """
    if kernel == "triton":
        return size
    return 2 * max(size, 4) + (size if size < 4 else 0)


def default_chunk_tokens(device_type: str, columns: int, kernel: Kernel, size: int) -> int:
    """Return the number of tokens in one chunk of ``linear_logprob``, on a device of ``device_type``.

    columns: V/TP, the number of vocabulary entries of this tensor rank.
    size: the number of bytes of one element of the hidden states.
    """
    if device_type == "cpu":
        return CPU_CHUNK_TOKENS
    fits = MAX_BUFFER_BYTES // (bytes_per_logit(kernel, size) * columns) // TILE_TOKENS * TILE_TOKENS
    return min(max(fits, MIN_CHUNK_TOKENS), MAX_CHUNK_TOKENS)


def settled_kernel(setting: AskedKernel, device_type: str) -> Kernel:
    """Return the kernel that ``setting`` means on a device.

    ``auto`` is "triton" on a GPU if Triton can compile, else "torch". Raises ConfigError as
    ``check_kernel`` does.
    """
    if setting == "auto":
        return "triton" if device_type == "cuda" and not compiler_fault() else "torch"
    check_kernel(setting)
    return setting


def check_kernel(kernel: str) -> None:
    """Raise ConfigError if ``kernel`` (``model.logprob_kernel``) is unknown, or its package is not installed."""
    if kernel not in get_args(AskedKernel):
        raise ConfigError(
            f"kernel={kernel!r} must be one of auto, torch, triton (model.logprob_kernel), or invariant "
            "(rollout.bitwise)"
        )
    if kernel == "triton" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "kernel='triton' (model.logprob_kernel) needs triton, which is not installed; pip install triton, or take "
            "torch"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Holds the settings, apart from tensors, that ``linear_logprob``'s forward and backward share.

    start: this rank's first column of the vocabulary.
    num_valid: the number of this rank's columns that are not pads.
    group: the tensor ranks; None if this rank has the whole vocabulary.

    The other fields are the arguments of ``linear_logprob`` (linear.py) with the same names.
    """

    temperature: float
    start: int
    num_valid: int
    group: dist.ProcessGroup | None
    train_entropy: bool
    reduce_hidden_grad: bool
    into_main_grad: bool
    chunk_tokens: int
    kernel: Kernel

    def slices(self, tokens: int) -> list[slice]:
        return [slice(start, min(start + self.chunk_tokens, tokens)) for start in range(0, tokens, self.chunk_tokens)]

    def buffer(self, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor [chunk tokens, num_valid] on hidden's device, which every chunk reuses.

        On a CPU new memory for each chunk would cost a page fault per 4 KiB, as much time as the
        exponential.
        """
        return hidden.new_empty((min(self.chunk_tokens, hidden.shape[0]), self.num_valid), dtype=dtype)

    def own(self, targets: torch.Tensor) -> torch.Tensor:
        """Return int64 [N], each target's column among this tensor rank's columns; −1 if another rank has it."""
        local = targets - self.start
        return torch.where((local >= 0) & (local < self.num_valid), local, -1)


def own_columns(width: int, tensor_rank: int, vocab_size: int) -> tuple[int, int]:
    """Return the vocabulary index of this tensor rank's first column, and the number of its columns that are not pads.

    width: the number of columns of each rank, pads included.

    Raises ValueError if all columns of this rank are pads.
    """
    start = tensor_rank * width
    num_valid = max(0, min(width, vocab_size - start))
    if num_valid == 0:
        raise ValueError(
            f"tensor rank {tensor_rank} holds columns from {start} on, all past vocab_size={vocab_size}; lower "
            "parallel.tensor"
        )
    return start, num_valid


class Chunks:
    """Computes on the LM head's logits, a chunk of tokens at a time; each kernel has a subclass.

    This class merges the tensor ranks' softmax statistics: the maximum and sums over a token's
    logits, which each rank computes over its own columns. The subclasses add ``statistics`` and
    ``gradient``, which compute on one chunk.

    head: the settings of ``linear_logprob``.
    """

    head: Head

    def combined(self, peak: torch.Tensor, stats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's maximum m [N] of x and sums [3, N] over all tensor ranks. A collective.

        The sums are Σ e^{x−m}, Σ (x−m) e^{x−m} and the target's x, with x = logits / temperature.

        peak, stats: the maximum and the sums over this rank's columns; they are overwritten.
        """
        own_peak = peak.clone()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self.head.group)
        shift = own_peak - peak
        # from this rank's maximum m to the overall m':
        # Σ (x−m') e^{x−m'} = e^{m−m'} (Σ (x−m) e^{x−m} + (m−m') Σ e^{x−m})
        stats[1] += shift * stats[0]
        stats[:2] *= shift.exp()
        dist.all_reduce(stats, group=self.head.group)
        return peak, stats

    def log(self, x: torch.Tensor) -> torch.Tensor:
        """Return the natural logarithm of x [N]; a subclass may compute it in another way."""
        return x.log()


class TorchChunks(Chunks):
    """Computes on chunks of logits by torch's operations, in three buffers that every chunk reuses.

    ``product`` holds the logits in the dtype of the hidden states. ``x`` holds the logits divided by
    the temperature, and ``e`` exponentials, both in float32. If the hidden states are float32,
    ``product`` and ``x`` are one tensor. In a backward without an entropy gradient, ``e`` and ``x``
    are one.
    """

    def __init__(self, head: Head, hidden: torch.Tensor, weight: torch.Tensor, *, backward: bool) -> None:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        self.head, self.hidden, self.weight = head, hidden, weight[: head.num_valid]
        self.x = head.buffer(hidden, precise)
        self.e = self.x if backward and not head.train_entropy else head.buffer(hidden, precise)
        self.product = self.x if hidden.dtype == precise else head.buffer(hidden, hidden.dtype)

    def scaled_logits(self, rows: slice) -> torch.Tensor:
        """Return the logits of one chunk's rows, divided by the temperature, in the buffer ``x``.

        The matrix product is rounded to the hidden states' dtype first, as in the output layer.
        """
        hidden = self.hidden[rows]
        logits = torch.mm(hidden, self.weight.t(), out=self.product[: hidden.shape[0]])
        x = logits if self.product is self.x else self.x[: hidden.shape[0]].copy_(logits)
        return x if self.head.temperature == 1.0 else x.div_(self.head.temperature)

    def statistics(self, rows: slice, column: torch.Tensor, peak: torch.Tensor, stats: torch.Tensor) -> None:
        """Fill ``peak`` [r] and ``stats`` [3, r] with the softmax statistics of a chunk's r rows.

        With x = logits / temperature, ``peak`` is a row's maximum m of x, and ``stats`` is Σ e^{x−m},
        Σ (x−m) e^{x−m} and the target's x.

        rows: the chunk's rows of the hidden states.
        column: int64 [r], the target's column; −1 if another tensor rank has it. Then the third sum
            is 0.
        """
        x = self.scaled_logits(rows)
        stats[2] = x.gather(1, column.clamp(min=0)[:, None])[:, 0].masked_fill_(column < 0, 0)
        # clamped to the lowest float: if a rank's logits are all masked, −inf − (−inf) would be NaN
        peak.copy_(x.amax(-1).clamp_(min=torch.finfo(x.dtype).min))
        x.sub_(peak[:, None])
        e = torch.exp(x, out=self.e[: x.shape[0]])
        stats[0] = e.sum(-1)
        stats[1] = e.mul_(x.clamp_(min=UNDERFLOW)).sum(-1)

    def gradient(
        self,
        rows: slice,
        column: torch.Tensor,
        log_z: torch.Tensor,
        entropy: torch.Tensor,
        at_logprob: torch.Tensor,
        at_entropy: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss's gradient [r, columns] with respect to the logits of one chunk's r rows.

        It is in the hidden states' dtype, in a buffer that the next chunk overwrites.

        rows: the chunk's rows of the hidden states.
        column: int64 [r], the target's column; −1 if another tensor rank has it.
        log_z: [r], log Σ e^x over the whole vocabulary, with x = logits / temperature.
        entropy: [r], each row's entropy in nats.
        at_logprob, at_entropy: [r], ∂loss/∂log-prob and ∂loss/∂entropy of each row, divided by the
            temperature.
        """
        x = self.scaled_logits(rows).sub_(log_z[:, None])
        e = torch.exp(x, out=self.e[: x.shape[0]])
        if self.head.train_entropy:  # −p (a + b (log p + H))
            x.clamp_(min=UNDERFLOW).add_(entropy[:, None]).mul_(at_entropy[:, None])
            x.add_(at_logprob[:, None]).mul_(e).neg_()
        else:
            x = e.mul_(-at_logprob[:, None])
        # not scatter_add_, which raises under run.deterministic on CUDA; each row has one target
        target = column.clamp(min=0)[:, None]
        x.scatter_(1, target, x.gather(1, target) + (at_logprob * (column >= 0))[:, None])
        return x if self.product is self.x else self.product[: x.shape[0]].copy_(x)


class TritonChunks(Chunks):
    """Computes statistics and gradients of chunks of logits by the Triton kernels of kernels.py.

    Chunks share one buffer of the hidden states' dtype.
    """

    def __init__(self, head: Head, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        # Triton may not be installed, and its decorators run at import.
        from megatron_rl.model.logprob import kernels as logprob_kernels

        logprob_kernels.check_device(hidden.device)
        self.kernels, self.head = logprob_kernels, head
        self.hidden, self.weight = hidden, weight[: head.num_valid]
        self.product = head.buffer(hidden, hidden.dtype)
        self.numbers = dict(temperature=head.temperature, underflow=UNDERFLOW)

    def logits(self, rows: slice) -> torch.Tensor:
        hidden = self.hidden[rows]
        return torch.mm(hidden, self.weight.t(), out=self.product[: hidden.shape[0]])

    def statistics(self, rows: slice, column: torch.Tensor, peak: torch.Tensor, stats: torch.Tensor) -> None:
        """Fill ``peak`` [r] and ``stats`` [3, r] with the softmax statistics of a chunk's r rows.

        With x = logits / temperature, ``peak`` is a row's maximum m of x, and ``stats`` is Σ e^{x−m},
        Σ (x−m) e^{x−m} and the target's x.

        rows: the chunk's rows of the hidden states.
        column: int64 [r], the target's column; −1 if another tensor rank has it. Then the third sum
            is 0.
        """
        self.kernels.statistics(self.logits(rows), column, peak, stats, **self.numbers)

    def gradient(
        self,
        rows: slice,
        column: torch.Tensor,
        log_z: torch.Tensor,
        entropy: torch.Tensor,
        at_logprob: torch.Tensor,
        at_entropy: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss's gradient [r, columns] with respect to the logits of one chunk's r rows.

        It is in the hidden states' dtype, in a buffer that the next chunk overwrites.

        rows: the chunk's rows of the hidden states.
        column: int64 [r], the target's column; −1 if another tensor rank has it.
        log_z: [r], log Σ e^x over the whole vocabulary, with x = logits / temperature.
        entropy: [r], each row's entropy in nats.
        at_logprob, at_entropy: [r], ∂loss/∂log-prob and ∂loss/∂entropy of each row, divided by the
            temperature.
        """
        logits = self.logits(rows)
        trained = at_entropy if self.head.train_entropy else None
        self.kernels.turn_into_gradient(logits, column, log_z, entropy, at_logprob, trained, **self.numbers)
        return logits
