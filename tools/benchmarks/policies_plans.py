"""Builds the three planning policies of verl #5838 as BatchPlans that this backend's schedule runs. Pure numpy.

Read: https://github.com/verl-project/verl/pull/5838 (open) and its author's branch dev-skip-zero-adv
(github.com/sheilaliuxl/verl at 22e71151 and 09fcbfd0: ``filter_zero_adv_batch`` of verl/trainer/ppo/metric_utils.py,
``filter_zero_adv_micro_batch``, ``_split_filter_zero_adv_mini_batches`` and ``update_policy`` of
verl/workers/actor/dp_actor.py). How each policy is understood:

- ``keep_one`` (``match_mini_batch_data_split=True``): the batch is cut as in the dense run; each micro-batch keeps its
  samples with signal, or its shortest sample if none has any, so that all ranks run as many micro-batches as in the
  dense run.
- ``filter_pad`` (``match_loss_curve=True``, in the words of the description: "the same #mini-batches as before, but
  with less #samples"): the batch is filtered as a whole, padded with the shortest samples without signal to a multiple
  of DP × mini-batches (of fewer mini-batches if survivors are too few for one per rank in each) and cut in even pieces;
  the remaining steps follow as ghosts.
- ``fewest_steps`` (``match_loss_curve=False``: "It can be reduced into 1 single mini-batch"): the same filter and
  padding, then cut in pieces of the original mini-batch size, with fewer optimizer steps than the dense run.

The filter gives up, and the batch runs dense, if no more samples lack signal than the padding needs; of a batch without
signal the DP shortest samples run. A padding sample is a real sample of advantage 0: it costs a forward and a backward
and adds no gradient.

Weights: under ``match_loss_curve`` #5838 corrects its means so that each sample has its weight of the dense run;
``fewest_steps`` takes the mean over the samples that the step runs. So the first two belong with the original weights,
the last one with renormalised ones.

Choices that #5838 leaves to its surroundings are made in its favour: survivors keep the batch's order, so that they
move to another step as rarely as even pieces allow; a ghost decays and counts as this backend's does; ranks and
micro-batches are balanced by this repository's planner, and ranks need not run equally many micro-batches.

Invariants (tests/tools/test_benchmark_policies.py):

1. Under every policy each sample with signal runs exactly once, and no sample runs twice (fillers apart).
2. ``keep_one`` runs, rank by rank, as many micro-batches as the dense plan.
3. ``filter_pad`` has the dense plan's number of steps, ghosts last; it runs a multiple of DP × REAL steps of samples,
   or the dense plan.
4. ``fewest_steps`` has ⌈kept / mini-batch size⌉ steps, all REAL, of the samples that ``filter_pad`` keeps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_rl.planning.plan import PlanRules, plan_steps
from megatron_rl.planning.tokens import padded_lengths
from megatron_rl.types import BatchPlan, StepKind, StepPlan

Policy = Callable[[list[np.ndarray], np.ndarray, np.ndarray, PlanRules], BatchPlan]
"""(members of each mini-batch, lengths [S] int64, signal [S] bool, rules) → the plan of one rollout."""


def dense(mini_batches: list[np.ndarray], lengths: np.ndarray, signal: np.ndarray, rules: PlanRules) -> BatchPlan:
    """Plan every sample in its own step: the truth."""
    return plan_steps("train", mini_batches, lengths, signal, rules, drops=False)


def ours(mini_batches: list[np.ndarray], lengths: np.ndarray, signal: np.ndarray, rules: PlanRules) -> BatchPlan:
    """Plan every survivor in its own step, a ghost at its own position."""
    return plan_steps("train", mini_batches, lengths, signal, rules, drops=True)


def keep_one(mini_batches: list[np.ndarray], lengths: np.ndarray, signal: np.ndarray, rules: PlanRules) -> BatchPlan:
    """Plan the dense micro-batches, each thinned to its survivors or to one sample.

    Example: micro-batches [0, 1] and [2, 3] with signal in 1 alone, 3 shorter than 2 → [1] and [3].
    """
    planned = dense(mini_batches, lengths, signal, rules).mini_batches
    padded = padded_lengths(lengths, rules.pad_multiple)
    return BatchPlan(purpose="train", mini_batches=tuple(_thinned(x, padded, signal) for x in planned))


def filter_pad(mini_batches: list[np.ndarray], lengths: np.ndarray, signal: np.ndarray, rules: PlanRules) -> BatchPlan:
    """Plan survivors in even pieces over the dense number of steps.

    Example: two mini-batches [0, 1, 2, 3] and [4, 5, 6, 7], signal in 0, 1, 2, one rank, 7 the shortest of the others →
    [0, 1] and [2, 7]: sample 2 is trained a step later than in the dense run.
    """
    kept, steps = filtered(mini_batches, lengths, signal, rules.data_size), len(mini_batches)
    if len(kept) == sum(map(len, mini_batches)):
        return dense(mini_batches, lengths, signal, rules)
    size = rules.data_size * -(-len(kept) // (rules.data_size * steps))
    pieces = [kept[i : i + size] for i in range(0, len(kept), size)]
    return dense([*pieces, *[kept[:0]] * (steps - len(pieces))], lengths, signal, rules)


def fewest_steps(
    mini_batches: list[np.ndarray], lengths: np.ndarray, signal: np.ndarray, rules: PlanRules
) -> BatchPlan:
    """Plan survivors in as few steps as the mini-batch size allows.

    Example: two mini-batches [0, 1, 2, 3] and [4, 5, 6, 7], signal in 0, 1, 5, 6, one rank → one step [0, 1, 5, 6].
    """
    kept, size = filtered(mini_batches, lengths, signal, rules.data_size), len(mini_batches[0])
    return dense([kept[i : i + size] for i in range(0, len(kept), size)], lengths, signal, rules)


POLICIES: dict[str, Policy] = {
    "dense": dense,
    "ours": ours,
    "keep_one": keep_one,
    "filter_pad": filter_pad,
    "fewest_steps": fewest_steps,
}
RIVALS = ("keep_one", "filter_pad", "fewest_steps")


def filtered(mini_batches: list[np.ndarray], lengths: np.ndarray, signal: np.ndarray, data_size: int) -> np.ndarray:
    """Return int64 the survivors in order, then the shortest samples without signal as padding.

    Returns all samples if those without signal do not suffice.
    """
    samples = np.concatenate(mini_batches)
    live, dead = samples[signal[samples]], samples[~signal[samples]]
    multiple = data_size * min(len(mini_batches), max(1, -(-len(live) // data_size)))
    padding = -len(live) % multiple if len(live) else multiple
    if len(dead) <= padding:
        return samples
    return np.concatenate([live, dead[np.lexsort((dead, lengths[dead]))][:padding]])


def _thinned(mini_batch: StepPlan, padded: np.ndarray, signal: np.ndarray) -> StepPlan:
    """Thin each micro-batch to its survivors, or to its shortest sample.

    A filler holds the shortest sample that runs, as in every plan.
    """
    if mini_batch.kind is StepKind.GHOST:
        return mini_batch
    bounds = mini_batch.microbatch_offsets
    cut = [mini_batch.order[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    kept = [m[signal[m]] if signal[m].any() else m[[np.argmin(padded[m])]] for m in cut]
    true = np.concatenate([m for m, filler in zip(kept, mini_batch.filler_microbatches, strict=True) if not filler])
    shortest = true[[np.argmin(padded[true])]]
    kept = [shortest if filler else m for m, filler in zip(kept, mini_batch.filler_microbatches, strict=True)]
    return StepPlan(
        kind=StepKind.REAL,
        members=mini_batch.members,
        dropped=np.setdiff1d(mini_batch.members, true),
        order=np.concatenate(kept),
        microbatch_offsets=np.cumsum([0] + [len(m) for m in kept]).astype(np.int64),
        rank_offsets=mini_batch.rank_offsets,
        filler_microbatches=mini_batch.filler_microbatches,
    )
