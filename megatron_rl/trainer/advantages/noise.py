"""Noise on the advantages of a run's first steps (``advantage.noise_std``, algorithm/noise.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithm.noise import with_noise
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.distributed import collectives
from megatron_rl.types import BatchFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageNoise:
    """Adds noise to a rollout's advantages in the first ``steps`` optimizer steps of RL.

    All mini-batches and epochs of a rollout have the same noise.

    std:      the noise's standard deviation, above 0.
    steps:    a rollout gets noise if RL took fewer optimizer steps than this before the rollout.
    seed:     the run's seed.
    epsilon:  ``skip.advantage_epsilon``. A sample gets noise only if its absolute advantage is above
              this number.
    rl_steps: a function that returns the number of RL's optimizer steps so far. Steps with a zero
              gradient (ghost steps) count too.
    """

    std: float
    steps: int
    seed: int
    epsilon: float
    rl_steps: Callable[[], int]

    def __call__(self, plain: np.ndarray, facts: BatchFacts) -> np.ndarray:
        """Return the advantages ``plain`` ([S], one per sample) with noise added, float64 [S].

        Once RL has taken ``steps`` optimizer steps, the result is ``plain`` itself. A collective while
        noise is added.

        facts: the ids and loss-token counts of the S samples.
        """
        if self.rl_steps() >= self.steps:
            return plain
        signal = has_signal(plain, facts.loss_tokens, advantage_epsilon=self.epsilon, sample_ids=facts.sample_ids)
        noisy = with_noise(plain, signal, facts.sample_ids, std=self.std, seed=self.seed)
        return collectives.broadcast_from_rank0(noisy)
