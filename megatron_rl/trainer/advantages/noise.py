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

    A rollout's mini-batches and epochs all have the same noise.

    std:      the noise's standard deviation, above 0.
    steps:    a rollout whose first step of RL has this number or a later one gets no noise.
    seed:     the run's seed.
    epsilon:  ``skip.advantage_epsilon``; a sample without signal gets no noise.
    rl_steps: returns the number of RL's optimizer steps taken so far, ghosts included.
    """

    std: float
    steps: int
    seed: int
    epsilon: float
    rl_steps: Callable[[], int]

    def __call__(self, plain: np.ndarray, facts: BatchFacts) -> np.ndarray:
        """Return ``plain`` with noise added, float64 [S]. A collective while noise is added."""
        if self.rl_steps() >= self.steps:
            return plain
        signal = has_signal(plain, facts.loss_tokens, advantage_epsilon=self.epsilon, sample_ids=facts.sample_ids)
        noisy = with_noise(plain, signal, facts.sample_ids, std=self.std, seed=self.seed)
        return collectives.broadcast_from_rank0(noisy)
