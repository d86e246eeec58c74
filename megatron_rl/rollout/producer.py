"""Prompts → scored rollouts. Every rank generates and scores its own share of the prompts; groups stay whole on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.types import Rollout, Sample, Score


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
    """Synchronous: generates, then scores. The whole batch's prompts are named on every rank; each takes every n-th.

    share: (this rank's number among the ranks that take prompts, how many these are); None for one that takes none.
    """

    def __init__(self, score: Callable[[Sequence[Rollout]], list[Score]] | None, share: tuple[int, int] | None):
        self.scores = score
        self.share = share

    def places(self, num_prompts: int) -> range:
        """The prompts of the batch that are this rank's."""
        return range(0) if self.share is None else range(self.share[0], num_prompts, self.share[1])

    def score(self, rollouts: list[Rollout], prompts: Sequence[int], samples_per_prompt: int, rollout_s: float) -> Produced:
        """prompts: their places in the batch, in the order of the rollouts' groups."""
        started = time.perf_counter()
        scores = self.scores(rollouts) if rollouts else []
        return Produced(
            rollouts=rollouts, scores=scores, places=[i * samples_per_prompt + k for i in prompts for k in range(samples_per_prompt)],
            rollout_s=rollout_s, reward_s=time.perf_counter() - started,
        )  # fmt: skip
