"""Stragglers: groups that are not finished when their rollout is trained, and are trained with the next rollout.

A rollout is trained once all but a few of its groups are generated and scored
(``rollout.producer.straggler_share``). The other groups, its stragglers, go on at their engines and
keep their tokens. Under ``weight_sync.in_flight`` they go on with newer weights. Which groups are
stragglers depends on timing, so the ranks agree on them in a collective before the training.

With P prompts per rollout and S stragglers, the first rollout starts P + S groups, each later
rollout P, and the last P − S. Each rollout trains P groups. Invariants
(tests/unit/rollout/test_stragglers.py):

1. Each rollout trains P groups (fewer only at the end of the data), and every started group is
   trained exactly once.
2. A group is trained with its own rollout or with the next. To ensure this, ``collect_most`` waits
   for all stragglers of the previous rollout.
3. After the last rollout no group is left unfinished or untrained.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout.job import RolloutJob
from megatron_rl.rollout.manager import CollectDurations, RolloutManager


class Stragglers:
    """Trains a rollout without its slowest groups, which are trained with the next rollout.

    It is a ``HandOut`` (parts.py).

    prompts_per_rollout: the number of groups that each rollout trains.
    num_stragglers: the number of groups that each rollout leaves unfinished. 0: the rollouts leave
        none, and the object only waits for the stragglers that a checkpoint holds.
    """

    def __init__(
        self, manager: RolloutManager, timer: StepTimer, *, prompts_per_rollout: int, num_stragglers: int
    ) -> None:
        self.manager, self.timer = manager, timer
        self.prompts_per_rollout, self.num_stragglers = prompts_per_rollout, num_stragglers
        self.late = int(num_stragglers > 0)
        self.left: RolloutJob | None = None

    @property
    def _is_split(self) -> bool:
        return self.num_stragglers > 0 or self.left is not None

    def _outstanding(self, jobs: Collection[RolloutJob]) -> int:
        """Return the number of groups, of all ranks, that are started and not yet taken for training."""
        return sum(len(job.prompts) for job in [*jobs, *([self.left] if self.left else [])])

    def num_to_start(self, jobs: Collection[RolloutJob], number: int, *, is_last: bool) -> int:
        if not self._is_split:
            return self.prompts_per_rollout
        return num_to_start(
            prompts_per_rollout=self.prompts_per_rollout,
            stragglers=self.num_stragglers,
            rollouts=number,
            outstanding=self._outstanding(jobs),
            is_last=is_last,
        )

    def has_groups(self, jobs: Collection[RolloutJob], number: int) -> bool:
        return self._is_split and self._outstanding(jobs) > (number - 1) * self.prompts_per_rollout

    def take(self, job: RolloutJob) -> RolloutJob:
        """Return a job of the groups to train now. A collective.

        Stragglers are groups that are left for the next rollout. If there can be any, wait until
        enough groups of all ranks together are scored for this rollout's training, and keep the
        others in ``self.left``. Otherwise return ``job`` at once, still unfinished.

        job: the job of the groups that this rollout started.
        """
        if not self._is_split:
            return job
        num_left = len(self.left.prompts) if self.left else 0
        num_groups = num_to_train(prompts_per_rollout=self.prompts_per_rollout, left=num_left, started=len(job.prompts))
        with self.timer.enter("rollout"):
            whole, durations = collect_most(self.manager, job, self.left, num_groups)
        self.timer.add("rollout", durations.waited_s, before_s=durations.scored_s)
        self.timer.add("reward", durations.scored_s)
        self.left = job if job.prompts else None
        return whole

    def metrics(self) -> dict[str, float]:
        if not self.num_stragglers:
            return {}
        return {"async/stragglers": float(len(self.left.prompts) if self.left else 0)}


def collect_most(
    manager: RolloutManager, job: RolloutJob, left: RolloutJob | None, num_groups: int
) -> tuple[RolloutJob, CollectDurations]:
    """Wait for ``num_groups`` scored groups; return a job of these groups, and the seconds of waiting and of scoring.

    job: the job of the groups that this rollout started. Groups that are not returned stay in it,
        and their generation goes on.
    left: the job of the previous rollout's stragglers; None if there are none. All of them are
        waited for and returned.
    num_groups: how many groups to return, over all ranks; the groups of ``left`` count.

    Raises the same errors as ``RolloutManager.collect``.
    """
    jobs = [job] if left is None else [left, job]
    num_left = 0 if left is None else len(left.prompts)

    def chosen_of(ranks: list[list[list[int]]]) -> list[int] | None:
        chosen = choose([number for scored in ranks for number in scored[-1]], num_groups - num_left)
        return chosen if sum(len(places) for scored in ranks for places in scored[:-1]) == num_left else None

    chosen, durations = manager.collect_some(jobs, chosen_of)
    whole = hand_out(job, left, chosen)
    if left is not None:
        manager.release(left)
    if not job.prompts:
        manager.release(job)
    return whole, durations


def num_to_start(
    *, prompts_per_rollout: int, stragglers: int, rollouts: int, outstanding: int, is_last: bool = False
) -> int:
    """Return the number of groups that a rollout starts.

    stragglers: the number of groups that a rollout leaves unfinished.
    rollouts: the number of rollouts that are not trained yet, up to and including this one.
    outstanding: the number of groups that were started and not trained.
    is_last: whether this is the last rollout.

    Example: three rollouts with ``prompts_per_rollout=8`` and ``stragglers=2``. The first starts 10
    groups (rollouts 1, outstanding 0). The second, started before the first is trained, starts 8
    (rollouts 2, outstanding 10). The last starts 6 (rollouts 2, outstanding 10).
    """
    wanted = rollouts * prompts_per_rollout + (0 if is_last else stragglers) - outstanding
    return max(0, min(wanted, prompts_per_rollout + stragglers))


def num_to_train(*, prompts_per_rollout: int, left: int, started: int) -> int:
    """Return how many groups a rollout trains: ``prompts_per_rollout``, or all groups if there are fewer.

    The stragglers of the previous rollout come first, and all of them are trained in any case. The
    rollout's own groups follow.

    left: the number of stragglers of the previous rollout.
    started: the number of groups that the rollout itself started.
    """
    return max(left, min(prompts_per_rollout, left + started))


def choose(whole: Collection[int], room: int) -> list[int] | None:
    """Return the numbers of the groups to train now: of the scored groups, the ``room`` lowest numbers.

    None if fewer than ``room`` groups are scored.

    whole: the numbers, in the rollout, of the groups that are scored.
    room: how many numbers to return.
    """
    return sorted(whole)[:room] if len(whole) >= room else None


def hand_out(job: RolloutJob, left: RolloutJob | None, places: Collection[int]) -> RolloutJob:
    """Move all groups of ``left``, then the groups ``places`` of ``job``, to a new job; return the new job.

    All moved groups must be scored. ``job`` keeps its other groups under their old numbers. The new
    job numbers its groups from 0. Every rank makes the same call, so the new numbers are the same
    on all ranks. Not a collective.

    places: the numbers, in the rollout, of the groups of ``job`` to move.
    """
    whole = RolloutJob({}, (), {})
    whole.made_at = job.made_at
    for source, chosen in ((left, () if left is None else sorted(left.prompts)), (job, sorted(places))):
        if source is not None:
            with source.change:
                _move(source, whole, chosen)
    return whole


def _move(source: RolloutJob, whole: RolloutJob, places: Collection[int]) -> None:
    mine, shift = set(source.mine), source.made_at - whole.made_at
    for old in places:
        new = len(whole.prompts)
        whole.prompts[new], whole.sizes[new] = source.prompts.pop(old), source.sizes.pop(old)
        if old in mine:
            whole.put(new, source.rollouts.pop(old), source.scores.pop(old))
            if old in source.ended_s:  # at least 0, so that a group that ended before this rollout began adds no tail
                whole.ended_s[new] = max(0.0, source.ended_s.pop(old) + shift)
    source.mine = tuple(number for number in source.mine if number in source.prompts)
    whole.generation_s = max(whole.generation_s, source.take_generation_s())
