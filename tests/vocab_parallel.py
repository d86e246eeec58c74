"""Log-probs and entropies over whole vocabulary-parallel logits: the reference of model/logprob/linear.py's chunks."""

import torch
import torch.distributed as dist

from megatron_rl.model.logprob.chunks import UNDERFLOW, own_columns

CHUNK_TOKENS = 1024  # of vocab_parallel_logprob


class _VocabParallelLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature, vocab_start, num_valid, group, train_entropy):
        parallel = group is not None and dist.get_world_size(group) > 1
        tokens = logits.shape[0]
        stats = logits.new_empty((3, tokens), dtype=torch.float32)  # Σ e^{x−m}, Σ (x−m) e^{x−m}, x_target
        peak = torch.cat([_scaled(chunk, temperature, num_valid).amax(-1) for chunk in logits.split(CHUNK_TOKENS)])
        if parallel:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        local = targets - vocab_start
        mine = (local >= 0) & (local < num_valid)
        column = torch.where(mine, local, 0)
        # This rank's statistics relative to the maximum, chunk by chunk; then the sums over tensor ranks.
        for start in range(0, tokens, CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            x = _scaled(logits[rows], temperature, num_valid)
            weight = (x - peak[rows, None]).exp_()
            stats[0, rows] = weight.sum(-1)
            stats[2, rows] = x.gather(1, column[rows, None])[:, 0] * mine[rows]
            # shifted by the maximum, or the two halves of the entropy cancel
            stats[1, rows] = weight.mul_(x.sub_(peak[rows, None]).clamp_(min=UNDERFLOW)).sum(-1)
        if parallel:
            dist.all_reduce(stats, group=group)
        log_z = peak + stats[0].log()
        logprobs = stats[2] - log_z
        entropy = stats[0].log() - stats[1] / stats[0]
        ctx.save_for_backward(logits, column, mine, log_z, entropy)
        ctx.temperature, ctx.num_valid, ctx.train_entropy = temperature, num_valid, train_entropy
        if not train_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        logits, column, mine, log_z, entropy = ctx.saved_tensors
        gradient = torch.zeros_like(logits)
        for start in range(0, logits.shape[0], CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            log_p = (_scaled(logits[rows], ctx.temperature, ctx.num_valid) - log_z[rows, None]).clamp_(min=UNDERFLOW)
            p = log_p.exp()
            g = p * -grad_logprobs[rows, None]
            g.scatter_add_(1, column[rows, None], (grad_logprobs[rows] * mine[rows])[:, None])
            if ctx.train_entropy:
                g -= p * (log_p + entropy[rows, None]) * grad_entropy[rows, None]
            gradient[rows, : ctx.num_valid] = (g / ctx.temperature).to(logits.dtype)
        return gradient, None, None, None, None, None, None


def _scaled(logits: torch.Tensor, temperature: float, num_valid: int) -> torch.Tensor:
    """Return float32 logits over the temperature, without the columns that only pad the vocabulary."""
    return logits[:, :num_valid].float() / temperature


def vocab_parallel_logprob(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int,
    tensor_rank: int = 0,
    group: dist.ProcessGroup | None = None,
    train_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability [T] of each target, a global id, and each row's entropy [T], in nats, in float32.

    logits: [T, V/TP], this rank's columns; those past ``vocab_size`` pad. train_entropy: whether that has a gradient.
    """
    start, num_valid = own_columns(logits.shape[1], tensor_rank, vocab_size)
    return _VocabParallelLogProb.apply(logits, targets, temperature, start, num_valid, group, train_entropy)
