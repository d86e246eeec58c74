"""A job of the rollouts: one rank's groups of one rollout, from their prompts to their scores."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.types import Prompt, Rollout, Sample, Score


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Holds all samples of one prompt and their rewards: one Score per rollout."""

    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]

    @property
    def prompt(self) -> Prompt:
        return self.rollouts[0].prompt

    def samples(self, *, mask_truncated: bool = False) -> list[Sample]:
        """Return one Sample to train on for each rollout.

        A sample whose total reward is None is taken out of its group, and none of its tokens carries loss.
        Under ``mask_truncated`` (overlong filtering, DAPO, arXiv:2503.14476, section 3.4) a sample
        that was cut off carries no loss either. But its reward stays in its group's statistics.
        """
        return [
            to_sample(
                rollout, included=score.total is not None and not (mask_truncated and rollout.finish_reason == "length")
            )
            for rollout, score in zip(self.rollouts, self.scores, strict=True)
        ]


def to_sample(rollout: Rollout, *, included: bool) -> Sample:
    """Return a rollout as a Sample to train on. ``included``: if False, no token carries loss.

    Raises ValueError if ``loss_mask`` and the response differ in length.
    """
    num_tokens = len(rollout.response_ids)
    mask = np.ones(num_tokens, dtype=bool) if rollout.loss_mask is None else np.array(rollout.loss_mask, dtype=bool)
    if len(mask) != num_tokens:
        raise ValueError(
            f"sample {rollout.sample_id} has {num_tokens} response tokens, but its loss_mask has {len(mask)} entries; "
            "give one entry per token"
        )
    context = rollout.prompt.token_ids if rollout.context_ids is None else rollout.context_ids
    return Sample(
        sample_id=rollout.sample_id,
        prompt_tokens=len(context),
        token_ids=np.array([*context, *rollout.response_ids], dtype=np.int64),
        loss_mask=mask & included,
        logprobs=np.array(rollout.logprobs, dtype=np.float32),
        routed_experts=rollout.routed_experts,
        weight_version=rollout.weight_version,
    )


class RolloutJob:
    """Holds one rank's groups of one rollout. Threads read and write its fields under the lock ``change``.

    prompts: position in the rollout → prompt, for all ranks.
    mine: this rank's positions, in the order in which their groups are started.
    sizes: position → the number of samples of its group, for all ranks.
    rollouts: position → the group's generated samples, once all of them are complete.
    scores: position → the group's scores, once they are known.
    lost: why the engine was lost during the job; None if it was not.
    error: a thread's exception, for the main thread to raise; None without one.
    ended_s: position → seconds from the job's creation until its group was generated. Groups that
        came from a checkpoint are absent.
    temperature: the temperature of sampling (0: greedy). None: ``rollout.temperature``.
    beside: whether the job is generated at once, beside the jobs that were started before it.
    num_replaced_tokens: the number of sampled tokens of samples that retries replaced.
    """

    def __init__(
        self,
        prompts: Mapping[int, Prompt],
        mine: Sequence[int],
        sizes: Mapping[int, int],
        *,
        temperature: float | None = None,
        beside: bool = False,
    ) -> None:
        self.prompts, self.mine, self.sizes = dict(prompts), tuple(mine), dict(sizes)
        self.temperature, self.beside, self.num_replaced_tokens = temperature, beside, 0
        self.change = threading.Condition()
        self.rollouts: dict[int, list[Rollout]] = {}
        self.scores: dict[int, list[Score]] = {}
        self.lost: str | None = None
        self.error: BaseException | None = None
        self.generating, self.scoring = False, False
        self.generation_s = 0.0
        self.generating_since = 0.0  # time.monotonic(), while ``generating``
        self.made_at = time.monotonic()
        self.ended_s: dict[int, float] = {}

    @property
    def missing(self) -> list[int]:
        return [place for place in self.mine if place not in self.rollouts]

    @property
    def unscored(self) -> list[int]:
        """Return the positions of the groups that are generated but not scored, in the order in which they ended."""
        return [place for place in self.rollouts if place not in self.scores]

    @property
    def scored(self) -> list[int]:
        """Return the positions in the rollout of the groups that are scored, ascending.

        The scoring thread may add others at any time.
        """
        with self.change:
            return sorted(self.scores)

    def group(self, place: int) -> Group:
        return Group(rollouts=tuple(self.rollouts[place]), scores=tuple(self.scores[place]))

    def groups(self) -> dict[int, Group]:
        """Return position → group for this rank's groups, all of which must be scored."""
        return {place: self.group(place) for place in self.mine}

    def put(self, number: int, rollouts: Sequence[Rollout], scores: Sequence[Score] | None) -> None:
        """Add a group that is already generated, from a checkpoint or another job, to this rank's groups.

        number: the group's position in the rollout.
        scores: the group's scores; None if they are not known yet.
        """
        self.mine = tuple(sorted({*self.mine, number}))
        self.rollouts[number] = list(rollouts)
        if scores is not None:
            self.scores[number] = list(scores)

    def take_generation_s(self) -> float:
        """Return for how many seconds the job generated since the last call. The caller holds the lock ``change``."""
        seconds, now = self.generation_s, time.monotonic()
        if self.generating:
            seconds, self.generating_since = seconds + now - self.generating_since, now
        self.generation_s = 0.0
        return seconds

    def num_tokens(self) -> int:
        """Return the number of tokens that the engine sampled."""
        return self.num_replaced_tokens + sum(x.num_sampled for group in self.rollouts.values() for x in group)

    def num_turns(self) -> int:
        """Return the number of the policy's turns, added over all samples."""
        return sum(rollout.num_turns for group in self.rollouts.values() for rollout in group)

    def num_ended_by(self, reason: str) -> int:
        """Return the number of samples of a ``Rollout.finish_reason``, such as "length" for those cut off."""
        return sum(rollout.finish_reason == reason for group in self.rollouts.values() for rollout in group)

    def num_repeats(self) -> int:
        """Return the number of samples that equal an earlier one of their group, token for token."""
        groups = ([(sample.context_ids, sample.response_ids) for sample in group] for group in self.rollouts.values())
        return sum(len(group) - len(set(group)) for group in groups)

    def num_samples(self) -> int:
        return sum(len(group) for group in self.rollouts.values())
