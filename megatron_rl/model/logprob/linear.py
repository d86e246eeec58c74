"""Log-probs and entropies over a vocabulary-parallel output: each tensor rank computes only its part of the logits.

With x = logits / temperature, Z = Σ_v e^{x_v} over all tensor ranks: logprob_t = x_{t, target} − log Z_t and
H_t = log Z_t − Σ_v p_v x_v. Gradients: ∂logprob/∂x_v = 1[v = target] − p_v, ∂H/∂x_v = −p_v (log p_v + H).
Forward runs two all-reduces over tensor ranks: the maximum per token, then three sums per token. All numbers per token
are float32.

``linear_logprob`` takes the output layer's input and computes the logits chunk by chunk, in forward and again in
backward. So it needs O(chunk · V/TP) memory, and four matrix products in place of three. Torch's operations or Triton
kernels compute on the logits (chunks.py). Tests compare the results with tests/vocab_parallel.py, which computes whole
logits.
"""

from __future__ import annotations

from typing import assert_never

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_rl.model.logprob.chunks import (
    AskedKernel,
    Head,
    TorchChunks,
    TritonChunks,
    default_chunk_tokens,
    own_columns,
    settled_kernel,
)


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, head: Head):
        # This rank's statistics, then the statistics over all tensor ranks.
        chunks = _chunks(hidden, weight, head, backward=False)
        peak, stats = _own_statistics(chunks, targets)
        if head.group is not None and hidden.shape[0]:
            peak, stats = chunks.combined(peak, stats)
        log_sum = chunks.log(stats[0])
        log_z = peak + log_sum
        logprobs = stats[2] - log_z
        entropy = log_sum - stats[1] / stats[0]
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.head = head
        # kept beside save_for_backward: saved_tensors_hooks give back another tensor, without main_grad
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
        chunks = _chunks(hidden, weight, head, backward=True)
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


def _chunks(hidden: torch.Tensor, weight: torch.Tensor, head: Head, *, backward: bool) -> TorchChunks | TritonChunks:
    """Return the ``Chunks`` object of ``head.kernel``, with its buffers, for one forward or one backward pass."""
    match head.kernel:
        case "torch":
            return TorchChunks(head, hidden, weight, backward=backward)
        case "triton":
            return TritonChunks(head, hidden, weight)
        case "invariant":
            from megatron_rl.model.logprob.row_invariant import InvariantChunks

            return InvariantChunks(head, hidden, weight, backward=backward)
        case _:
            assert_never(head.kernel)


def _own_statistics(chunks: TorchChunks | TritonChunks, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's maximum m [N] of each row of x = logits / temperature, and three sums over the row, [3, N].

    The sums are Σ e^{x−m}, Σ (x−m) e^{x−m} and x_target, which is 0 if another rank has the target.
    """
    head, hidden = chunks.head, chunks.hidden
    precise = torch.promote_types(hidden.dtype, torch.float32)
    tokens = hidden.shape[0]
    column = head.own(targets)
    peak = hidden.new_empty(tokens, dtype=precise)
    stats = hidden.new_empty((3, tokens), dtype=precise)
    for rows in head.slices(tokens):
        chunks.statistics(rows, column[rows], peak[rows], stats[:, rows])
    return peak, stats


def _weight_sum(weight: torch.Tensor, precise: torch.dtype, parameter: torch.nn.Parameter | None) -> torch.Tensor:
    """Return the tensor [V/TP, H] to which each chunk adds its contribution to the weight's gradient.

    It is ``parameter.main_grad`` if that has the dtype ``precise``, else zeros in ``precise``. A narrower main_grad
    would round the sum after every chunk.

    parameter: the weight if its main_grad takes the gradient (``into_main_grad``), else None.
    """
    if parameter is not None and parameter.main_grad.dtype == precise:
        return parameter.main_grad
    return torch.zeros_like(weight, dtype=precise)


def _weight_gradient(
    weight: torch.Tensor, weight_sum: torch.Tensor, parameter: torch.nn.Parameter | None
) -> torch.Tensor | None:
    """Return what autograd gets as the weight's gradient: ``weight_sum``, unless ``weight_sum`` is main_grad itself.

    Then it is a placeholder, or None for tied embeddings on a single stage.

    weight_sum: the weight's gradient, summed over all chunks in the tensor that ``_weight_sum`` returned.
    parameter: the weight if its main_grad takes the gradient (``into_main_grad``), else None.

    DistributedDataParallel's hook (megatron-core 0.16.1 and 0.19.2 distributed/distributed_data_parallel.py
    ``_make_backward_post_hook``) adds autograd's gradient to main_grad unless ``grad_added_to_main_grad`` is set. Under
    overlap_grad_reduce the hook asserts that there is a gradient. The placeholder is an uninitialised tensor, which the
    hook does not read, as in LinearWithGradAccumulationAndAsyncCommunication (tensor_parallel/layers.py).

    On a single stage with tied embeddings the weight has ``zero_out_wgrad``, and the hook always adds autograd's
    gradient. Autograd must then pass the embedding's part alone, so None is returned.
    """
    if parameter is None or weight_sum is not parameter.main_grad:
        return weight_sum.to(weight.dtype)
    if hasattr(parameter, "zero_out_wgrad") and parameter.zero_out_wgrad:
        return None
    parameter.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def add_product(total: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add gradientᵀ · hidden to ``total`` [V, H]; gradient [N, V] and hidden [N, H] have one dtype.

    On a GPU one kernel adds the product to a float32 total without rounding it. On the CPU a bfloat16 product is
    rounded first.
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

    hidden:     [N, H], the same on all tensor ranks. Outputs are float64 if it is float64, else float32.
    weight:     [V/TP, H], this tensor rank's rows of the padded vocabulary, in hidden's dtype. Its gradient is added up
                over the chunks in float32 and cast at the end.
    targets:    int64 [N], global token ids below ``vocab_size``.
    vocab_size: the size without pads; ``weight``'s rows beyond it take no probability and get a gradient of exactly 0.
    group:      the process group of the tensor ranks; None for one rank.
    train_entropy: whether the entropy carries gradient.
    reduce_hidden_grad: whether backward sums hidden's gradient over ``group``, as ColumnParallelLinear's
                ``allreduce_dgrad`` does (megatron-core 0.16.1 tensor_parallel/layers.py). Pass False if the gather of a
                sequence-parallel hidden sums the gradient in its own backward.
    into_main_grad: whether backward adds the weight's gradient to ``weight.main_grad``, the float32 buffer of
                Megatron-Core's DistributedDataParallel (DDP). Autograd then gets an uninitialised tensor, which DDP's
                hook ignores. The hook may add a tied embedding's own gradient to main_grad. If main_grad is not
                float32, backward leaves it as it is, and autograd gets the gradient.
    chunk_tokens: rows of logits that exist at a time; None takes ``default_chunk_tokens``. The chunk's buffers are
                [chunk_tokens, V/TP]: two in float32, and one in hidden's dtype if that is narrower. With the Triton
                kernels there is one buffer, in hidden's dtype.
    kernel:     the kernel that computes on the logits (chunks.py).

    Raises ValueError for chunk_tokens < 1, a rank with only pads, a missing main_grad, a kernel that cannot run here.
    Collectives, for any number of chunks: two in forward, one in backward (``reduce_hidden_grad``); none if N = 0.
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
