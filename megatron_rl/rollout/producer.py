"""Prompts → scored rollouts. Every rank generates and scores its own share of the prompts; groups stay whole on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_rl.types import Prompt, Rollout, Sample, Score


class Generator(Protocol):
    def generate(self, prompts: Sequence[Prompt], samples_per_prompt: int, *, greedy: bool = False, attempt: int = 0) -> list[Rollout]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced:
    """This rank's share of a batch, sample by sample, and how long it took.

    places: each sample's position in the batch, unique over ranks; place // samples_per_prompt is its group.
    """

    rollouts: list[Rollout]
    scores: list[Score]
    places: list[int]
    rollout_s: float
    reward_s: float

    def samples(self) -> list[Sample]:
        """Rows to train on. A sample that was taken out of its group (no total) carries no loss token."""
        return [to_sample(rollout, included=score.total is not None) for rollout, score in zip(self.rollouts, self.scores, strict=True)]


def to_sample(rollout: Rollout, *, included: bool) -> Sample:
    return Sample(
        sample_id=rollout.sample_id,
        prompt_tokens=len(rollout.prompt.token_ids),
        token_ids=np.array([*rollout.prompt.token_ids, *rollout.response_ids], dtype=np.int64),
        loss_mask=np.full(len(rollout.response_ids), included),
        logprobs=np.array(rollout.logprobs, dtype=np.float32),
    )


class Producer:
    """Synchronous: generates, then scores. The whole batch's prompts are named on every rank; each takes every n-th."""

    def __init__(self, engine: Generator, score: Callable[[Sequence[Rollout]], list[Score]], rank: int, world_size: int):
        self.engine = engine
        self.score = score
        self.rank = rank
        self.world_size = world_size

    def produce(self, prompts: Sequence[Prompt], samples_per_prompt: int, *, greedy: bool = False) -> Produced:
        mine = range(self.rank, len(prompts), self.world_size)
        started = time.perf_counter()
        rollouts = self.engine.generate([prompts[i] for i in mine], samples_per_prompt, greedy=greedy) if mine else []
        generated = time.perf_counter()
        scores = self.score(rollouts) if rollouts else []
        scored = time.perf_counter()
        return Produced(
            rollouts=rollouts, scores=scores, places=[i * samples_per_prompt + k for i in mine for k in range(samples_per_prompt)],
            rollout_s=generated - started, reward_s=scored - generated,
        )  # fmt: skip
