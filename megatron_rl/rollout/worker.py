"""The rollout worker of one rank: turns prompts into scored groups, at once or in threads while the trainer trains.

Every rank knows all prompts of a rollout by their position in it. With n ranks that sample prompts,
each takes every n-th prompt. All samples of a prompt (a group) stay on one rank. A job is one
rank's groups of one rollout. One thread generates, job after job. Under
``rollout.producer.straggler_share`` the next job begins beside the last groups of the job before. A
job of retries may be generated beside others. With reward workers a second thread scores. If
configured, it scores finished groups while others are still generated. Reward functions of the
rank's own process are called in its main thread, where signals work.

1. Every group of a job is stored once in ``rollouts`` and then once in ``scores``, even if engines
   are lost in between. A retry (retry.py) later replaces single samples of groups that are in both.
2. A call of a reward function has groups of one job only. Each call but a job's last has at least
   ``min_groups`` / n groups.
3. ``wait`` raises EngineError after ``run.deadline_s`` without progress: no group was generated or
   scored, and no engine reported that it computes. The wait ends earlier if the groups are scored,
   if a thread failed, or if the engine was lost and its generation has ended.
4. Only jobs that the caller has started are generated or scored. So the caller bounds the memory.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence

from megatron_rl.config import ProducerConfig
from megatron_rl.errors import EngineError
from megatron_rl.rollout.engines.engine import Engine, EngineLost
from megatron_rl.rollout.job import RolloutJob
from megatron_rl.types import Rollout, Score

CLOSE_S = 10.0  # seconds for each thread to end after the engine was closed
LOOK_S = 1.0  # seconds between two looks at an engine's progress
INF = math.inf


class RolloutWorker:
    """Generates and scores one rank's groups of each rollout.

    score: a callable from a list of rollouts to one Score each; None if a run has no rewards.
    apart: whether ``score`` may be called outside the main thread.
    share: (this rank's number among the ranks that sample prompts, the number of these ranks). None
        for a rank that samples none.
    in_background: whether jobs are generated in threads, while the trainer trains.
    """

    def __init__(
        self,
        engine: Engine,
        score: Callable[[Sequence[Rollout]], list[Score]] | None,
        config: ProducerConfig,
        *,
        apart: bool,
        share: tuple[int, int] | None,
        deadline_s: float,
    ) -> None:
        self.engine, self.config, self.share, self.deadline_s = engine, config, share, deadline_s
        self.score = score
        self._enough = max(1, (config.min_groups or 0) // (share[1] if share else 1))  # groups of one rank in a part
        self._apart = apart and config.mode != "sync"
        self._in_parts = config.mode == "streaming" or config.straggler_share > 0
        self.in_background = config.ahead > 0 or config.mode == "streaming"
        self._jobs: queue.SimpleQueue[RolloutJob | None] = queue.SimpleQueue()
        self._to_score: queue.SimpleQueue[RolloutJob | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._thread_change = threading.Lock()
        self._closed = False
        self._progressed_at = time.monotonic()  # when a group was last generated or scored
        self.scored_here_s = 0.0  # total seconds of scoring in the main thread

    def places(self, num_prompts: int) -> range:
        """Return the positions of this rank's prompts in a rollout of ``num_prompts``."""
        return range(0) if self.share is None else range(self.share[0], num_prompts, self.share[1])

    def start(self, job: RolloutJob) -> None:
        """Begin to generate the missing groups of a job in the background."""
        if not self._threads:
            self._begin(self._generate_jobs, "rollouts")
            if self._apart:
                self._begin(self._score_jobs, "rewards")
        with job.change:
            job.lost = None
            job.generating = bool(job.missing)
        if job.generating and job.beside:
            self._begin(lambda: self.generate(job), "rollouts")
        elif job.generating:
            self._jobs.put(job)
        elif self._apart:
            self._to_score.put(job)

    def _begin(self, act: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=act, daemon=True, name=name)
        with self._thread_change:
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]
            thread.start()

    def _generate_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self.config.straggler_share:
                self._generate_to_tail(job)
            else:
                self.generate(job)

    def _generate_to_tail(self, job: RolloutJob) -> None:
        """Generate a job in a new thread. Return once few enough of its groups are missing.

        The limit is the fraction ``straggler_share`` of the job's groups, but at least one group.
        """
        self._begin(lambda: self.generate(job), "rollouts")
        with job.change:
            most = max(1, int(self.config.straggler_share * len(job.mine)))
            while job.generating and len(job.missing) > most:
                job.change.wait(LOOK_S)

    def generate(self, job: RolloutJob) -> None:
        """Generate the missing groups of a job in the caller's thread. Errors are recorded in the job, not raised."""
        lost, error = None, None
        with job.change:
            places, job.generating_since = job.missing, time.monotonic()

        def keep(index: int, rollouts: list[Rollout]) -> None:
            with job.change:
                job.rollouts[places[index]] = rollouts
                self._progressed_at = time.monotonic()
                job.ended_s[places[index]] = self._progressed_at - job.made_at
                job.change.notify_all()
            if self._apart and self._in_parts:
                self._to_score.put(job)

        try:
            if places:
                prompts = [job.prompts[place] for place in places]
                sizes = [job.sizes[place] for place in places]
                self.engine.generate(prompts, sizes, temperature=job.temperature, on_finished=keep)
        except EngineLost as caught:
            lost = str(caught)
        except BaseException as caught:  # noqa: BLE001 (raised in the main thread, by wait)
            error = caught
        with job.change:
            job.lost, job.error, job.generating = lost, job.error or error, False
            job.generation_s += time.monotonic() - job.generating_since
            self._progressed_at = time.monotonic()
            job.change.notify_all()
        if self._apart:
            self._to_score.put(job)

    def _score_jobs(self) -> None:
        while (job := self._to_score.get()) is not None:
            self._score_ready(job)

    def _score_ready(self, job: RolloutJob) -> bool:
        """Score the groups that are generated, if there are enough of them; return whether any were scored.

        Once all groups are generated, any number is enough. Before that, groups are scored only if
        scoring beside generation is configured, and only from this rank's share of ``min_groups``
        on. Only one thread at a time may call this for a job.
        """
        # Choose the groups under the job's lock.
        with job.change:
            ready = [] if job.error else job.unscored
            enough = len(job.rollouts) == len(job.mine) or (self._in_parts and len(ready) >= self._enough)
            if not ready or not enough:
                return False
            if len(job.rollouts) == len(job.mine):
                ready.sort()
            rollouts = [rollout for number in ready for rollout in job.rollouts[number]]
            job.scoring = True
        started, scores, error = time.perf_counter(), [], None
        # Score without the lock, so that generation goes on.
        try:
            scores = self.score(rollouts)
        except BaseException as caught:  # noqa: BLE001 (raised in the main thread, by wait)
            error = caught
        # Give each group its scores, and wake the threads that wait for them.
        with job.change:
            job.error, job.scoring = job.error or error, False
            self._progressed_at = time.monotonic()
            self.scored_here_s += 0.0 if self._apart else time.perf_counter() - started
            scored = iter(scores)
            for number in ready if error is None else []:
                job.scores[number] = list(itertools.islice(scored, len(job.rollouts[number])))
            job.change.notify_all()
        return True

    def wait(self, job: RolloutJob, places: Sequence[int], *, since: float | None = None, most_s: float = INF) -> bool:
        """Wait until the groups at ``places`` are scored, or the engine is lost; return whether the wait has ended.

        places: positions in the rollout of groups that this rank samples.
        since: time.monotonic() when the wait began, if a caller splits it into several calls. None:
            now.
        most_s: the maximum of seconds of this call, after which it returns False.

        If the engine is lost, ``job.lost`` says why. Raises the job's error. Raises EngineError if
        nothing has progressed for ``run.deadline_s``.
        """
        began, part_ends_at = time.monotonic() if since is None else since, time.monotonic() + most_s
        while True:
            if not self._apart and self._score_ready(job):
                continue
            with job.change:
                if job.error:
                    raise job.error
                if all(number in job.scores for number in places) or (job.lost is not None and not job.generating):
                    return True
                if time.monotonic() >= part_ends_at:
                    return False
                if not self._waits_on(job, began, part_ends_at):
                    generated = all(number in job.rollouts for number in places) and (job.scoring or not job.generating)
                    raise EngineError(self._late(job, "scored" if generated else "generated"))

    def wait_generated(self, job: RolloutJob, *, since: float | None = None, most_s: float = INF) -> bool:
        """Wait until no group of a job is being generated. Arguments, result and errors are as in ``wait``."""
        began, part_ends_at = time.monotonic() if since is None else since, time.monotonic() + most_s
        with job.change:
            while job.generating:
                if time.monotonic() >= part_ends_at:
                    return False
                if not self._waits_on(job, began, part_ends_at):
                    raise EngineError(self._late(job, "generated"))
        return True

    def _waits_on(self, job: RolloutJob, began: float, part_ends_at: float) -> bool:
        """Wait for a change of the job, LOOK_S seconds at most. Return whether the caller may go on waiting.

        Returns False if nothing has progressed for ``deadline_s`` seconds, else True, with or
        without a change. The caller holds the job's lock.

        began: time.monotonic() when the caller's wait began.
        part_ends_at: time.monotonic() after which this method does not wait any longer.
        """
        ends_at = max(began, self._progressed_at, self.engine.progressed_at) + self.deadline_s
        left_s = min(ends_at, part_ends_at, time.monotonic() + LOOK_S) - time.monotonic()
        return job.change.wait(max(0.0, left_s)) or time.monotonic() < ends_at

    def _late(self, job: RolloutJob, stage: str) -> str:
        owed = job.missing if stage == "generated" else sorted(job.unscored)
        first = f" ({len(owed)} of {len(job.mine)}, the first is prompt {job.prompts[owed[0]].name})" if owed else ""
        return (
            f"groups of a rollout were not {stage} within run.deadline_s={self.deadline_s:g} s, and no engine "
            f"reported progress{first}; raise run.deadline_s, or read the engine's log"
        )

    def close(self) -> None:
        """End the threads and drop their unfinished work. Call it after the engine's ``close``. It may be repeated."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._to_score.put(None)
            for thread in self._threads:
                thread.join(CLOSE_S)
