"""The predicted time of micro-batches on a pipeline, with coefficients fitted to measurements. Pure numpy.

A micro-batch of T tokens in sequences of lengths l takes on one stage, forward and backward,

    t = overhead + token · T + square · Σ l²

A layer with a sliding window has a smaller term in place of l² (``window_squares`` of planning/tokens.py).

A data-parallel rank's micro-batches take t_1 … t_m on the slowest stage of its pipeline. While the
pipeline fills and drains, each other stage s adds the time of its longest micro-batch once, divided
by the number v of interleaved chunks:

    seconds of the rank = Σ_i t_i + Σ_{s ≠ slowest} max_i(t_i on s) / v

For equal micro-batches on p equal stages this is the time of 1F1B, m + p − 1 times t_1 if v = 1
(Narayanan et al., arXiv:2104.04473, §2.2). For unequal micro-batches on equal stages it is the
makespan of a proportionate flow shop: each job (micro-batch) takes equally long on every machine
(stage).

Invariants (tests/unit/planning/test_cost.py):

1. Coefficients are never negative, whatever was measured. Before any measurement they are those of
   ``prior``.
2. More tokens, longer sequences or one more micro-batch never predict less time on a stage.
3. For micro-batches that are equal, except for one that holds the longest sample, ``best_count`` is
   the number with the least predicted time (compared with brute force).
4. Equal measurements give equal coefficients, so every rank derives the same plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.planning.tokens import SampleTokens
from megatron_rl.types import StepPlan

MOST_MICROBATCHES = 4096  # the most that ``best_count`` returns; a token cap may ask for more


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Holds the costs of one pipeline stage, forward plus backward, in seconds or another common unit.

    overhead: the fixed cost of a micro-batch.
    token: the cost of a token.
    square: the cost of attention for each unit of Σ l², over the lengths l of the sequences.
    """

    overhead: float
    token: float
    square: float

    def __post_init__(self) -> None:
        if min(self.overhead, self.token, self.square) < 0 or self.token + self.square <= 0:
            raise ValueError(f"{self} must have no negative coefficient, and tokens must cost something")

    def seconds(self, tokens: np.ndarray, squares: np.ndarray) -> np.ndarray:
        """Return [M]: the time of each of M micro-batches on this stage.

        tokens: [M], the number of tokens of each micro-batch.
        squares: [M], Σ l² over the lengths l of each micro-batch's sequences.
        """
        return self.overhead + self.token * tokens + self.square * squares


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Holds the costs of each pipeline rank's stage, first to last, and predicts the time of a rank's micro-batches.

    virtual: the number of chunks that each pipeline rank interleaves.

    Example: two stages, both of overhead 256, token 1 and square 0. Micro-batches of 1000 and 500
    tokens take 1256 + 756 on one stage. While the pipeline fills and drains, the other stage adds
    the longer time, 1256, once: 3268 in all.
    """

    stages: tuple[StageCost, ...]
    virtual: int = 1

    def sample_costs(self, tokens: SampleTokens) -> tuple[np.ndarray, np.ndarray]:
        """Return (own, prompt), float64 [S] each: the costs of each sample's own tokens, and of its shared prompt.

        The costs are those on one pipeline stage: the one that takes longest for all samples together.
        """
        slowest = self._slowest(*tokens.total(np.arange(len(tokens.own))), 0)
        own_squares, prompt_squares = tokens.squares()
        return (
            slowest.token * tokens.own + slowest.square * own_squares,
            slowest.token * tokens.prompt + slowest.square * prompt_squares,
        )

    def best_count(self, tokens: float, squares: float, longest: float = 0.0, most: int = MOST_MICROBATCHES) -> int:
        """Return the number of micro-batches, at most ``most``, with the least predicted time for a rank's samples.

        Without a pipeline the number is 1. On p equal stages of v chunks it is about
        √((p − 1) · w / (v · o)), with w the cost of all samples and o the fixed cost of a micro-batch:
        more micro-batches shrink the bubble and add fixed costs.

        tokens: the number of tokens of all the rank's samples together.
        squares: Σ l² over the samples' lengths l; the square of a shared prompt's length counts once.
        longest: the number of tokens of the longest sample, since a sample cannot be split.
        """
        if tokens <= 0 or len(self.stages) == 1:
            return 1
        return (
            int(
                self.count_seconds(
                    np.arange(1, min(int(tokens), most, MOST_MICROBATCHES) + 1), tokens, squares, longest
                ).argmin()
            )
            + 1
        )

    def count_seconds(self, counts: np.ndarray, tokens: float, squares: float, longest: float = 0.0) -> np.ndarray:
        """Return [C]: a rank's predicted seconds for each number of micro-batches in ``counts`` [C].

        The rank's work is divided equally, except that one micro-batch holds at least the longest
        sample.

        tokens, squares, longest: see ``best_count``.
        """
        overheads = np.array([s.overhead for s in self.stages])[:, None]
        work = np.array([s.token * tokens + s.square * squares for s in self.stages])[:, None]
        least = np.array([s.token * longest + s.square * longest**2 for s in self.stages])[:, None]
        equal, longer = overheads + work / counts, overheads + np.maximum(work / counts, least)
        slowest = equal.argmax(0)
        return equal.max(0) * counts + (longer.sum(0) - longer[slowest, np.arange(len(counts))]) / self.virtual

    def rank_seconds(self, tokens: np.ndarray, squares: np.ndarray) -> float:
        """Return the seconds that a data-parallel rank's pipeline takes for M micro-batches; 0.0 if M is 0.

        tokens: [M], the number of tokens of each micro-batch.
        squares: [M], Σ l² over the lengths l of each micro-batch's sequences.
        """
        if len(tokens) == 0:
            return 0.0
        stage_seconds = np.array([s.seconds(tokens, squares) for s in self.stages])
        totals, longest = stage_seconds.sum(1), stage_seconds.max(1)
        slowest = int(totals.argmax())
        return float(totals[slowest] + (longest.sum() - longest[slowest]) / self.virtual)

    def _slowest(self, tokens: float, squares: float, count: int) -> StageCost:
        return max(self.stages, key=lambda s: s.overhead * count + s.token * tokens + s.square * squares)


def plan_seconds(model: CostModel, mini_batch: StepPlan, padded: SampleTokens) -> float:
    """Return the predicted seconds of a mini-batch, forward plus backward, on the slowest data-parallel rank.

    padded: the number of tokens of each sample, pads included.
    """
    if len(mini_batch.order) == 0:
        return 0.0
    tokens, squares = padded.sums(mini_batch.order, mini_batch.microbatch_offsets)
    bounds = mini_batch.rank_offsets
    return max(model.rank_seconds(tokens[a:b], squares[a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True))


LEAST_LAYERS = 0.01  # cost, in layers, of a stage that holds the embedding alone: a lookup costs next to nothing


def prior(
    rank_shares: Sequence[tuple[float, float, float]],
    *,
    virtual: int,
    overhead_tokens: float,
    square_share: float,
    head_layers: float,
) -> CostModel:
    """Return the cost model that planning assumes before any micro-batch is measured.

    The unit is the cost of one token on an average stage, without the LM head.

    rank_shares: for each pipeline rank, the cost of its layers, with an average layer as the unit,
        the number of its layers, and the number of those with attention (ModelShape.rank_shares).
    virtual: the number of chunks that each pipeline rank interleaves.
    overhead_tokens: the fixed cost of a micro-batch on an average stage, in this unit.
    square_share: in a layer with attention, attention over a sequence of l tokens costs square_share · l², with a
        token's other cost as the unit (ModelShape.square_share).
    head_layers: the LM head's cost in layers, which the last stage carries.
    """
    per_stage = sum(count for _, count, _ in rank_shares) / len(rank_shares)
    stages = []
    for rank, (share, count, with_attention) in enumerate(rank_shares):
        head = head_layers if rank == len(rank_shares) - 1 else 0.0
        stages.append(
            StageCost(
                overhead=overhead_tokens * max(count, 1.0) / per_stage,
                token=max(share + head, LEAST_LAYERS) / per_stage,
                square=square_share * with_attention / per_stage,
            )
        )
    return CostModel(stages=tuple(stages), virtual=virtual)


NUM_SUMS = 11  # columns of CostFit.sums


@dataclass(slots=True)
class CostFit:
    """Fits each stage's costs to measured micro-batches by least squares; older steps weigh less.

    Let X have a row (1, T, Σ l²) for each micro-batch, with T its tokens and l the lengths of its
    sequences. Let y be its forward seconds. ``sums`` has one row of NUM_SUMS numbers for each stage:
    Xᵀ X (upper triangle, 6), Xᵀ y (3), the total of the forward seconds and that of the backward
    seconds. Rows of different ranks and steps can be added. So ranks exchange nothing but ``sums``, by
    one all-reduce.

    prior: the costs that are used until every stage has been measured.
    forget: the factor on the earlier sums at each measured step.
    """

    prior: CostModel
    forget: float = 0.98
    sums: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.sums = np.zeros((len(self.prior.stages), NUM_SUMS))

    @property
    def is_fitted(self) -> bool:
        """Return whether every stage has been measured."""
        return bool((self.sums[:, 0] > 0).all())

    def add(self, step: np.ndarray) -> None:
        """Multiply the earlier sums by ``forget``, and add one step's sums over all ranks.

        step: float64 [stages, NUM_SUMS]. If all are 0, as in a step without micro-batches, nothing
            changes.
        """
        if step.shape != self.sums.shape:
            raise ValueError(
                f"a step's sums have shape {step.shape} and {self.sums.shape} are needed: one row per pipeline stage"
            )
        if step.any():  # a ghost step has no measurement, and earlier sums keep their weight
            self.sums = self.forget * self.sums + step

    def model(self) -> CostModel:
        """Return the fitted costs, in seconds, if every stage has been measured, else the prior."""
        if not self.is_fitted:
            return self.prior
        stages = tuple(self._stage(row, shape) for row, shape in zip(self.sums, self.prior.stages, strict=True))
        return CostModel(stages=stages, virtual=self.prior.virtual)

    def _stage(self, row: np.ndarray, shape: StageCost) -> StageCost:
        """Return one stage's costs by ridge regression towards the prior.

        The prior weighs as much as one measured micro-batch of average size. The ratio of fixed cost to
        token cost is never below the prior's.

        row: [NUM_SUMS], the stage's row of ``sums``.
        shape: the stage's costs in the prior.
        """
        # Forward: a ridge towards the prior, scaled to the measured seconds. Backward: in proportion.
        gram, moment = _unpack(row)
        count = gram[0, 0]
        direction = np.array([shape.overhead, shape.token, shape.square])
        scale = float(moment[0] / max(direction @ gram[0], 1e-300))  # gives the prior the measured seconds in total
        ridge = np.diag(np.diag(gram) / count)
        forward = _nonnegative(gram + ridge, moment + ridge @ (direction * scale))
        both = 1.0 + row[10] / max(row[9], 1e-300)
        overhead, token, square = (float(x) for x in forward * both)
        if token + square > 0:
            # The measured seconds leave out the schedule's own time and the transfers between
            # stages. So the measured fixed cost is a lower bound, and the prior's is another.
            unseen = shape.overhead / shape.token * token if shape.token else 0.0
            return StageCost(overhead=max(overhead, unseen), token=token, square=square)
        # The fit has no cost by token: take the prior's proportions, in the measured unit.
        unit = max(scale * both, 1e-300)
        return StageCost(overhead=shape.overhead * unit, token=shape.token * unit, square=shape.square * unit)


def measured(tokens: np.ndarray, squares: np.ndarray, forward_s: np.ndarray, backward_s: float) -> np.ndarray:
    """Return float64 [NUM_SUMS], the sums over a rank's M micro-batches of a step to which ``CostFit`` fits a stage.

    They have the order of a row of ``CostFit.sums``.

    tokens, forward_s: [M], the number of tokens and the forward seconds of each micro-batch.
    squares: [M], Σ l² over the lengths l of each micro-batch's sequences.
    backward_s: the backward seconds of all micro-batches together.
    """
    features = np.stack([np.ones(len(tokens)), tokens, squares]).astype(np.float64)
    gram = features @ features.T
    return np.concatenate([gram[np.triu_indices(3)], features @ forward_s, [forward_s.sum(), backward_s]])


def _unpack(row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    gram = np.zeros((3, 3))
    gram[np.triu_indices(3)] = row[:6]
    return gram + np.triu(gram, 1).T, row[6:9]


def _nonnegative(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Return the x ≥ 0, float64 [3], that minimises xᵀ gram x − 2 momentᵀ x, by trying every set of zeros in x."""
    best, least = np.zeros(3), np.inf
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    for size in (3, 2, 1):
        for kept in itertools.combinations(range(3), size):
            index = list(kept)
            scaled = gram[np.ix_(index, index)] / np.outer(scale[index], scale[index])
            solution = np.linalg.lstsq(scaled, moment[index] / scale[index], rcond=1e-12)[0] / scale[index]
            if (solution < 0).any():
                continue
            candidate = np.zeros(3)
            candidate[index] = solution
            value = float(candidate @ gram @ candidate - 2 * moment @ candidate)
            if value < least:
                best, least = candidate, value
    return best
