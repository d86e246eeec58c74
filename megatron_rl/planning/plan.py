"""Plans of optimizer steps: which samples are dropped, and on which rank and in which micro-batch each other one runs.

Pure numpy. Equal inputs give every rank the same plan. The **members** are a mini-batch's samples. A
member has **signal** if it may have a gradient. The **dense plan** is the plan with no sample
dropped. Under ``drops`` and ``repack``, members without signal are dropped and the others packed into
new micro-batches. Without ``repack``, the dense plan loses only whole micro-batches. A **block** is
``lockstep_ranks`` neighbouring ranks that share experts. A **filler** is a micro-batch without a loss,
which only makes up the number that invariant 9 asks of a rank. A **ghost step** is an optimizer step
on a zero gradient.

Invariants (``assert_invariants`` in tests/unit/planning/test_plan.py):

1. Every member is either dropped or runs exactly once; no other sample runs.
2. With ``drops``, only members without signal are dropped. Without ``drops``, no member is.
3. With ``repack`` and ``drops``, no member without signal runs.
4. A micro-batch holds one sample, or at most ``max_tokens`` tokens, the pads of ``row_multiple``
   included. If ``samples_per_microbatch`` is set, it holds at most so many samples.
5. No micro-batch is empty. A mini-batch's step is a ghost step if and only if none of its samples
   runs.
6. The plan, and its hash (fingerprint), depend on lengths, signal, members and rules alone.
7. Without ``repack``, the plan is the dense plan less whole micro-batches; those left keep their rank
   and their order. The micro-batches that a block's ranks would run at the same time either all
   run, or none does. They run if one of their samples has signal.
8. Under a token cap with ``repack``, data-parallel ranks differ in cost by at most the costliest sample.
9. All ranks of a block run equally many micro-batches: the block's largest number without fillers,
   rounded up to a multiple of ``microbatch_multiple``. A block without samples runs none.
10. A filler holds one sample: the shortest that runs, or without ``repack`` the shortest member.
    Fillers come last on their rank. Invariants 1, 3 and 7 do not count them. Under a token cap,
    unless samples are dropped without ``repack``, a rank takes fillers only if each of its other
    micro-batches holds one sample.
11. Under ``on_long_sample="fail"``, the members' lengths alone decide whether planning fails, not
    signal or ``drops``.
12. On a pipeline under a token cap, the costs of a rank's micro-batches rise and then fall, fillers
    left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_rl.config.optimizer import PlanConfig
from megatron_rl.errors import ConfigError
from megatron_rl.planning.cost import CostModel, StageCost, prior
from megatron_rl.planning.spread import SampleCosts, split_to, spread
from megatron_rl.planning.tokens import SampleTokens
from megatron_rl.types import BatchPlan, StepKind, StepPlan

FP8_ROWS = 16  # rows of a rank that FP8's products divide by (megatron-core 0.19.2, fp8_utils.get_fp8_align_size)
Cut = list[list[np.ndarray]]
"""For each data-parallel rank, a list of its micro-batches, each an int64 array of sample indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRules:
    """Holds the limits and costs by which a step is planned.

    data_size: the number of data-parallel ranks.
    cost: predicts the time of a micro-batch on each pipeline stage. Ranks are balanced by it, and
        it decides the number of micro-batches.
    max_tokens: the cap on a micro-batch's tokens, pads included.
    samples_per_microbatch: a fixed number of samples per micro-batch in place of the cap; None: the
        cap.
    pad_multiple: each sequence is padded to a multiple of it (TP under sequence parallelism).
    row_multiple: a micro-batch's last sequence is padded until the micro-batch's number of tokens is
        a multiple of it. It is 1, or a divisor of ``max_tokens`` that is a multiple of
        ``pad_multiple``. FP8's matrix products need multiples of 16 tokens on each rank.
    share_prompts: whether samples of a micro-batch that have the same prompt run it once.
    repack: True: dropped samples are removed first, and only the others are packed. False: all
        samples are packed, and then micro-batches in which no sample has signal are removed.
    microbatch_multiple: a rank's number of micro-batches is a multiple of it, or 0. It is PP under
        the interleaved schedule, which runs micro-batches in groups of PP.
    lockstep_ranks: so many neighbouring data-parallel ranks ([0, L), [L, 2L), ...) form a block
        that shares experts. Every forward pass has an all-to-all among them, so they run equally
        many micro-batches.
    on_long_sample: ``own_microbatch`` gives a sample above ``max_tokens`` a micro-batch of its own;
        ``fail`` raises ConfigError.
    """

    data_size: int = 1
    cost: CostModel = CostModel(stages=(StageCost(overhead=256.0, token=1.0, square=0.0),))
    max_tokens: int = 8192
    samples_per_microbatch: int | None = None
    pad_multiple: int = 1
    row_multiple: int = 1
    share_prompts: bool = False
    repack: bool = True
    microbatch_multiple: int = 1
    lockstep_ranks: int = 1
    on_long_sample: str = "own_microbatch"

    def __post_init__(self) -> None:
        if self.data_size % self.lockstep_ranks:
            raise ValueError(
                f"{self.data_size} data-parallel ranks do not divide into blocks of "
                f"lockstep_ranks={self.lockstep_ranks}; lockstep_ranks is Topology.lockstep_replicas, a divisor of "
                "Topology.data_size"
            )
        if self.row_multiple > 1 and (self.max_tokens % self.row_multiple or self.row_multiple % self.pad_multiple):
            raise ValueError(
                f"row_multiple={self.row_multiple} must divide max_tokens={self.max_tokens} and be a multiple of "
                f"pad_multiple={self.pad_multiple}"
            )


