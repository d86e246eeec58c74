"""Log-probs and entropies over a vocabulary-parallel output; no rank ever holds a full row of the vocabulary.

With x = logits / temperature, Z = Σ_v e^{x_v} over all tensor ranks: logprob_t = x_{t, target} − log Z_t and
H_t = log Z_t − Σ_v p_v x_v. Gradients: ∂logprob/∂x_v = 1[v = target] − p_v, ∂H/∂x_v = −p_v (log p_v + H).
Two all-reduces of floats per token (the maximum, then three sums); float32 throughout.

``linear_logprob`` takes the output layer's input and makes the logits chunk by chunk, in forward and again in
backward: extra memory O(chunk · V/TP) for one more matrix product, four instead of three. tests/vocab_parallel.py
has the same over whole logits, which it is held against.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

LINEAR_CHUNK_TOKENS = 512  # fewer spend more on adding up the weight's gradient, [V/TP, H] per chunk
UNDERFLOW = -1e4  # e^x is 0 from it down, in float64 too; finite, so that 0 · x is 0 for a masked logit (−inf) as well


def own_columns(width: int, tensor_rank: int, vocab_size: int) -> tuple[int, int]:
    """Return the first of this tensor rank's ``width`` padded columns, and the number of columns that are no pads."""
    start = tensor_rank * width
    num_valid = max(0, min(width, vocab_size - start))
    if num_valid == 0:
        raise ValueError(
            f"tensor rank {tensor_rank} holds columns from {start} on, all past vocab_size={vocab_size}; lower "
            "parallel.tensor"
        )
    return start, num_valid


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """Holds the settings, apart from tensors, that linear_logprob's forward and backward share."""

    temperature: float
    start: int  # this rank's first column
    num_valid: int  # its columns that are no pads
    group: dist.ProcessGroup | None  # None: this rank has the whole vocabulary
    train_entropy: bool
    reduce_hidden_grad: bool
    chunk_tokens: int

    def slices(self, tokens: int) -> list[slice]:
        return [slice(start, min(start + self.chunk_tokens, tokens)) for start in range(0, tokens, self.chunk_tokens)]

    def buffer(self, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return memory [chunk, num_valid] that every chunk reuses.

        Fresh memory costs the CPU a page fault per 4 KiB, as much as the exponential.
        """
        return hidden.new_empty((min(self.chunk_tokens, hidden.shape[0]), self.num_valid), dtype=dtype)

    def own(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [N] columns of the targets on this rank (0 for another rank's), and [N] True for this rank's own."""
        local = targets - self.start
        mine = (local >= 0) & (local < self.num_valid)
        return torch.where(mine, local, 0), mine

    def scaled_logits(
        self, hidden: torch.Tensor, weight: torch.Tensor, product: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """Return one chunk's logits over the temperature, in ``x``.

        The product is rounded to hidden's dtype, as the output layer's is.
        """
        logits = torch.mm(hidden, weight[: self.num_valid].t(), out=product[: hidden.shape[0]])
        x = logits if product is x else x[: hidden.shape[0]].copy_(logits)
        return x if self.temperature == 1.0 else x.div_(self.temperature)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, head: _Head):
        precise = torch.promote_types(hidden.dtype, torch.float32)
        tokens = hidden.shape[0]
        column, mine = head.own(targets)
        peak = hidden.new_empty(tokens, dtype=precise)
        # Σ e^{x−m}, Σ (x−m) e^{x−m}, x_target, with m this rank's maximum
        stats = hidden.new_empty((3, tokens), dtype=precise)
        x_buffer, e_buffer = head.buffer(hidden, precise), head.buffer(hidden, precise)
        product = x_buffer if hidden.dtype == precise else head.buffer(hidden, hidden.dtype)
        # This rank's statistics, chunk by chunk; then those of all tensor ranks.
        for rows in head.slices(tokens):
            x = head.scaled_logits(hidden[rows], weight, product, x_buffer)
            stats[2, rows] = x.gather(1, column[rows, None])[:, 0].masked_fill_(~mine[rows], 0)
            # not below the lowest float: −inf − (−inf) of a rank whose logits are all masked would be NaN
            peak[rows] = x.amax(-1).clamp_(min=torch.finfo(precise).min)
            x.sub_(peak[rows, None])
            e = torch.exp(x, out=e_buffer[: x.shape[0]])
            stats[0, rows] = e.sum(-1)
            stats[1, rows] = e.mul_(x.clamp_(min=UNDERFLOW)).sum(-1)
        if head.group is not None and tokens:
            _combine(peak, stats, head.group)
        log_sum = stats[0].log()
        log_z = peak + log_sum
        logprobs = stats[2] - log_z
        entropy = log_sum - stats[1] / stats[0]
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.head = head
        if not head.train_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable  # the chunks are written in place: no second derivative
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        head, (needs_hidden, needs_weight) = ctx.head, ctx.needs_input_grad[:2]
        precise = log_z.dtype
        column, mine = head.own(targets)
        x_buffer = head.buffer(hidden, precise)
        e_buffer = head.buffer(hidden, precise) if head.train_entropy else x_buffer
        product = x_buffer if hidden.dtype == precise else head.buffer(hidden, hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=precise) if needs_weight else None
        true_weight = weight[: head.num_valid]
        at_logprob, at_entropy = grad_logprobs / head.temperature, grad_entropy / head.temperature
        # The gradient of each chunk's logits, and its products with the weight and with the hidden states.
        for rows in head.slices(hidden.shape[0]):
            x = head.scaled_logits(hidden[rows], weight, product, x_buffer).sub_(log_z[rows, None])
            e = torch.exp(x, out=e_buffer[: x.shape[0]])
            if head.train_entropy:  # −p (a + b (log p + H))
                x.clamp_(min=UNDERFLOW).add_(entropy[rows, None]).mul_(at_entropy[rows, None])
                x.add_(at_logprob[rows, None]).mul_(e).neg_()
            else:
                x = e.mul_(-at_logprob[rows, None])
            x.scatter_add_(1, column[rows, None], (at_logprob[rows] * mine[rows])[:, None])
            gradient = x if product is x_buffer else product[: x.shape[0]].copy_(x)
            if needs_hidden:
                torch.mm(gradient, true_weight, out=grad_hidden[rows])
            if needs_weight:
                _add_product(grad_weight[: head.num_valid], gradient, hidden[rows])
        if needs_hidden and head.reduce_hidden_grad and head.group is not None and hidden.shape[0]:
            dist.all_reduce(grad_hidden, group=head.group)
        return grad_hidden, grad_weight.to(weight.dtype) if needs_weight else None, None, None


def _combine(peak: torch.Tensor, stats: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Turn statistics relative to this rank's maximum, in place, into those of all ranks relative to the greatest."""
    own_peak = peak.clone()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    shift = own_peak - peak
    # Σ (x−m') e^{x−m'} = e^{m−m'} (Σ (x−m) e^{x−m} + (m−m') Σ e^{x−m})
    stats[1] += shift * stats[0]
    stats[:2] *= shift.exp()
    dist.all_reduce(stats, group=group)


def _add_product(total: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add gradientᵀ hidden to ``total``. In bfloat16 each chunk's product is rounded, the sum over chunks is not."""
    if total.dtype == hidden.dtype:
        total.addmm_(gradient.t(), hidden)
    else:
        total.add_(gradient.t() @ hidden)


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int,
    tensor_rank: int = 0,
    group: dist.ProcessGroup | None = None,
    train_entropy: bool = False,
    reduce_hidden_grad: bool = True,
    chunk_tokens: int = LINEAR_CHUNK_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each target's log-probability and each row's entropy, [N] in nats, from hidden states and the head's
    weight.

    hidden:     [N, H], the output layer's input; under sequence parallelism already gathered. All N rows are the same
                on all tensor ranks. Outputs are float32, or float64 for a float64 ``hidden`` (then ``weight`` is
                float64 too).
    weight:     [V/TP, H], this tensor rank's rows of the padded vocabulary, in hidden's dtype. Its gradient is added up
                over the chunks in float32 and cast at the end.
    targets:    int64 [N], global token ids below ``vocab_size``.
    vocab_size: true size; rows of ``weight`` past it are pads, take no probability and get a gradient of exactly zero.
    train_entropy: whether the entropy carries gradient.
    reduce_hidden_grad: whether backward sums hidden's gradient over ``group``, as ColumnParallelLinear's
                ``allreduce_dgrad`` does (megatron-core 0.16.1 tensor_parallel/layers.py). False where the caller's
                gather of a sequence-parallel hidden sums it by reduce-scatter.
    chunk_tokens: tokens, the rows of logits that exist at a time. Peak extra memory is two float32 [chunk_tokens, V/TP]
                (and one more in hidden's dtype where that is not float32), beside the gradients themselves.

    Collectives: two in forward and, with ``reduce_hidden_grad``, one in backward, however many chunks; none at N = 0,
    where all tensor ranks, having the same N, skip them together.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1")
    start, num_valid = own_columns(weight.shape[0], tensor_rank, vocab_size)
    parallel = group is not None and dist.get_world_size(group) > 1
    head = _Head(
        temperature=temperature,
        start=start,
        num_valid=num_valid,
        group=group if parallel else None,
        train_entropy=train_entropy,
        reduce_hidden_grad=reduce_hidden_grad,
        chunk_tokens=chunk_tokens,
    )
    return _LinearLogProb.apply(hidden, weight, targets, head)
