"""Rollouts as all ranks see them: weights to the engines, prompts to rollouts, and an engine's failure met by every
rank together.

A device that trainer and engine share changes hands around both: the trainer's gradients and optimizer state leave it,
the engine's weights wake, weights are sent, the engine's keys and values wake, rollouts are made, the engine sleeps,
the trainer's state returns.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_rl.config import Config, RolloutConfig
from megatron_rl.distributed import collectives
from megatron_rl.distributed.platform import HOST
from megatron_rl.errors import EngineError
from megatron_rl.rollout.colocation import ColocatedDevice, DeviceOwner
from megatron_rl.rollout.engine import NO_WEIGHTS, Engine
from megatron_rl.rollout.worker import RolloutJob, RolloutWorker
from megatron_rl.types import Prompt, Rollout, Score

log = logging.getLogger(__name__)
WARN_GAP = {
    "float32": 1e-3,
    "bfloat16": 0.05,
}  # nats per token in the mean; float32's is a hundred times what two right ones show


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectDurations:
    """Seconds of one ``collect`` on this rank: waited for engines and reward workers, and scored in its own main
    thread."""

    waited_s: float
    scored_s: float


class RolloutManager:
    """Methods are collectives unless they say otherwise.

    export:  the trainer's weights under their Hugging Face names (``MegatronBackend.export``), and ``version`` their
    version. offload, restore: the trainer's way off a shared device and back; None where the engine has a device of its
    own.
    share:   (this rank's number among the ranks with prompts, how many these are); None for a rank without an engine.
    score_apart: whether ``score`` may be called in another thread than the main one.
    """

    def __init__(
        self,
        engine: Engine,
        score: Callable[[Sequence[Rollout]], list[Score]] | None,
        config: Config,
        *,
        export: Callable[[], Iterator[tuple[str, torch.Tensor]]],
        version: Callable[[], int],
        share: tuple[int, int] | None,
        offload: Callable[[], object] | None = None,
        restore: Callable[[], None] | None = None,
        score_apart: bool = False,
    ):
        self.engine, self.config = engine, config
        given = config.rollout.producer
        self.producer = RolloutWorker(
            engine, score, given, apart=score_apart, share=share, deadline_s=config.run.deadline_s
        )
        self.in_background = given.ahead > 0 or given.mode == "streaming"
        self.jobs: list[RolloutJob] = []  # started, and not collected whole
        self.sent_version = NO_WEIGHTS  # the same on every rank, whatever became of an engine since
        self._export, self._version = export, version
        self.device = ColocatedDevice(engine, offload, restore, self._note_memory)
        self.metrics: dict[str, float] = {}
        self.turns = self.samples = 0  # of the jobs finished since ``take_metrics``
        self.waited_s = 0.0  # for weights and rollouts since the last rollout's end
        self.last_end = time.perf_counter()
        self.totals = {
            "tokens": 0.0,
            "generation_s": 0.0,
            "waited_s": 0.0,
            "syncs": 0,
            "sync_s": 0.0,
            "sync_bytes": 0.0,
        }

    # ---- weights ---------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Hands the engines the current weights, unless they all have them: a step that moved nothing sends nothing.

        A sync that fails anywhere is sent again whole, to engines that are started again where they were lost;
        EngineError, on every rank, after ``weight_sync.attempts``. What is under way ends first, unless the engines
        take weights in between (``weight_sync.in_flight``).
        """
        version, attempts = self._version(), self.config.weight_sync.attempts
        if not self.config.weight_sync.in_flight:
            self._drain()
        for attempt in range(1, attempts + 1):
            lost = self._lost_anywhere()
            behind = collectives.gather_json(self.engine.weight_version != version)
            if not any(behind) and not lost:
                self.sent_version = version
                return
            if lost:
                self._drain()  # nobody generates while engines are started again
            self._together(self.device.to_weights)
            self._recover(lost)
            report = self.engine.load_weights(self._export(), version)
            sent = collectives.gather_json([report.failed, report.lost, report.num_bytes, report.seconds])
            failed = {name: why for part in sent for name, why in part[0].items()}
            self.engine.take_report(version, failed, {name for part in sent for name in part[1]})
            if not failed:
                self.sent_version = version
                self._note_sync(sent)
                return
            told = "; ".join(f"{name}: {why}" for name, why in failed.items())
            log.warning("sync of weight version %d failed (attempt %d of %d): %s", version, attempt, attempts, told)
        raise EngineError(
            f"weight version {version} did not arrive in {attempts} attempts (weight_sync.attempts): {told}"
        )

    def _recover(self, lost: Sequence[str]) -> None:
        unreached: list[str] = []
        self._together(lambda: unreached.extend(self.engine.recover(lost) or ()))
        everywhere = {name for part in collectives.gather_json(unreached) for name in part}
        if everywhere:
            self.engine.leave_out(everywhere)

    def _note_sync(self, sent: list) -> None:
        """sent: of each rank [failed, lost, bytes, seconds]."""
        num_bytes, seconds = max(part[2] for part in sent), max(part[3] for part in sent)
        self.waited_s += seconds
        self.totals["syncs"] += 1
        self.totals["sync_s"] += seconds
        self.totals["sync_bytes"] += num_bytes
        self.metrics["perf/weight_sync_bytes"] = float(num_bytes)
        self.metrics["perf/weight_sync_bytes_per_second"] = num_bytes / max(seconds, 1e-9)

    def _lost_anywhere(self) -> list[str]:
        return sorted({name for part in collectives.gather_json(self.engine.lost) for name in part})

    def _together(self, act: Callable[[], None]) -> None:
        error = None
        try:
            act()
        except Exception as met:  # noqa: BLE001 (raised on every rank by the next line, this one's first)
            error = met
        collectives.raise_on_all_ranks(error)

    # ---- rollouts --------------------------------------------------------------------------------------------------

    def job(
        self, prompts: Mapping[int, Prompt], samples_per_prompt: int, *, temperature: float | None = None
    ) -> RolloutJob:
        """This rank's share of prompts that are named by place on every rank. Not a collective, and nothing is
        generated yet."""
        places = sorted(prompts)
        mine = [places[k] for k in self.producer.places(len(places))]
        return RolloutJob(prompts, mine, samples_per_prompt, temperature=temperature)

    def restored_job(self, prompts: Mapping[int, Prompt]) -> RolloutJob:
        """One that was finished before a checkpoint; its groups are put into it, on whichever rank they are read."""
        return RolloutJob(prompts, (), self.config.rollout.samples_per_prompt)

    def start(self, job: RolloutJob) -> None:
        """From here on it is generated while the caller does something else, where engines have a device of their own;
        else by ``collect``. Weights must have been sent. Not a collective."""
        self.jobs.append(job)
        if self.in_background:
            self.producer.start(job)

    def collect(self, job: RolloutJob, places: Sequence[int]) -> CollectDurations:
        """Wait until every rank's share of the places is there, scored; return where the time went.

        Samples that an engine owes when it is lost are asked for again once it has weights again. An error of one rank
        is raised on every rank.
        """
        started, scored_s = time.perf_counter(), self.producer.scored_here_s
        mine = [place for place in places if place in job.mine]
        try:
            self._collect(job, mine)
        except Exception:
            self.jobs = [x for x in self.jobs if x is not job]  # whoever goes on after it does not owe this one
            raise
        scored_s = self.producer.scored_here_s - scored_s
        waited_s = time.perf_counter() - started - scored_s
        self.waited_s += waited_s
        self.totals["waited_s"] += waited_s
        return CollectDurations(waited_s=waited_s, scored_s=scored_s)

    def _collect(self, job: RolloutJob, mine: Sequence[int]) -> None:
        while True:
            if not self.in_background and any(collectives.gather_json(bool(job.missing))):
                self._generate_here(job)
            self._together(lambda: self.producer.wait(job, mine))
            lost = self._owed()
            if not any(lost):
                return
            self._mend(lost)

    def finish(self, job: RolloutJob) -> None:
        """To be called once a job was collected whole: its measures, and nothing is owed of it any more. Several jobs
        before one ``take_metrics`` add up."""
        self.jobs = [x for x in self.jobs if x is not job]
        parts = collectives.gather_json([job.num_tokens(), job.generation_s, job.num_turns(), job.num_samples()])
        tokens, seconds, now = sum(part[0] for part in parts), max(part[1] for part in parts), time.perf_counter()
        tokens += self.metrics.get("rollout/tokens", 0.0)
        seconds += self.metrics.get("perf/rollout_generation_s", 0.0)
        self.turns += sum(part[2] for part in parts)
        self.samples += sum(part[3] for part in parts)
        if self.config.environment.name is not None:
            self.metrics["rollout/turns_mean"] = self.turns / max(1, self.samples)
        self.metrics |= {
            "rollout/tokens": float(tokens),
            "perf/rollout_generation_s": seconds,
            "perf/rollout_tokens_per_second": tokens / max(seconds, 1e-9),
            "perf/rollout_wait_share": min(1.0, self.waited_s / max(now - self.last_end, 1e-9)),
        }

    def _generate_here(self, job: RolloutJob) -> None:
        self._together(self.device.to_engine)
        self.producer.generate(job)
        if not any(collectives.gather_json(job.lost is not None)):
            self._together(self.device.to_trainer)

    def settle(self) -> None:
        """Until nothing is under way on any rank, and nothing is owed; nothing ever is where ``collect`` generates."""
        while self.in_background:
            self._drain()
            lost = self._owed()
            if not any(lost):
                return
            self._mend(lost)

    def _owed(self) -> list[list[str]]:
        """Of each rank: why the engine was lost of the jobs that it owes something of."""
        return collectives.gather_json([x.lost for x in self.jobs if x.lost is not None])

    def _drain(self) -> None:
        self._together(lambda: [self.producer.drain(job) for job in self.jobs])

    def _mend(self, lost: Sequence[Sequence[str]]) -> None:
        """lost: of each rank, why its jobs' engine was lost."""
        for rank, texts in enumerate(lost):
            for text in dict.fromkeys(texts):
                log.warning("rank %d lost its engine; what it owes is asked for again: %s", rank, text)
        self._drain()
        self.sync_weights()
        for job in self.jobs if self.in_background else ():
            if job.lost is not None:
                self.producer.start(job)

    def produce(
        self, prompts: Mapping[int, Prompt], samples_per_prompt: int, *, temperature: float | None = None
    ) -> RolloutJob:
        """This rank's share of scored rollouts by the current weights, at once; what is under way ends before.

        temperature: an evaluation's (0: greedy), which stands in no rollout's measures; None: of rollouts,
        ``rollout.temperature``.
        """
        waited_s = self.waited_s
        self.settle()
        self.sync_weights()
        job = self.job(prompts, samples_per_prompt, temperature=temperature)
        self.start(job)
        self.collect(job, sorted(prompts))
        if temperature is not None:
            self.jobs, self.waited_s = [x for x in self.jobs if x is not job], waited_s
        else:
            self.finish(job)
        return job

    def take_metrics(self) -> dict[str, float]:
        """What was measured since the last call; not a collective."""
        taken, self.metrics = self.metrics, {}
        self.turns = self.samples = 0
        self.totals["tokens"] += taken.get("rollout/tokens", 0.0)
        self.totals["generation_s"] += taken.get("perf/rollout_generation_s", 0.0)
        self.waited_s, self.last_end = 0.0, time.perf_counter()
        return taken

    def _note_memory(self, ended: DeviceOwner) -> None:
        phase = {DeviceOwner.TRAINER: "update", DeviceOwner.WEIGHTS: "weight_sync", DeviceOwner.ENGINE: "rollout"}[
            ended
        ]
        self.metrics[f"perf/{phase}_peak_memory_bytes"] = float(HOST.take_peak_memory_bytes())

    def summary(self, run_s: float) -> str:
        """One line for the log at a run's end. run_s: its whole time."""
        t = self.totals
        return (
            f"rollouts: {t['tokens']:,.0f} tokens, {t['tokens'] / max(t['generation_s'], 1e-9):,.0f} a second; "
            f"weights sent {t['syncs']} times, {t['sync_s'] / max(t['syncs'], 1):.3f} s and "
            f"{t['sync_bytes'] / max(t['sync_s'], 1e-9) / 1e9:.2f} GB/s each; "
            f"{(t['waited_s'] + t['sync_s']) / max(run_s, 1e-9):.0%} of {run_s:,.0f} s waited for the two"
        )

    def close(self) -> None:
        self.engine.close()
        self.producer.close()


def guard_logprob_gap(sums: Mapping[str, float], rollout: RolloutConfig, dtype: str, *, fresh: bool = True) -> None:
    """Warns, or raises EngineError, where trainer and engine give other log-probs to the same tokens (in the mean, nats
    per token).

    sums: of a log-prob pass, over all ranks; see MegatronBackend.forward. A pass of no token says nothing. dtype:
    model.dtype.
    fresh: whether both had the same weights. Where they had not, a gap is what training did: only ``warn_logprob_gap``,
    where it is set, says something then.
    """
    if not sums.get("tokens"):
        return
    mean, highest = sums["logprob_gap_abs"] / sums["tokens"], sums["logprob_gap_max"]
    found = (
        f"the engine's log-probs are {mean:.3g} nats per token from the trainer's in the mean, {highest:.3g} at most"
    )
    if fresh and not mean <= (math.inf if rollout.max_logprob_gap is None else rollout.max_logprob_gap):
        raise EngineError(
            f"{found}, above rollout.max_logprob_gap={rollout.max_logprob_gap}: it samples from other weights, "
            "another tokenizer, dtype or temperature. Compare them on one prompt (docs/vllm.md), or raise the setting "
            "if the difference is meant"
        )
    default = WARN_GAP[dtype] if fresh else math.inf
    limit = default if rollout.warn_logprob_gap is None else rollout.warn_logprob_gap
    if mean > limit:
        log.warning(
            "%s, above rollout.warn_logprob_gap=%g%s",
            found,
            limit,
            "" if fresh else "; its weights are older than the trainer's",
        )