class Degrees(Protocol):
    """Describes the degrees of parallelism that ``plan_rules`` reads; a Topology has them.

    virtual_size: the number of model chunks per pipeline rank.
    lockstep_replicas: the number of neighbouring data-parallel ranks that share experts.
    """

    tensor_size: int
    pipeline_size: int
    virtual_size: int
    context_size: int
    data_size: int
    lockstep_replicas: int


class Sizes(Protocol):
    """Describes the costs of a model that ``plan_rules`` reads; a ModelShape has them.

    square_share: in a layer with attention, attention over a sequence of l tokens costs square_share · l², with a
        token's other cost as the unit.
    head_layers: the LM head's cost, with an average layer as the unit.
    rank_shares: called with the number of pipeline ranks; returns for each rank the cost of its
        layers, in the same unit, their number, and the number of those with attention.
    """

    square_share: float
    head_layers: float

    def rank_shares(self, pipeline: int) -> Sequence[tuple[float, float, float]]: ...


def plan_rules(
    settings: PlanConfig,
    degrees: Degrees,
    sizes: Sizes,
    *,
    sequence_parallel: bool,
    fp8: bool,
    share_prompts: bool = False,
) -> PlanRules:
    """Return the planning rules of a run, from its settings, its degrees of parallelism and the model's sizes.

    Context parallelism splits each sequence into two chunks per rank, and sequence parallelism
    splits a micro-batch's tokens over tensor ranks. If both are on, lengths are padded to a multiple of
    2 · CP · TP. The interleaved schedule runs micro-batches in groups of PP. FP8 pads a micro-batch to
    a multiple of rows. The token cap is lowered to this multiple, so that a padded micro-batch stays
    within the cap.

    share_prompts: whether samples of a group run their prompt once in a micro-batch.

    Raises ConfigError if the token cap is below FP8's multiple.
    """
    # Pads and the cap.
    chunks = 2 * degrees.context_size if degrees.context_size > 1 else 1
    tensor_ranks = degrees.tensor_size if sequence_parallel else 1
    row_multiple, max_tokens = 1, settings.max_tokens_per_microbatch
    if fp8:
        row_multiple = FP8_ROWS * tensor_ranks * degrees.context_size
        max_tokens = max_tokens // row_multiple * row_multiple
        if not max_tokens:
            raise ConfigError(
                f"plan.max_tokens_per_microbatch={settings.max_tokens_per_microbatch} is below {row_multiple}, to "
                "which FP8 pads every micro-batch here; raise plan.max_tokens_per_microbatch"
            )
    # The costs that are assumed, and the settings as they are.
    cost = prior(
        sizes.rank_shares(degrees.pipeline_size),
        virtual=degrees.virtual_size,
        overhead_tokens=settings.microbatch_overhead_tokens,
        square_share=sizes.square_share,
        head_layers=sizes.head_layers,
    )
    return PlanRules(
        data_size=degrees.data_size,
        cost=cost,
        max_tokens=max_tokens,
        samples_per_microbatch=settings.samples_per_microbatch,
        repack=settings.repack,
        pad_multiple=chunks * tensor_ranks,
        row_multiple=row_multiple,
        share_prompts=share_prompts,
        microbatch_multiple=degrees.pipeline_size if degrees.virtual_size > 1 else 1,
        lockstep_ranks=degrees.lockstep_replicas,
        on_long_sample=settings.on_long_sample,
    )


