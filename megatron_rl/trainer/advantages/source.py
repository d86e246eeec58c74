"""The seam of advantages: a source's inputs and its result."""

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

    returns: float32 [T] flat over response tokens, the critic's targets.
    values:  float32 [T] flat, the critic's values before its first step on the rollout.
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
    """Holds the advantages of a rollout, and the values that were computed with them.

    advantages: the policy trains on them.
    plain:      float64 [S], by rewards alone and without noise; the replay buffer ranks groups by
                them. 0 if advantages depend on a critic's values, a teacher or a KL in the reward.
    targets:    the critic's targets; None without a critic.
    kl:         the KL that was taken from the reward; None if the reward has no KL.
    metrics:    metrics of the KL in the reward, or of the gap to a teacher.
    """

    advantages: Advantages
    plain: np.ndarray
    targets: CriticTargets | None = None
    kl: MeasuredKL | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class AdvantageSource(Protocol):
    """Finds the advantages of a rollout. A collective."""

    def __call__(self, scored: ScoredBatch, passes: Passes) -> AdvantageResult:
        """Return the advantages of scored groups. ``passes``: those that this source needs, over every sample."""
        ...
