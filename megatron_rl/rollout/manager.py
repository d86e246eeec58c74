"""The manager of all ranks' rollouts: sends weights, collects rollouts, and raises a failure on every rank together.

Trainer and engine may take turns on one device. First the trainer's gradients and optimizer state
are moved off the device, the engine allocates its weights, and new weights are sent. Then the
engine allocates its keys and values, and rollouts are made. At the end the engine frees its memory,
and the trainer's state returns.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.config import WeightSyncConfig
from megatron_rl.distributed import collectives
from megatron_rl.distributed.platform import HOST
from megatron_rl.errors import EngineError
from megatron_rl.rollout.colocation import ColocatedDevice, DeviceOwner, DeviceShare
from megatron_rl.rollout.engines.engine import NO_WEIGHTS
from megatron_rl.rollout.job import RolloutJob
from megatron_rl.rollout.rollout_metrics import RolloutMetrics
from megatron_rl.rollout.weight_source import WeightSource
from megatron_rl.rollout.worker import RolloutWorker
from megatron_rl.types import Prompt

if TYPE_CHECKING:
    from megatron_rl.rollout.speculation.history import History

log = logging.getLogger(__name__)
PARTS = 4  # parts of run.deadline_s; ranks that wait for engines meet after each part
MEET_S = 0.1  # seconds between two meetings of ranks that wait for most of a rollout
Retry = Callable[[RolloutJob, Sequence[int], Callable[[RolloutJob], None]], None]  # SampleRetry.complete


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectDurations:
    """Holds the seconds that one ``collect`` took on this rank.

    waited_s: the wait for engines and reward workers.
    scored_s: the scoring in this rank's own main thread.
    """

    waited_s: float
    scored_s: float


class RolloutManager:
    """Sends weights to the engines and collects the rollouts of all ranks.

    Its methods are collectives unless they say otherwise.

    worker: this rank's worker, with its engine.
    weights: gives the trainer's weights, which are sent to the engines.
    metrics: adds up the metrics of jobs and of weight syncs.
    models: the trainer's models on the device that the engine shares. Empty if the engine has its
        own device.
    retry: samples failed samples again (retry.py); None: none is sampled again.
    history: the earlier answers from which this rank's engine drafts tokens, for checkpoints; None if
        it drafts none from answers.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        weight_sync: WeightSyncConfig,
        *,
        weights: WeightSource,
        metrics: RolloutMetrics,
        models: Sequence[DeviceShare] = (),
        retry: Retry | None = None,
        history: History | None = None,
    ):
        self.worker, self.engine, self.weights, self.metrics = worker, worker.engine, weights, metrics
        self.weight_sync, self.in_background, self.retry = weight_sync, worker.in_background, retry
        self.history = history
        self.jobs: list[RolloutJob] = []  # started, and not yet collected whole
        self.sent_version = NO_WEIGHTS  # of the last sync; the same on every rank, even after an engine was lost
        self.device = ColocatedDevice(worker.engine, models, self._together, self._note_memory)

    # ---- weights ---------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Send the engines the current weights, unless all engines have them.

        If a sync fails on any rank, lost engines are started again, and the whole sync is repeated.
        After ``weight_sync.attempts`` failures, EngineError is raised on every rank.
        Generation under way ends first, unless the engines take weights during it
        (``weight_sync.in_flight``).
        """
        version, attempts = self.weights.version, self.weight_sync.attempts
        if not self.weight_sync.in_flight:
            self._drain()
        for attempt in range(1, attempts + 1):
            # Every rank learns whether any engine is lost or behind.
            lost = self._lost_anywhere()
            behind = collectives.gather_json(self.engine.weight_version != version)
            if not any(behind) and not lost:
                self.sent_version = version
                return
            if lost:
                self._drain()  # no rank generates while engines are started again
            self.device.to_weights()
            self._recover(lost)
            # Send the weights; a failure on one rank fails the attempt on all.
            report = self.engine.load_weights(self.weights.tensors(self.engine), version)
            reports = collectives.gather_json(
                [
                    report.failed,
                    report.lost,
                    report.num_bytes,
                    report.seconds,
                    report.sent_bytes,
                    report.changed_share,
                ]
            )
            failed = {name: reason for part in reports for name, reason in part[0].items()}
            self.engine.take_report(version, failed, {name for part in reports for name in part[1]})
            if not failed:
                self.sent_version = version
                self.metrics.note_sync(reports)
                return
            reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
            log.warning("sync of weight version %d failed (attempt %d of %d): %s", version, attempt, attempts, reasons)
        raise EngineError(
            f"weight version {version} did not arrive in {attempts} attempts (weight_sync.attempts): {reasons}"
        )

    def _recover(self, lost: Sequence[str]) -> None:
        unreached: list[str] = []
        self._together(lambda: unreached.extend(self.engine.recover(lost) or ()))
        everywhere = {name for part in collectives.gather_json(unreached) for name in part}
        if everywhere:
            self.engine.leave_out(everywhere)

    def _lost_anywhere(self) -> list[str]:
        return sorted({name for part in collectives.gather_json(self.engine.lost) for name in part})

    def _together(self, act: Callable[[], object]) -> None:
        error = None
        try:
            act()
        except Exception as caught:  # noqa: BLE001 (raised on every rank by the next line, this one's first)
            error = caught
        collectives.raise_on_all_ranks(error)

    def _patiently(self, wait: Callable[..., bool]) -> None:
        """Call ``wait`` again and again until it has returned True on every rank.

        All ranks meet after each call. So no rank waits in a collective until its time limit, even
        if another rank's engine computes longer than ``run.deadline_s``.

        wait: a callable with two keyword arguments: ``since``, time.monotonic() before the first
            call, and ``most_s``, the maximum of seconds of one call. It returns whether the wait
            has ended.
        """
        since, part_s, ended = time.monotonic(), self.worker.deadline_s / PARTS, [False]
        while not all(ended):
            mine: list[bool] = []
            self._together(lambda mine=mine: mine.append(wait(since=since, most_s=part_s)))
            ended = collectives.gather_json(mine[0])

    # ---- rollouts --------------------------------------------------------------------------------------------------

    def job(
        self, prompts: Mapping[int, Prompt], sizes: int | Mapping[int, int], *, temperature: float | None = None
    ) -> RolloutJob:
        """Return a job that holds this rank's prompts of one rollout. Not a collective.

        prompts: position in the rollout → prompt, for all ranks. Prompts are dealt to the ranks,
            and started, in this mapping's order.
        sizes: position → the number of samples of its prompt; or one number for all.
        temperature: the temperature of sampling (0: greedy). None: ``rollout.temperature``.

        Nothing is generated before ``start``.
        """
        places = list(prompts)
        mine = [places[k] for k in self.worker.places(len(places))]
        sizes = dict.fromkeys(prompts, sizes) if isinstance(sizes, int) else sizes
        return RolloutJob(prompts, mine, sizes, temperature=temperature)

    def start(self, job: RolloutJob) -> None:
        """Start a job. The weights that it samples with must have been sent before. Not a collective.

        The job is generated in the background if configured so, otherwise within ``collect``.
        """
        self.jobs.append(job)
        if self.in_background:
            self.worker.start(job)

    def collect(self, job: RolloutJob, places: Sequence[int]) -> CollectDurations:
        """Wait until each group at ``places`` is scored by its rank; return the seconds of waiting and of scoring.

        places: positions in the rollout, among the groups of all ranks.

        If an engine is lost, the samples that it had not finished are requested again after the
        engine has new weights. An error of one rank is raised on every rank. If configured, failed
        samples are sampled again, except those of an evaluation.
        """
        mine = [place for place in places if place in job.mine]
        try:
            return self._timed(lambda: self._collect_and_retry(job, mine))
        except Exception:
            self.release(job)  # a caller that catches the error and goes on need not collect the job
            raise

    def _timed(self, wait: Callable[[], object]) -> CollectDurations:
        started, scored_s = time.perf_counter(), self.worker.scored_here_s
        wait()
        scored_s = self.worker.scored_here_s - scored_s
        waited_s = time.perf_counter() - started - scored_s
        self.metrics.note_wait(waited_s)
        return CollectDurations(waited_s=waited_s, scored_s=scored_s)

    def collect_some(
        self, jobs: Sequence[RolloutJob], choose: Callable[[list[list[list[int]]]], list[int] | None]
    ) -> tuple[list[int], CollectDurations]:
        """Wait until ``choose`` accepts some of the groups that are scored so far.

        choose: a callable. Its argument holds, at [rank][job], the positions in the job's rollout of
            the rank's scored groups. It returns the positions that it chooses, or None to go on
            waiting.

        Returns the chosen positions, and the seconds of waiting and of scoring. The errors are as
        in ``collect``.
        """
        # Unlike collect, this releases no job after an error.
        chosen: list[int] = []
        durations = self._timed(lambda: chosen.extend(self._collect_some(jobs, choose)))
        return chosen, durations

    def _collect_some(
        self, jobs: Sequence[RolloutJob], choose: Callable[[list[list[list[int]]]], list[int] | None]
    ) -> list[int]:
        since, job = time.monotonic(), jobs[-1]
        while True:
            if not self.in_background and any(collectives.gather_json(bool(job.missing))):
                self._generate_here(job)
            self._together(lambda: [self.worker.wait(x, x.mine, since=since, most_s=MEET_S) for x in jobs])
            chosen = choose(collectives.gather_json([x.scored for x in jobs]))
            if chosen is not None:
                return chosen
            if any(lost := self._owed()):
                self._mend(lost)

    def _collect(self, job: RolloutJob, mine: Sequence[int]) -> None:
        while True:
            if not self.in_background and any(collectives.gather_json(bool(job.missing))):
                self._generate_here(job)
            self._patiently(functools.partial(self.worker.wait, job, mine))
            lost = self._owed()
            if not any(lost):
                return
            self._mend(lost)

    def _collect_and_retry(self, job: RolloutJob, mine: Sequence[int]) -> None:
        self._collect(job, mine)
        if self.retry is not None and job.temperature is None:
            self.retry(job, mine, self._sample_again)

    def _sample_again(self, job: RolloutJob) -> None:
        """Generate and score a job of retries. Engines that have slept, and so have no weights, get them first."""
        if not self.in_background and any(collectives.gather_json(self.engine.weight_version == NO_WEIGHTS)):
            self.sync_weights()
        self.start(job)
        try:
            self._collect(job, job.mine)
        finally:
            self.release(job)

    def finish(self, job: RolloutJob) -> None:
        """Release a job whose groups were all collected, and add its counts to the run's metrics.

        The counts of several jobs are added up until ``take_metrics`` returns them.
        """
        self.release(job)
        self.metrics.note_job(collectives.gather_json(self.metrics.counts_of(job)))

    def release(self, job: RolloutJob) -> None:
        """Forget a job, so that none of its groups has to be collected any more. Not a collective."""
        self.jobs = [other for other in self.jobs if other is not job]

    def _generate_here(self, job: RolloutJob) -> None:
        self.device.to_engine()
        if self.engine.is_elsewhere:
            self.worker.start(job)
            self._patiently(functools.partial(self.worker.wait_generated, job))
        else:
            self.worker.generate(job)
        if not any(collectives.gather_json(job.lost is not None)):
            self.device.to_trainer()

    def settle(self) -> None:
        """Wait until, on every rank, no job is being generated and no job waits for a lost engine.

        Returns at once if jobs are not generated in the background.
        """
        while self.in_background:
            self._drain()
            lost = self._owed()
            if not any(lost):
                return
            self._mend(lost)

    def _owed(self) -> list[list[str]]:
        """Return at [rank] why the rank's engine was lost: one text for each job that the loss left unfinished."""
        return collectives.gather_json([job.lost for job in self.jobs if job.lost is not None])

    def _drain(self) -> None:
        self._patiently(lambda **part: all(self.worker.wait_generated(job, **part) for job in self.jobs))

    def _mend(self, lost: Sequence[Sequence[str]]) -> None:
        """Send the engines weights again, and restart the jobs that are unfinished because an engine was lost.

        lost: for each rank the texts that say why its engine was lost.
        """
        for rank, texts in enumerate(lost):
            for text in dict.fromkeys(texts):
                log.warning("rank %d lost its engine; its missing samples are requested again: %s", rank, text)
        self._drain()
        self.sync_weights()
        for job in self.jobs if self.in_background else ():
            if job.lost is not None:
                self.worker.start(job)

    def produce(
        self, prompts: Mapping[int, Prompt], samples_per_prompt: int, *, temperature: float | None = None
    ) -> RolloutJob:
        """Sample and score a rollout with the current weights, after all earlier jobs have ended; return the job.

        The job holds this rank's groups.

        temperature: the temperature of an evaluation (0: greedy); the rollout metrics leave its job
            out. None: ``rollout.temperature``, and the metrics include the job.
        """
        waited_s = self.metrics.waited_s
        self.settle()
        self.sync_weights()
        job = self.job(prompts, samples_per_prompt, temperature=temperature)
        self.start(job)
        self.collect(job, sorted(prompts))
        if temperature is not None:
            self.release(job)
            self.metrics.waited_s = waited_s
        else:
            self.finish(job)
        return job

    def take_metrics(self) -> dict[str, float]:
        """Return metric name → value since the last call, and reset the metrics. Not a collective."""
        return self.metrics.take()

    def _note_memory(self, ended: DeviceOwner) -> None:
        phase = {DeviceOwner.TRAINER: "update", DeviceOwner.WEIGHTS: "weight_sync", DeviceOwner.ENGINE: "rollout"}[
            ended
        ]
        self.metrics.note_peak_memory(phase, HOST.take_peak_memory_bytes())

    def summary(self, run_s: float) -> str:
        """Return one line about rollouts and weight syncs, for the log at a run's end.

        run_s: the duration of the whole run in seconds.
        """
        return self.metrics.summary(run_s)

    def close(self) -> None:
        self.engine.close()
        self.worker.close()