def split_mini_batches(
    samples: np.ndarray,
    samples_per_mini_batch: int | None,
    *,
    merge: bool = False,
    groups: np.ndarray | None = None,
    group_size: int | None = None,
) -> list[np.ndarray]:
    """Return the batch's mini-batches, each ``samples_per_mini_batch`` sample indices in order; the last has the rest.

    samples: int64, indices of samples.
    samples_per_mini_batch: None for one mini-batch of all samples.
    merge: whether all samples are one mini-batch, as under ``skip.steps=merge``.
    groups: int64 [S], the group of each sample, ascending. Read under ``group_size`` alone.
    group_size: the mean number of samples of a group where groups may be unequal. Then each
        mini-batch has ``samples_per_mini_batch`` / ``group_size`` whole groups, so that their number
        does not depend on the groups' sizes. None: groups are equal.
    """
    if merge:
        samples_per_mini_batch = None
    if group_size is not None and groups is not None and samples_per_mini_batch is not None and len(samples):
        number = np.unique(groups[samples], return_inverse=True)[1].reshape(-1)  # 0, 0, 1, 1, 1, 2, ...
        mini_batch = number // (samples_per_mini_batch // group_size)
        return [samples[mini_batch == index] for index in range(int(mini_batch.max()) + 1)]
    size = samples_per_mini_batch or max(len(samples), 1)
    return [samples[i : i + size] for i in range(0, len(samples), size)]


def plan_steps(
    purpose: str,
    mini_batches: list[np.ndarray],
    tokens: SampleTokens | np.ndarray,
    signal: np.ndarray,
    rules: PlanRules,
    *,
    drops: bool,
    sample_ids: Sequence[str] = (),
) -> BatchPlan:
    """Return the plan of one optimizer step per mini-batch.

    purpose: "train" or "logprob", part of the plan's fingerprint.
    mini_batches: int64 arrays of sample indices.
    tokens: the number of tokens of each sample. ``SampleTokens`` counts shared prompts separately.
        An int64 [S] counts prompt and response together; then no prompt is shared.
    signal: bool [S], True for a sample with signal, which may have a gradient.
    drops: whether samples without signal are dropped.
    sample_ids: S names, for messages alone.

    Raises ConfigError for a sample above the token cap under ``on_long_sample="fail"``.

    Example: two mini-batches [0, 1] and [2, 3], signal only in sample 1. The first step runs [1]
    (``StepKind.REAL``). The second runs no sample (``StepKind.GHOST``): a step on a zero gradient.
    """
    padded = (tokens if isinstance(tokens, SampleTokens) else SampleTokens.alone(tokens)).padded(rules.pad_multiple)
    _refuse_long_samples(mini_batches, padded.whole, rules, sample_ids)
    costs = SampleCosts.of(padded, rules.cost)
    planned = tuple(_plan_mini_batch(members, costs, signal, rules, drops=drops) for members in mini_batches)
    return BatchPlan(purpose=purpose, mini_batches=planned)


def _refuse_long_samples(
    mini_batches: list[np.ndarray], padded: np.ndarray, rules: PlanRules, sample_ids: Sequence[str]
) -> None:
    """Raise ConfigError if a sample exceeds the token cap under ``on_long_sample="fail"``.

    Dropped samples are checked too, so whether a run fails does not depend on the drops.

    padded: [S], each sample's tokens, pads included.
    """
    if rules.on_long_sample != "fail" or rules.samples_per_microbatch is not None or not mini_batches:
        return
    members = np.concatenate(mini_batches)
    above = members[padded[members] > rules.max_tokens]
    if len(above):
        name = sample_ids[above[0]] if sample_ids else f"index {above[0]} of the batch"
        raise ConfigError(
            f"sample {name} has {padded[above[0]]} tokens, pads included, more than "
            f"plan.max_tokens_per_microbatch={rules.max_tokens} ({len(above)} of {len(members)} samples have), and "
            "plan.on_long_sample=fail; raise plan.max_tokens_per_microbatch, lower rollout.max_response_tokens, or "
            "set plan.on_long_sample=own_microbatch"
        )


