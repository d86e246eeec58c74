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
    """Adds noise to a rollout's advantages, in all its mini-batches and epochs, while few steps are taken.

    std:      of the noise, above 0.
    steps:    a rollout that begins at this step of RL or later has none.
    seed:     of the run.
    epsilon:  ``skip.advantage_epsilon``; a sample without signal gets no noise.
    rl_steps: returns the optimizer steps of RL taken before, ghosts included.
    """

    std: float
    steps: int
    seed: int
    epsilon: float
    rl_steps: Callable[[], int]

    def __call__(self, plain: np.ndarray, facts: BatchFacts) -> np.ndarray:
        """Return float64 [S], the advantages ``plain`` with noise. A collective as long as there is noise."""
        if self.rl_steps() >= self.steps:
            return plain
        signal = has_signal(plain, facts.loss_tokens, advantage_epsilon=self.epsilon, sample_ids=facts.sample_ids)
        noisy = with_noise(plain, signal, facts.sample_ids, std=self.std, seed=self.seed)
        return collectives.broadcast_from_rank0(noisy)
