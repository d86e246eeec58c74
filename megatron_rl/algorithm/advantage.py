"""Advantages from rewards, and each sample's weight in the loss by ``loss.reduction``. Pure functions of numbers.

A sample is included if its reward counts in its group (``GroupRewards.included``).

Invariants (``assert_invariants`` in tests/unit/algorithm/test_advantage.py):

1. A group whose included rewards (``gdpo``: the rewards of each function) are equal as numbers has
   advantages of exactly 0.0, except under ``center_and_scale``.
2. A sample that is not included has advantage 0.0 and changes no other sample's advantage.
3. Adding a constant to every reward of a group changes no advantage beyond rounding.
4. Advantages are finite in float32. A reward, a sum or an advantage that is not finite is an error
   that names the sample.
5. ``may_have_advantage`` may be called on some of a batch's groups. It is True for every sample
   whose advantage, computed over the whole batch, is not 0.
6. ``reduction_weights`` are ≥ 0, and 0 exactly for samples without a loss token. They depend on the
   mini-batch's samples alone, not on their division into micro-batches or over ranks.
7. A sample has an advantage of exactly 0.0 if its reward equals its group's mean in exact
   arithmetic, except under ``center_and_scale``. Under ``gdpo`` the condition is that its weighted
   sum of standardised rewards is 0 in exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_rl.algorithm.estimators import (
    GroupRewards,
    Rewards,
    batch_std,
    dr_grpo,
    gdpo,
    grpo,
    in_unequal_groups,
    reinforce_plus_plus,
    rloo,
    whitened,
)
from megatron_rl.algorithm.finite import require_epsilon, require_finite
from megatron_rl.config import LossConfig
from megatron_rl.types import Advantages, BatchFacts, LossInputs, StepPlan
from megatron_rl.users_code import is_own

BY_A_MODEL = ("gae", "distillation")  # these estimators compare a sample with another model, not with its group

_REWARD = (
    "mend the reward function, or look at the settings that make its total: reward.weights, reward.overlong_penalty, a "
    "KL in the reward"
)


def advantages(
    rewards: GroupRewards,
    *,
    estimator: str,
    epsilon: float = 1e-6,
    whiten: str = "scale",
    arguments: Mapping[str, object] | None = None,
    moves_equal_rewards: bool = False,
    group_size: int | None = None,
) -> np.ndarray:
    """Return float64 [S], each sample's advantage (docs/semantics.md §6); 0 where ``rewards.included`` is False.

    estimator: the name of a function of algorithm/estimators.py, or the user's own
        ``module:function`` (algorithm/own_estimator.py).
    epsilon: ε, added to standard deviations before a division.
    whiten: ``scale``, ``center_and_scale`` or ``none`` (``estimators.whitened``); read by
        ``reinforce_plus_plus`` and ``gdpo`` alone.
    arguments: keyword arguments of a user's own estimator; the built-in ones read none.
    moves_equal_rewards: whether a user's own estimator may give a group of equal rewards advantages
        other than 0.
    group_size: the mean number of samples of a group where groups may be unequal; None: groups are
        equal. ``dr_grpo`` then gives the advantages whose expectation is that of groups of
        ``group_size`` samples: rloo's times 1 − 1 / group_size.

    Raises NonFiniteAdvantage, naming the sample, for a reward or an advantage that is not finite or
    is beyond float32. Raises ConfigError for an ``epsilon`` that is not a finite number, and
    ValueError for an unknown estimator.
    """
    require_epsilon("advantage.epsilon", epsilon)
    require_finite(rewards.totals, "the reward", rewards.sample_ids, _REWARD, included=rewards.included)
    if is_own(estimator):
        from megatron_rl.algorithm.own_estimator import own_advantages

        values = own_advantages(rewards, estimator, arguments or {}, moves_equal_rewards=moves_equal_rewards)
    else:
        values = _estimate(rewards, estimator, epsilon, whiten, group_size)
    require_finite(
        values,
        "the advantage",
        rewards.sample_ids,
        f"look at the rewards of its group, at advantage.estimator={estimator} and advantage.epsilon={epsilon:g}",
    )
    return values


def _estimate(rewards: GroupRewards, estimator: str, epsilon: float, whiten: str, group_size: int | None) -> np.ndarray:
    included = rewards.included
    group = np.unique(rewards.groups, return_inverse=True)[1].reshape(-1)
    total_rewards = Rewards(values=rewards.totals, group=group, included=included)
    match estimator:
        case "grpo":
            return grpo(total_rewards, epsilon=epsilon)
        case "dr_grpo":
            return dr_grpo(total_rewards) if group_size is None else rloo(total_rewards) * (1 - 1 / group_size)
        case "batch_std":
            return batch_std(total_rewards, epsilon=epsilon)
        case "rloo":
            return rloo(total_rewards)
        case "reinforce_plus_plus":
            return reinforce_plus_plus(total_rewards, tokens=rewards.loss_tokens, whiten=whiten, epsilon=epsilon)
        case "gdpo":
            columns = _columns(total_rewards, rewards)
            weights = rewards.function_weights or (1.0,) * len(columns)
            total = gdpo(columns, weights, included, tokens=None, whiten="none", epsilon=epsilon)
            way_out = f"look at reward.weights={list(weights)} and reward.overlong_penalty"
            require_finite(total, "the weighted sum of the standardised rewards", rewards.sample_ids, way_out)
            return whitened(total, included, rewards.loss_tokens, whiten, epsilon)
    raise ValueError(f"advantage.estimator={estimator!r} is not known")


def _columns(seen: Rewards, rewards: GroupRewards) -> tuple[Rewards, ...]:
    """Return one Rewards for each reward function, with the function's rewards as ``values``.

    A sample is included if ``seen`` includes it and the function applied to it.

    seen: the batch's total rewards; gives the groups and the included samples.
    rewards: holds the rewards of each function (``by_function``).
    """
    if rewards.by_function is None:
        raise ValueError("advantage.estimator=gdpo needs the rewards of each function")
    columns = []
    for values in rewards.by_function.T:
        applied = seen.included & ~np.isnan(values)
        require_finite(values, "the reward", rewards.sample_ids, _REWARD, included=applied)
        columns.append(Rewards(values=values, group=seen.group, included=applied))
    return tuple(columns)


def may_have_advantage(
    rewards: GroupRewards,
    *,
    estimator: str,
    epsilon: float = 1e-6,
    whiten: str = "scale",
    moves_equal_rewards: bool = False,
) -> np.ndarray:
    """Return bool [S], False for samples whose advantage is 0 whatever other groups the batch has.

    The arguments are those of ``advantages``. Under most estimators a sample gets False if its reward
    equals its group's mean (``gdpo``: if the weighted sum of its standardised rewards is 0). Other
    groups can only change the divisor of its advantage. Under three settings every included sample
    gets True:

    - ``center_and_scale`` subtracts a mean over the batch from every sample;
    - ``gae`` (algorithm/gae.py) compares each sample with a critic;
    - ``distillation`` compares each sample with a teacher.

    Under a user's own estimator every included sample of a group of unequal rewards gets True. Under
    ``moves_equal_rewards`` those of groups of equal rewards get True as well.
    """
    if is_own(estimator):
        return rewards.included & (moves_equal_rewards | in_unequal_groups(rewards))
    if estimator in BY_A_MODEL or (whiten == "center_and_scale" and estimator in ("reinforce_plus_plus", "gdpo")):
        return rewards.included.copy()
    if estimator == "gdpo":  # needs the run's ε: at another ε other sums of its functions cancel to 0
        return advantages(rewards, estimator="gdpo", epsilon=epsilon, whiten="none") != 0
    return advantages(rewards, estimator="dr_grpo") != 0


def group_weights(groups: np.ndarray, group_size: int) -> np.ndarray:
    """Return float64 [S], ω = n̄ / n_g: by how much each sample counts, so that every group counts as n̄ samples.

    groups: int64 [S], the group of each sample; n_g is the number of the group's samples.
    group_size: n̄, the number of samples that a group has if groups are equal.
    """
    _, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    return group_size / sizes[index.reshape(-1)]


def reduction_weights(
    reduction: str,
    facts: BatchFacts,
    counted: np.ndarray,
    *,
    max_response_tokens: int,
    group_size: int | None = None,
) -> np.ndarray:
    """Return float64 [S]: the factor on each sample's loss tokens in the loss; 0 for samples not counted.

    docs/semantics.md §1 has the formula of each reduction. A sample without a loss token gets 0, and
    no denominator counts it. Under ``group_size`` every sum over samples, of a numerator or a
    denominator, counts a sample ω times (``group_weights``).

    reduction: ``loss.reduction``, such as ``token_mean``.
    facts: each sample's number of loss tokens, and its group.
    counted: int64, indices of the samples that the denominators count: the mini-batch before
             samples are dropped, or under ``loss.denominator=kept`` after.
    max_response_tokens: ``rollout.max_response_tokens``, by which ``sequence_sum_norm`` divides.
    group_size: n̄, the mean number of samples of a group, where groups may be unequal
        (``rollout.group_sizes=adaptive``). None: each sample counts once.

    Example: two samples of 100 and 900 loss tokens, ``token_mean`` → 1/1000 each; ``sequence_mean``
    → 1/200 and 1/1800.
    """
    tokens = np.zeros(facts.num_samples)
    tokens[counted] = facts.loss_tokens[counted]
    present = tokens > 0
    weights = np.zeros(facts.num_samples)
    if not present.any():
        return weights
    count = np.ones(facts.num_samples) if group_size is None else group_weights(facts.groups, group_size)
    own, samples = count[present], count[present].sum()
    match reduction:
        case "token_sum":
            weights[present] = own
        case "token_mean":
            weights[present] = own / (count * tokens).sum()
        case "sequence_mean":
            weights[present] = own / (samples * tokens[present])
        case "sequence_sum_mean":
            weights[present] = own / samples
        case "sequence_sum_norm":
            weights[present] = own / (samples * max_response_tokens)
        case "prompt_mean":
            index = np.unique(facts.groups, return_inverse=True)[1].reshape(-1)
            group_tokens = np.bincount(index, weights=count * tokens)
            weights[present] = own / ((group_tokens > 0).sum() * group_tokens[index[present]])
        case _:
            raise ValueError(f"loss.reduction={reduction!r} is not known")
    return weights


def loss_inputs(
    loss: LossConfig,
    facts: BatchFacts,
    mini_batch: StepPlan,
    advantages: Advantages,
    signal: np.ndarray,
    *,
    drops: bool,
    max_response_tokens: int,
    group_size: int | None = None,
    copies: np.ndarray | None = None,
) -> LossInputs:
    """Return the inputs of one mini-batch's loss: ``reduction_weights``, and the advantages times these weights.

    facts: the batch's tokens per sample.
    mini_batch: its ``members`` are the indices of the mini-batch's samples.
    advantages: of each sample or of each token.
    signal: bool [S], True for samples that may have a gradient (algorithm/signal.py). The metrics
            count these samples alone; the denominators do so under ``loss.denominator=kept``.
    drops: whether samples without signal are dropped. False under ``skip.mode=off``: then the
           denominators and the metrics count every sample.
    max_response_tokens, group_size: see ``reduction_weights``.
    copies: int64 [S], for how many samples with signal each sample stands (algorithm/repeats.py).
            Its weight and its metrics count so often. None: each stands for itself.
    """
    members = mini_batch.members
    counts_all = loss.denominator == "original" or not drops
    counted = members if counts_all else members[signal[members]]
    weights = reduction_weights(
        loss.reduction, facts, counted, max_response_tokens=max_response_tokens, group_size=group_size
    )
    if copies is not None:
        weights *= copies
    per_token = None if advantages.of_token is None else advantages.of_token * np.repeat(weights, facts.response_tokens)
    return LossInputs(
        advantages=advantages.of_sample * weights,
        weights=weights,
        token_advantages=per_token,
        kl_coefficient=0.0,
        measured=(signal if copies is None else copies) if drops else None,
    )
