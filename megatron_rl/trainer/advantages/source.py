"""The interface of advantage computations: the protocol that each follows, and the dataclasses of its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megatron_rl.rollout.training_batch import ScoredBatch
from megatron_rl.trainer.passes.passes import Passes
from megatron_rl.types import Advantages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CriticTargets:
    """Holds the numbers that a critic is trained on in a rollout.

    returns: float32 [T], one number for each response token, sample after sample: the values that
             the critic shall predict.
    values:  float32 [T], in the same order: the values that the critic predicted before its first
             optimizer step on the rollout.
    """

    returns: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredKL:
    """Holds a KL in nats, summed over loss tokens, and their number.

    Example: two tokens of 0.1 and 0.3 nats: ``MeasuredKL(kl=0.4, tokens=2)``.
    """

    kl: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageResult:
    """Holds the advantages of a rollout, and the by-products of their computation.

    advantages: the advantages that the policy is trained on.
    plain:      float64 [S], the advantages from rewards alone, without noise. The replay buffer
                ranks groups by them. All zeros with a critic, a teacher or a KL in the reward.
    targets:    the critic's targets; None without a critic.
    kl:         the KL that was subtracted from the reward; None if the reward has no KL.
    metrics:    metrics of the KL in the reward, or of the gap to a teacher.
    """

    advantages: Advantages
    plain: np.ndarray
    targets: CriticTargets | None = None
    kl: MeasuredKL | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class AdvantageSource(Protocol):
    """Computes the advantages of a rollout. A call is a collective."""

    def __call__(self, scored: ScoredBatch, passes: Passes) -> AdvantageResult:
        """Return the advantages of a rollout.

        scored: the rollout's samples with their rewards.
        passes: results of the forward passes that this computation needs, over every sample.
        """
        ...