def _plan_mini_batch(
    members: np.ndarray, costs: SampleCosts, signal: np.ndarray, rules: PlanRules, *, drops: bool
) -> StepPlan:
    live = members[signal[members]] if drops else members
    dense = cut(members, costs, rules)
    if len(live) == len(members):
        running = dense
    elif rules.repack:
        running = cut(live, costs, rules)
    else:
        running = _rows_with_signal(dense, signal, rules)
    return _assemble(members, running, costs.tokens.whole, rules, num_dense=int(_lockstep_counts(dense, rules).sum()))


def _rows_with_signal(dense: Cut, signal: np.ndarray, rules: PlanRules) -> Cut:
    """Return each rank's micro-batches of the dense plan, without the rows in which no sample has signal.

    A row is the micro-batches that the ranks of a block run at the same time. A block is the
    ``lockstep_ranks`` ranks that share experts. The experts compute all tokens of a row together.
    Without one of the row's micro-batches, sums would round in another order than in the dense plan.
    So a row with signal is kept whole.

    dense: each rank's micro-batches if nothing is dropped.
    signal: bool [S], True for a sample that may have a gradient.
    """
    running: Cut = []
    for start in range(0, rules.data_size, rules.lockstep_ranks):
        block = dense[start : start + rules.lockstep_ranks]
        live = {row for rank in block for row, samples in enumerate(rank) if signal[samples].any()}
        running += [[samples for row, samples in enumerate(rank) if row in live] for rank in block]
    return running


