"""Log-probs under ``rollout.bitwise``: a row has the same bits in any batch, in the trainer and in the engine.

A row is one token's logits. The trainer's kernel "invariant" computes on blocks of ``BLOCK_ROWS``
rows, on each tensor rank's columns. The rollout engine has the whole model. It calls ``rank_logits``
and ``rank_logprob``, which compute the same bits as the trainer's tensor ranks would. The operations
are from model/invariant/operations.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_rl.model.invariant.operations import BLOCK_ROWS, aligned, elementwise, matmul, padded
from megatron_rl.model.logprob.chunks import UNDERFLOW, TorchChunks, own_columns


class InvariantChunks(TorchChunks):
    """Computes on chunks of logits; the forward goes by blocks of rows, so that a row has the same bits in any batch.

    The gradient is computed on whole chunks, by the method of TorchChunks.
    """

    def statistics(self, rows: slice, column: torch.Tensor, peak: torch.Tensor, stats: torch.Tensor) -> None:
        """Fill ``peak`` [r] and ``stats`` [3, r] with the softmax statistics of a chunk's r rows.

        With x = logits / temperature, ``peak`` is a row's maximum m of x, and ``stats`` is Σ e^{x−m},
        Σ (x−m) e^{x−m} and the target's x. They are computed on blocks of ``BLOCK_ROWS`` rows.

        rows: the chunk's rows of the hidden states.
        column: int64 [r], the target's column; −1 if another tensor rank has it. Then the third sum
            is 0.
        """
        hidden, weight = aligned(self.hidden[rows]), aligned(self.weight).t()
        for start in range(0, len(hidden), BLOCK_ROWS):
            own = slice(start, min(start + BLOCK_ROWS, len(hidden)))
            block_statistics(padded(hidden[own]) @ weight, self.head.temperature, column[own], peak[own], stats[:, own])

    def combined(self, peak: torch.Tensor, stats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's maximum [N] and its sums [3, N] over all tensor ranks.

        The sums are those of ``block_statistics``; the ranks' parts are added up in the ranks' order.

        peak, stats: the maximum and the sums over this rank's columns.

        A collective.
        """
        own = torch.cat([peak[None], stats])
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self.head.group))]
        dist.all_gather(gathered, own, group=self.head.group)
        return combine_in_order([(x[0], x[1:]) for x in gathered])

    def log(self, x: torch.Tensor) -> torch.Tensor:
        return elementwise(torch.log, x)


def block_statistics(
    logits: torch.Tensor, temperature: float, column: torch.Tensor, peak: torch.Tensor, stats: torch.Tensor
) -> None:
    """Fill ``peak`` [r] and ``stats`` [3, r] with the softmax statistics of the first r rows of ``logits``.

    With x = logits / temperature, ``peak`` is a row's maximum m of x, and ``stats`` is Σ e^{x−m},
    Σ (x−m) e^{x−m} and the target's x. They have the same bits in any batch.

    logits: [BLOCK_ROWS, V].
    column: int64 [r], the target's column; −1 if another tensor rank has it. Then the third sum
        is 0.
    """
    x, count = logits.to(peak.dtype) / temperature, len(peak)
    stats[2] = x[:count].gather(1, column.clamp(min=0)[:, None])[:, 0].masked_fill_(column < 0, 0)
    highest = x.amax(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).min)
    x -= highest
    e = elementwise(torch.exp, x)
    peak[:], stats[0] = highest[:count, 0], e.sum(-1)[:count]
    stats[1] = e.mul_(x.clamp_(min=UNDERFLOW)).sum(-1)[:count]


def combine_in_order(ranks: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's maximum [N] and its sums [3, N] over all tensor ranks.

    The sums are those of ``block_statistics``; the ranks' parts are added up in the ranks' order.

    ranks: each rank's own maximum [N] and sums [3, N].
    """
    if len(ranks) == 1:
        return ranks[0]
    peak = torch.stack([own for own, _ in ranks]).amax(0)
    total = torch.zeros_like(ranks[0][1])
    for own, stats in ranks:
        shift = own - peak
        factor = elementwise(torch.exp, shift)
        total += torch.stack([stats[0] * factor, (stats[1] + shift * stats[0]) * factor, stats[2]])
    return peak, total


def rank_logits(hidden: torch.Tensor, weight: torch.Tensor, *, vocab_size: int, ranks: int) -> list[torch.Tensor]:
    """Return the logits that each of ``ranks`` tensor ranks would compute by the kernel "invariant".

    hidden: [N, H]. weight: [≥ vocab_size, H], whole. Each result is [N, the rank's columns]; the last
        ranks may have fewer.
    """
    width = -(-vocab_size // ranks)
    columns = [own_columns(width, rank, vocab_size) for rank in range(ranks)]
    return [matmul(hidden, weight[start : start + count]) for start, count in columns]


def rank_logprob(ranks: Sequence[torch.Tensor], targets: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """Return each target's log-probability [N] from the logits of all tensor ranks.

    Its bits equal the bits that ``linear_logprob`` computes on as many tensor ranks.

    ranks: each rank's logits, as ``rank_logits`` returns them.
    """
    statistics, start = [], 0
    for logits in ranks:
        tokens, width = logits.shape
        precise = torch.promote_types(logits.dtype, torch.float32)
        peak, stats = logits.new_empty(tokens, dtype=precise), logits.new_empty((3, tokens), dtype=precise)
        column = torch.where((targets >= start) & (targets < start + width), targets - start, -1)
        for first in range(0, tokens, BLOCK_ROWS):
            own = slice(first, first + BLOCK_ROWS)
            block_statistics(padded(logits[own]), temperature, column[own], peak[own], stats[:, own])
        statistics.append((peak, stats))
        start += width
    peak, stats = combine_in_order(statistics)
    return stats[2] - (peak + elementwise(torch.log, stats[0]))
