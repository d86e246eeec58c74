"""Retries: a sample that failed is sampled again, so that its group keeps its size (``on_error: retry_sample``).

A sample fails if a reward function fails on it, if a step of its environment fails, or if its
agent's session fails. Retries happen while a rollout is collected, once the groups to collect are
scored. They go in rounds. Round r samples every failed sample once more, in one job of its own: the
same prompt, new random numbers, and the engine's current weights. The new sample takes the failed
one's place. A sample that fails in its last round stays failed, as under ``drop``.

1. The seed of round r depends on the sample's id and on r, never on a rank, a clock or the other
   samples. So every layout and every ``rollout.producer.mode`` asks for the same retries.
2. No retry is under way outside ``RolloutManager.collect``. A checkpoint holds only samples whose
   retries have not begun, or have ended. So a resumed run asks for the same retries.
3. A rank retries the samples of its own groups. A lost engine, an error or a silent engine in a
   retry has the same consequences as in any other job.

Retries leave the samples unbiased if failures do not depend on what a sample says, as if an API is
down. Otherwise the samples come from the policy's distribution given that nothing fails.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Collection, Sequence

from megatron_rl.distributed import collectives
from megatron_rl.rollout.job import RolloutJob
from megatron_rl.types import Rollout, Score

log = logging.getLogger(__name__)
Slot = tuple[int, int]  # a group's position in the rollout, and a sample's position in the group


class SampleRetry:
    """Replaces a rollout's failed samples by new ones, and counts them. See the module.

    reward: the maximum of retries of a sample on which a reward function failed; 0: none.
    environment: the maximum of retries of a sample whose environment or agent failed; 0: none.
    beside: whether the engine may generate retries while it generates other jobs.
    """

    def __init__(self, *, reward: int, environment: int, beside: bool) -> None:
        self._reward, self._environment, self._beside = reward, environment, beside
        self._num_retried = self._num_failed = 0

    def complete(self, job: RolloutJob, places: Sequence[int], sample: Callable[[RolloutJob], None]) -> None:
        """Sample the failed samples of scored groups again, until none fails or no retry is left. A collective.

        places: the positions in the rollout of this rank's groups. All of them must be scored.
        sample: a callable that generates and scores a job. It is a collective.
        """
        for number in itertools.count(1):
            failed = self._failed(job, places)
            again = [slot for slot, most in failed.items() if number <= most]
            if not any(collectives.gather_json(len(again))):
                break
            self._num_retried += len(again)
            if again:
                log.info("%d samples failed and are sampled again, retry %d: %s", len(again), number, _say(job, again))
            part = retry_job(job, again, number, beside=self._beside)
            sample(part)
            _put_back(part, job, again)
        self._num_failed += len(failed)
        if failed:
            log.warning(
                "%d samples failed in their last retry too, and are dropped: %s", len(failed), _say(job, failed)
            )

    def _failed(self, job: RolloutJob, places: Sequence[int]) -> dict[Slot, int]:
        """Return {failed sample: the maximum of its retries}, without the samples that are never retried."""
        most = {
            (place, index): self._most(rollout, score)
            for place in sorted(places)
            for index, (rollout, score) in enumerate(zip(job.rollouts[place], job.scores[place], strict=True))
        }
        return {slot: retries for slot, retries in most.items() if retries}

    def _most(self, rollout: Rollout, score: Score) -> int:
        if rollout.excluded is not None:
            return self._environment
        return 0 if score.error is None else self._reward

    def take_counts(self) -> dict[str, int]:
        """Return metric name → count on this rank since the last call."""
        counts = {"reward/retried": self._num_retried, "reward/retry_failed": self._num_failed}
        self._num_retried = self._num_failed = 0
        return counts


def retry_job(job: RolloutJob, slots: Sequence[Slot], number: int, *, beside: bool) -> RolloutJob:
    """Return the job of one round: one group of one sample for each failed sample, in the order of ``slots``.

    number: the round, from 1. A retry's prompt has the id ``<sample id>~<number>``, from which the
        engine derives its seed. No other prompt has such an id.

    Example: round 1 of sample ``17@0#3`` samples prompt ``17@0#3~1``.
    """
    failed = [job.rollouts[place][index] for place, index in slots]
    prompts = [
        dataclasses.replace(rollout.prompt, prompt_id=f"{rollout.sample_id}~{number}", attempt=0) for rollout in failed
    ]
    return RolloutJob(
        dict(enumerate(prompts)), range(len(prompts)), dict.fromkeys(range(len(prompts)), 1), beside=beside
    )


def _put_back(part: RolloutJob, job: RolloutJob, slots: Sequence[Slot]) -> None:
    """Put a round's samples in the places of the failed samples, under the failed samples' prompts and ids."""
    with job.change:
        for number, (place, index) in enumerate(slots):
            [sample], [score] = part.rollouts[number], part.scores[number]
            group, scores = list(job.rollouts[place]), list(job.scores[place])
            job.num_replaced_tokens += group[index].num_sampled
            group[index] = dataclasses.replace(
                sample, prompt=group[index].prompt, sample_index=group[index].sample_index
            )
            scores[index] = score
            job.rollouts[place], job.scores[place] = group, scores
        job.generation_s += part.generation_s


def _say(job: RolloutJob, slots: Collection[Slot]) -> str:
    """Return the first failed sample's id and the last line of its error."""
    place, index = next(iter(slots))
    rollout = job.rollouts[place][index]
    error = rollout.excluded or job.scores[place][index].error or ""
    return f"the first is {rollout.sample_id}: {(error.strip().splitlines() or ['?'])[-1][:300]}"