def _rounded_up(microbatches: int, rules: PlanRules) -> int:
    return -(-microbatches // rules.microbatch_multiple) * rules.microbatch_multiple


def _lockstep_counts(per_rank: Cut, rules: PlanRules) -> np.ndarray:
    """Return int64 [ranks]: the number of micro-batches that each data-parallel rank runs, fillers included.

    per_rank: each rank's micro-batches without fillers.
    """
    counts = np.array([len(rank) for rank in per_rank], dtype=np.int64).reshape(-1, rules.lockstep_ranks)
    return np.repeat([_rounded_up(most, rules) for most in counts.max(axis=1).tolist()], rules.lockstep_ranks)


def _assemble(members: np.ndarray, per_rank: Cut, padded: np.ndarray, rules: PlanRules, *, num_dense: int) -> StepPlan:
    """Return a StepPlan of each rank's micro-batches, with fillers so that the ranks of a block run equally many.

    A block is the ``lockstep_ranks`` ranks that share experts. A filler is a micro-batch without a
    loss. Under ``repack`` it holds the shortest sample that is not dropped. Otherwise it holds the
    shortest of the mini-batch's samples, as if none were dropped.

    members: int64, indices of the mini-batch's samples.
    per_rank: each rank's micro-batches without fillers.
    padded: [S], the number of tokens of each sample, pads included.
    num_dense: the number of micro-batches, fillers included, of the plan in which no sample is
        dropped.
    """
    with_loss = [m for rank in per_rank for m in rank]
    run = np.concatenate(with_loss) if with_loss else np.empty(0, dtype=np.int64)
    among = run if rules.repack else members
    shortest = among[[np.argmin(padded[among])]] if len(run) else run
    counts = _lockstep_counts(per_rank, rules).tolist()
    # The fillers that bring each rank to its block's count.
    evened = [[*rank, *[shortest] * (count - len(rank))] for rank, count in zip(per_rank, counts, strict=True)]
    flat = [m for rank in evened for m in rank]
    filler = [i >= len(rank) for rank, even in zip(per_rank, evened, strict=True) for i in range(len(even))]
    order = np.concatenate(flat).astype(np.int64) if flat else np.empty(0, dtype=np.int64)
    return StepPlan(
        kind=StepKind.REAL if flat else StepKind.GHOST,
        members=np.asarray(members, dtype=np.int64),
        dropped=np.setdiff1d(members, run).astype(np.int64),
        order=order,
        microbatch_offsets=np.cumsum([0] + [len(m) for m in flat]).astype(np.int64),
        rank_offsets=np.cumsum([0] + [len(rank) for rank in evened]).astype(np.int64),
        filler_microbatches=np.array(filler, dtype=bool),
        microbatches_dropped=num_dense - len(flat),
    )


def cut(samples: np.ndarray, costs: SampleCosts, rules: PlanRules) -> Cut:
    """Return a list of micro-batches per data-parallel rank: samples are spread over ranks, then packed on each rank.

    samples: int64, indices of samples.
    """
    if rules.samples_per_microbatch is not None:
        size = rules.samples_per_microbatch
        pieces = [samples[i : i + size] for i in range(0, len(samples), size)]
        return [pieces[rank :: rules.data_size] for rank in range(rules.data_size)]
    shares = spread(samples, costs, rules.data_size)
    blocks = [shares[i : i + rules.lockstep_ranks] for i in range(0, rules.data_size, rules.lockstep_ranks)]
    return [microbatches for block in blocks for microbatches in _pack_block(block, costs, rules)]


def _pack_block(shares: list[np.ndarray], costs: SampleCosts, rules: PlanRules) -> Cut:
    """Return the micro-batches of each rank of a block, equally many if each rank has enough samples.

    A block is the ``lockstep_ranks`` ranks that share experts. If one rank needs more micro-batches to
    stay within the token cap, the number grows for all ranks of the block. A rank with fewer samples
    than that gets one micro-batch for each. What it lacks, ``_assemble`` makes up later with fillers,
    which train nothing.

    shares: for each rank of the block, int64 indices of its samples.
    """
    count = _rounded_up(max(_wanted_microbatches(share, costs, rules) for share in shares), rules)
    packed = [_pack(share, costs, rules, count) for share in shares]
    while (reached := _rounded_up(max(len(microbatches) for microbatches in packed), rules)) > count:
        count = reached
        packed = [
            microbatches if len(microbatches) == min(count, len(samples)) else _pack(samples, costs, rules, count)
            for microbatches, samples in zip(packed, shares, strict=True)
        ]
    return packed


def _wanted_microbatches(share: np.ndarray, costs: SampleCosts, rules: PlanRules) -> int:
    """Return the number of micro-batches of least predicted time for one rank's samples; 0 without samples.

    The number is at least what the token cap demands. It is a multiple of ``microbatch_multiple`` if
    the rank has enough samples.

    share: int64, indices of the rank's samples.
    """
    # By the cap alone, a drop would leave fewer micro-batches of the same size, and the pipeline's bubble would take a
    # larger part of the step.
    if len(share) == 0:
        return 0
    tokens = costs.tokens
    (total, squares), longest = tokens.total(share), float(tokens.whole[share].max())
    low = max(1, -(-int(total) // rules.max_tokens))
    best = rules.cost.best_count(total, squares, longest, most=len(share))
    if tokens.shares and (groups := len(costs.groups(share))) < best:
        # More micro-batches than groups run some prompts twice: one per group may be faster.
        twice = (best - groups) * np.array([tokens.prompt[share].mean(), (tokens.prompt[share] ** 2.0).mean()])
        apart = rules.cost.count_seconds(np.array([best]), total + twice[0], squares + twice[1], longest)
        whole = rules.cost.count_seconds(np.array([groups]), total, squares, longest)
        best = groups if whole[0] <= apart[0] else best
    return min(_rounded_up(max(low, best), rules), len(share))


def _pack(share: np.ndarray, costs: SampleCosts, rules: PlanRules, count: int) -> list[np.ndarray]:
    """Return one rank's samples in ``count`` micro-batches under the token cap, or in more if they do not fit.

    There are never more micro-batches than samples.

    share: int64, indices of the rank's samples.
    """
    if len(share) == 0:
        return []
    count = min(count, len(share))
    while True:
        bins = split_to(spread(share, costs, count, rules.max_tokens), count, costs)
        if all(len(b) == 1 or costs.tokens.total(b)[0] <= rules.max_tokens for b in bins):
            return _in_order(bins, costs, rules)
        count = min(_rounded_up(count + max(1, count // 16), rules), len(share))


def _in_order(bins: list[np.ndarray], costs: SampleCosts, rules: PlanRules) -> list[np.ndarray]:
    """Return the micro-batches ``bins`` in the order of their first samples; on a pipeline, cheap ones at both ends.

    While a pipeline fills and drains, stages wait for the micro-batches at the start and the end, so
    these should be cheap. By the simulation of planning/timeline.py, this order saves a few percent
    of a step's time if micro-batches are nearly equal. It saves 10 to 20 % if single long samples
    make them unequal.
    """
    bins = sorted(bins, key=lambda b: int(b[0]))
    if len(rules.cost.stages) == 1:
        return bins
    rising = np.argsort([costs.total(b) for b in bins], kind="stable").tolist()
    return [bins[i] for i in (*rising[::2], *rising[1::2][::-1])]
