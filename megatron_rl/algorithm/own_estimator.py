"""An advantage estimator of the user's own: ``advantage.estimator=module:function``, its contract and its check.

    def estimator(rewards: GroupRewards, **advantage.arguments) -> array [S]

The function is called once per rollout, with all samples of the rollout (docs/your-own.md). Each
result is checked. It must be S numbers, with 0 for a sample that is not included and 0 for a group
of equal rewards. Such groups may be dropped before the call. Under
``advantage.moves_equal_rewards=true`` they are not, and may have advantages other than 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron_rl import users_code
from megatron_rl.algorithm.contract import Finding
from megatron_rl.algorithm.estimators import GroupRewards, in_unequal_groups
from megatron_rl.algorithm.finite import sample_name
from megatron_rl.config import AdvantageConfig
from megatron_rl.errors import ConfigError


def resolve(estimator: str, arguments: Mapping[str, object]) -> Callable[[GroupRewards], object]:
    """Return the function that ``estimator`` names, bound to ``arguments``, so that it takes a GroupRewards alone.

    Raises ConfigError if it cannot be imported, or cannot be called with these arguments.
    """
    key = f"advantage.estimator={estimator!r}"
    function = users_code.resolve(estimator, {}, what=key, form="module:function")
    if not callable(function):
        raise ConfigError(f"{key} is a {type(function).__name__}, which cannot be called; name a function")
    try:
        inspect.signature(function).bind(None, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key} cannot be called with a GroupRewards and advantage.arguments={dict(arguments)}: {error}"
        ) from None
    return lambda rewards: function(rewards, **arguments)


def own_advantages(
    rewards: GroupRewards, estimator: str, arguments: Mapping[str, object], *, moves_equal_rewards: bool
) -> np.ndarray:
    """Return float64 [S], the advantages by the user's function; raise ConfigError if they break its contract.

    moves_equal_rewards: whether samples of a group of equal rewards may have advantages other than 0.
    """
    returned = resolve(estimator, arguments)(rewards)
    key, wanted = f"advantage.estimator={estimator!r}", len(rewards.totals)
    try:
        values = np.array(returned, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key} returned a {type(returned).__name__}, not an array of numbers ({error})") from None
    if values.shape != (wanted,):
        raise ConfigError(
            f"{key} returned an array of shape {list(values.shape)} for {wanted} samples; return one number each"
        )

    def said(sample: int) -> str:
        return f"{key} gave sample {sample_name(rewards.sample_ids, sample)} the advantage {values[sample]:g}"

    outside = np.flatnonzero(~rewards.included & (values != 0))
    if len(outside):
        raise ConfigError(
            f"{said(outside[0])}, and it is taken out of its group (rewards.included is False there); give it 0"
        )
    equal = np.flatnonzero(~in_unequal_groups(rewards) & (values != 0))
    if len(equal) and not moves_equal_rewards:
        raise ConfigError(
            f"{said(equal[0])}, and all rewards of its group are equal: such groups are dropped before it is called; "
            "give them exactly 0, or set advantage.moves_equal_rewards=true, after which no group is dropped early"
        )
    return values


def require(config: AdvantageConfig) -> None:
    """Raise ConfigError if ``advantage.estimator`` cannot be called, or fails a test of its contract (``check``)."""
    resolve(config.estimator, config.arguments)
    for finding in check(config):
        if not finding.holds:
            raise ConfigError(
                f"advantage.estimator={config.estimator!r} breaks its contract ({finding.name}): {finding.detail}; "
                f"`megatron-rl check --estimator {config.estimator}` tries every property "
                "(docs/your-own.md)"
            )


def check(config: AdvantageConfig) -> list[Finding]:
    """Return one Finding per property of the contract, tried on a random batch; only the first if that one fails."""
    # The first property, and results that the others compare with.
    rewards = _batch()

    def values(rewards: GroupRewards) -> np.ndarray:
        return own_advantages(
            rewards, config.estimator, config.arguments, moves_equal_rewards=config.moves_equal_rewards
        )

    name = (
        "one finite number per sample, 0 for a sample taken out and for a group of equal rewards that is not declared"
    )
    before = rewards.totals.copy(), rewards.included.copy()
    try:
        whole, again = values(rewards), values(rewards)
    except Exception as error:  # noqa: BLE001  the user's code may raise anything
        said = str(error) if isinstance(error, ConfigError) else f"it raised {type(error).__name__}: {error}"
        return [Finding(name=name, holds=False, detail=said)]
    if not np.isfinite(whole).all():
        bad = np.flatnonzero(~np.isfinite(whole))[0]
        detail = f"sample {bad} of rewards {rewards.totals[rewards.groups == rewards.groups[bad]]} has {whole[bad]}"
        return [Finding(name=name, holds=False, detail=detail)]
    # The others: repeated, unchanged inputs, another number for a sample taken out, another order.
    other = np.where(rewards.included, rewards.totals, 7.0)
    order = np.random.default_rng(5).permutation(len(whole))
    return [
        Finding(name=name, holds=True, detail=f"{len(whole)} samples of {len(set(rewards.groups))} groups"),
        _equal("two calls on the same rewards give the same", again, whole),
        _equal("the rewards that it reads stay as they are", np.nan_to_num(rewards.totals), np.nan_to_num(before[0])),
        _equal("a sample taken out changes no other's advantage", values(replace(rewards, totals=other)), whole),
        _equal("the order of the samples changes no advantage", values(_ordered(rewards, order)), whole[order]),
    ]


def _batch() -> GroupRewards:
    """Return random rewards of six groups: two of equal rewards, one of one sample, one with a sample taken out."""
    sizes = (4, 4, 1, 4, 3, 4)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    by_function = np.random.default_rng(17).normal(size=(len(groups), 2)).round(2)
    by_function[groups == 1] = 1.0, 0.0
    by_function[groups == 4] = 0.1, 0.2
    included = np.ones(len(groups), dtype=bool)
    included[-2] = False
    totals = by_function.sum(axis=1)
    totals[~included] = np.nan
    by_function[~included] = np.nan
    return GroupRewards(
        totals=totals,
        groups=groups,
        included=included,
        loss_tokens=np.arange(1, len(groups) + 1),
        by_function=by_function,
        function_weights=(1.0, 1.0),
        sample_ids=tuple(f"{group}@0#{index}" for index, group in enumerate(groups)),
    )


def _ordered(rewards: GroupRewards, order: np.ndarray) -> GroupRewards:
    return replace(
        rewards,
        totals=rewards.totals[order],
        groups=rewards.groups[order],
        included=rewards.included[order],
        loss_tokens=rewards.loss_tokens[order],
        by_function=rewards.by_function[order],
        sample_ids=tuple(rewards.sample_ids[index] for index in order),
    )


def _equal(name: str, values: Sequence[float], wanted: Sequence[float]) -> Finding:
    gap = float(np.nan_to_num(np.abs(np.subtract(values, wanted)), nan=np.inf).max())
    return Finding(name=name, holds=gap <= 1e-9, detail=f"the largest difference is {gap:.3g}")
