"""The coefficient β of a KL in the reward: fixed, or steered so that the measured KL meets a target. Pure functions."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KLCoefficient:
    """Holds the KL coefficient β and the rule that moves it; checkpoints save ``value``, and a resumed run reads it.

    value:   β, ≥ 0, per nat.
    target:  the KL in nats that β is steered to; None: β is fixed.
    horizon: a number of samples. While the KL is at least 1.2 times the target, β is multiplied by
             about e^0.2 in each ``horizon`` samples.

    Example: ``KLCoefficient(value=0.2, target=6.0, horizon=10_000).updated(9.0, 256).value`` =
    0.2·(1 + 0.2·256/10,000) = 0.201024.
    """

    value: float
    target: float | None = None
    horizon: int = 10_000

    def __post_init__(self) -> None:
        if not (self.value >= 0 and math.isfinite(self.value)):
            raise ValueError(f"the KL coefficient is {self.value}; give a finite number ≥ 0")
        if self.target is None:
            return
        if not (self.target > 0 and math.isfinite(self.target)):
            raise ValueError(
                f"the KL target is {self.target}; give a finite number of nats > 0, or None for a fixed coefficient"
            )
        if self.value == 0:
            raise ValueError(
                "the KL coefficient is 0 and a target moves it by factors: it would stay 0; start above 0, or give no "
                "target"
            )
        if self.horizon <= 0:
            raise ValueError(f"the KL horizon is {self.horizon} samples; give a number > 0")

    def updated(self, kl: float, num_samples: int) -> KLCoefficient:
        """Return the coefficient after a batch of ``num_samples`` samples whose mean KL was ``kl``.

        β ← β·(1 + clip(kl/target − 1, −0.2, 0.2)·num_samples/horizon): Ziegler et al. 2019,
        arXiv:1909.08593, §2.2. The factor num_samples/horizon is from their code; the paper has a
        constant, K_β = 0.1. Without a target β stays. A ``kl`` estimated by k1 may be below 0.

        Raises ValueError for a KL that is NaN, and for ``num_samples`` of 5 · ``horizon`` or more,
        since β could then become 0 or negative.
        """
        if self.target is None:
            return self
        if math.isnan(kl):
            raise ValueError(
                "the measured KL is NaN, and so would the coefficient be from here on; look for non-finite log-probs"
            )
        if num_samples >= 5 * self.horizon:
            raise ValueError(
                f"{num_samples} samples at once against a KL horizon of {self.horizon} can take the coefficient to 0 "
                f"or below; give a horizon above {num_samples / 5:g} samples (10,000 is usual)"
            )
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return dataclasses.replace(self, value=self.value * (1.0 + error * num_samples / self.horizon))
