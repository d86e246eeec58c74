"""Log-probs and entropies over a vocabulary-parallel output; no rank ever holds a full row of the vocabulary.

With x = logits / temperature, Z = Σ_v e^{x_v} over all tensor ranks: logprob_t = x_{t, target} − log Z_t and
H_t = log Z_t − Σ_v p_v x_v. Gradients: ∂logprob/∂x_v = 1[v = target] − p_v, ∂H/∂x_v = −p_v (log p_v + H).
Two all-reduces of floats per token (the maximum, then three sums); float32 throughout.

``linear_logprob`` takes the output layer's input and makes the logits chunk by chunk, in forward and again in
backward: extra memory O(chunk · V/TP) for one more matrix product, four instead of three. tests/vocab_parallel.py
has the same over whole logits, which it is held against. Between the products torch's operations work on the logits,
or Triton kernels (logit_chunks.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_rl.model.invariant import BLOCK_ROWS, elementwise, matmul, padded
from megatron_rl.model.logit_chunks import (
    AskedKernel,
    Head,
    block_statistics,
    default_chunk_tokens,
    settled_kernel,
)


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


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, head: Head):
        # This rank's statistics, then those of all tensor ranks.
        if head.kernel == "invariant":
            peak, stats = _combine_in_order(_by_rank(hidden, weight, targets, head))
        else:
            peak, stats = _own_statistics(hidden, weight, targets, head)
            if head.group is not None and hidden.shape[0]:
                _combine(peak, stats, head.group)
        log_sum = head.log(stats[0])
        log_z = peak + log_sum
        logprobs = stats[2] - log_z
        entropy = log_sum - stats[1] / stats[0]
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.head = head
        # itself: what saved_tensors_hooks give back is another tensor, without main_grad
        ctx.parameter = weight if head.into_main_grad and weight.requires_grad else None
        if not head.train_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable  # the chunks are written in place: no second derivative
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        head, (needs_hidden, needs_weight) = ctx.head, ctx.needs_input_grad[:2]
        column = head.own(targets)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        weight_sum = _weight_sum(weight, log_z.dtype, ctx.parameter) if needs_weight else None
        true_weight = weight[: head.num_valid]
        at_logprob, at_entropy = grad_logprobs / head.temperature, grad_entropy / head.temperature
        # The gradient of each chunk's logits, and its products with the weight and with the hidden states.
        chunks = head.chunks(hidden, weight, backward=True)
        for rows in head.slices(hidden.shape[0]):
            gradient = chunks.gradient(
                rows, column[rows], log_z[rows], entropy[rows], at_logprob[rows], at_entropy[rows]
            )
            if needs_hidden:
                torch.mm(gradient, true_weight, out=grad_hidden[rows])
            if needs_weight:
                add_product(weight_sum[: head.num_valid], gradient, hidden[rows])
        if needs_hidden and head.reduce_hidden_grad and head.group is not None and hidden.shape[0]:
            dist.all_reduce(grad_hidden, group=head.group)
        grad_weight = _weight_gradient(weight, weight_sum, ctx.parameter) if needs_weight else None
        return grad_hidden, grad_weight, None, None


def _own_statistics(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's maximum m [N], and [3, N]: Σ e^{x−m}, Σ (x−m) e^{x−m} and x_target; chunk by chunk."""
    precise = torch.promote_types(hidden.dtype, torch.float32)
    tokens = hidden.shape[0]
    column = head.own(targets)
    peak = hidden.new_empty(tokens, dtype=precise)
    stats = hidden.new_empty((3, tokens), dtype=precise)
    chunks = head.chunks(hidden, weight, backward=False)
    for rows in head.slices(tokens):
        chunks.statistics(rows, column[rows], peak[rows], stats[:, rows])
    return peak, stats


def _by_rank(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the statistics of every tensor rank, in their order."""
    peak, stats = _own_statistics(hidden, weight, targets, head)
    if head.group is None or not hidden.shape[0]:
        return [(peak, stats)]
    own = torch.cat([peak[None], stats])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(head.group))]
    dist.all_gather(gathered, own, group=head.group)
    return [(x[0], x[1:]) for x in gathered]


def _combine_in_order(ranks: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as ``_combine`` does, row-invariantly: add up the ranks' statistics in their order."""
    if len(ranks) == 1:
        return ranks[0]
    peak = torch.stack([own for own, _ in ranks]).amax(0)
    total = torch.zeros_like(ranks[0][1])
    for own, stats in ranks:
        shift = own - peak
        factor = elementwise(torch.exp, shift)
        total += torch.stack([stats[0] * factor, (stats[1] + shift * stats[0]) * factor, stats[2]])
    return peak, total


def _weight_sum(weight: torch.Tensor, precise: torch.dtype, parameter: torch.nn.Parameter | None) -> torch.Tensor:
    """Return memory [V/TP, H] to add up the chunks' products in: ``parameter.main_grad``, or zeros in ``precise``.

    A main_grad narrower than ``precise`` is not taken: it would round every chunk's sum.
    """
    if parameter is not None and parameter.main_grad.dtype == precise:
        return parameter.main_grad
    return torch.zeros_like(weight, dtype=precise)


def _weight_gradient(
    weight: torch.Tensor, weight_sum: torch.Tensor, parameter: torch.nn.Parameter | None
) -> torch.Tensor | None:
    """Return what autograd gets as the weight's gradient: its sum, or a stand-in where main_grad has it already.

    DistributedDataParallel's hook (megatron-core 0.16.1 and 0.19.2 distributed/distributed_data_parallel.py
    ``_make_backward_post_hook``) adds a gradient to main_grad unless ``grad_added_to_main_grad``, and under
    overlap_grad_reduce asserts that there is one: hence memory of any content, as
    LinearWithGradAccumulationAndAsyncCommunication (tensor_parallel/layers.py) returns. ``zero_out_wgrad`` marks the
    output weight of a single stage that is the embedding too. For it the hook adds whatever autograd has, so that
    autograd gets the embedding's gradient alone.
    """
    if parameter is None or weight_sum is not parameter.main_grad:
        return weight_sum.to(weight.dtype)
    if hasattr(parameter, "zero_out_wgrad") and parameter.zero_out_wgrad:
        return None
    parameter.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def _combine(peak: torch.Tensor, stats: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Turn statistics relative to this rank's maximum, in place, into those of all ranks relative to the greatest."""
    own_peak = peak.clone()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    shift = own_peak - peak
    # Σ (x−m') e^{x−m'} = e^{m−m'} (Σ (x−m) e^{x−m} + (m−m') Σ e^{x−m})
    stats[1] += shift * stats[0]
    stats[:2] *= shift.exp()
    dist.all_reduce(stats, group=group)


def add_product(total: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add gradientᵀ hidden to ``total`` [V, H]; gradient: [N, V], hidden: [N, H], of one dtype.

    On a GPU the product goes into a float32 total unrounded, in one kernel. On the CPU a product of bfloat16 is rounded
    first.
    """
    if total.dtype == hidden.dtype:
        total.addmm_(gradient.t(), hidden)
    elif total.is_cuda:
        torch.addmm(total, gradient.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        total.add_(gradient.t() @ hidden)


def _check_main_grad(weight: torch.Tensor) -> None:
    if weight.requires_grad and torch.is_grad_enabled() and not hasattr(weight, "main_grad"):
        raise ValueError(
            "into_main_grad=True needs a weight with main_grad, which Megatron-Core's DistributedDataParallel gives to "
            "the parameters that it wraps; pass into_main_grad=False"
        )


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
    into_main_grad: bool = False,
    chunk_tokens: int | None = None,
    kernel: AskedKernel = "torch",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each target's log-probability and each row's entropy, [N] in nats, from the output layer's input.

    hidden:     [N, H], equal on all tensor ranks; gathered already. Outputs are float32, or float64 for a float64 one.
    weight:     [V/TP, H], this tensor rank's rows of the padded vocabulary, in hidden's dtype. Its gradient is added up
                over the chunks in float32 and cast at the end.
    targets:    int64 [N], global token ids below ``vocab_size``.
    vocab_size: true size; rows of ``weight`` past it are pads, take no probability and get a gradient of exactly zero.
    train_entropy: whether the entropy carries gradient.
    reduce_hidden_grad: whether backward sums hidden's gradient over ``group``, as ColumnParallelLinear's
                ``allreduce_dgrad`` does (megatron-core 0.16.1 tensor_parallel/layers.py). False where the caller's
                gather of a sequence-parallel hidden sums it by reduce-scatter.
    into_main_grad: whether backward adds the weight's gradient, not cast, to ``weight.main_grad``, the float32 buffer
                of Megatron-Core's DistributedDataParallel, whose hook alone may read the stand-in that autograd gets.
                Until ``zero_grad_buffer`` the weight may have no other use with a gradient than as a tied embedding.
                Without a float32 main_grad autograd gets it.
    chunk_tokens: rows of logits that exist at a time; None takes ``default_chunk_tokens``. Peak extra memory beside the
                gradients: by torch's operations two float32 [chunk_tokens, V/TP], and one more in hidden's dtype where
                that is not float32; by the Triton kernels one in hidden's.
    kernel:     what works on the logits.

    Raises ValueError for no tokens a chunk, a rank of pads alone, a missing main_grad, a kernel that cannot run here.
    Collectives: two in forward and, with ``reduce_hidden_grad``, one in backward, however many chunks; none at N = 0.
    """
    device, kernel = hidden.device.type, settled_kernel(kernel, hidden.device.type)
    if chunk_tokens is None:
        chunk_tokens = default_chunk_tokens(device, len(weight), kernel, hidden.element_size())
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1")
    if into_main_grad:
        _check_main_grad(weight)
    start, num_valid = own_columns(weight.shape[0], tensor_rank, vocab_size)
    head = Head(
        temperature=temperature,
        start=start,
        num_valid=num_valid,
        group=group if group is not None and dist.get_world_size(group) > 1 else None,
        train_entropy=train_entropy,
        reduce_hidden_grad=reduce_hidden_grad,
        into_main_grad=into_main_grad,
        chunk_tokens=chunk_tokens,
        kernel=kernel,
    )
    return _LinearLogProb.apply(hidden, weight, targets, head)


def rank_logits(hidden: torch.Tensor, weight: torch.Tensor, *, vocab_size: int, ranks: int) -> list[torch.Tensor]:
    """Return what so many tensor ranks have as logits, one after the other, by the kernel "invariant".

    hidden: [N, H]; weight: [≥ vocab_size, H], whole. Each [N, its share of the vocabulary], of the last ones less.
    """
    width = -(-vocab_size // ranks)
    columns = [own_columns(width, rank, vocab_size) for rank in range(ranks)]
    return [matmul(hidden, weight[start : start + count]) for start, count in columns]


def rank_logprob(ranks: Sequence[torch.Tensor], targets: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """Return each target's log-probability [N] from ``rank_logits``: to the bit, linear_logprob's on as many ranks."""
    found, start = [], 0
    for logits in ranks:
        tokens, width = logits.shape
        precise = torch.promote_types(logits.dtype, torch.float32)
        peak, stats = logits.new_empty(tokens, dtype=precise), logits.new_empty((3, tokens), dtype=precise)
        column = torch.where((targets >= start) & (targets < start + width), targets - start, -1)
        for first in range(0, tokens, BLOCK_ROWS):
            own = slice(first, first + BLOCK_ROWS)
            block_statistics(padded(logits[own]), temperature, column[own], peak[own], stats[:, own])
        found.append((peak, stats))
        start += width
    peak, stats = _combine_in_order(found)
    return stats[2] - (peak + elementwise(torch.log, stats[0]))
