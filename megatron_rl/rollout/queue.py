"""The queue of rollouts: decides when each is started, with which weights, and which of its groups are trained.

Every decision is made from data that all ranks hold: prompts, rewards, the samples' lengths and
weight versions, and the contents of the replay and re-roll buffers. No decision uses a clock. So a
run repeats to the bit, even if it generates rollouts while it trains earlier ones, or continues
from a checkpoint. There are two exceptions:

- Under ``weight_sync.in_flight`` time decides at which token of a completion the weights change.
- Under ``rollout.producer.straggler_share`` time decides which groups join the next rollout.

The queue itself drops groups by age only. Other choices are separate classes (interfaces:
groups/parts.py). They are dynamic sampling, replay (train old groups again), re-roll (sample a
prompt again) and stragglers (train late groups with the next rollout).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.config import ProducerConfig, TrainConfig, WeightSyncConfig
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout.groups.parts import GroupParts
from megatron_rl.rollout.groups.selection import Selection
from megatron_rl.rollout.job import RolloutJob
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.reward_metrics import count_errors, gather_errors, judge_errors, reward_metrics
from megatron_rl.rollout.scored_batch import GroupScorer, ScoredBatch
from megatron_rl.rollout.staleness import Start, may_start
from megatron_rl.rollout.training_batch import LogProbPass, TrainingBatch, merge_passes
from megatron_rl.types import Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Holds the settings by which rollouts are started and collected.

    passes_parts: whether old log-probs (log π_old) are computed for each part of a rollout as soon
        as the part is collected. A part has ``min_groups`` groups.
    passes_all: whether these log-probs are computed for every sample of a part. If False, only for
        samples that are not too old and may have signal (an advantage other than 0).
    """

    producer: ProducerConfig
    train: TrainConfig
    weight_sync: WeightSyncConfig
    steps_per_rollout: int
    passes_parts: bool
    passes_all: bool


class RolloutQueue:
    """Starts rollouts, collects them, and chooses which groups of each rollout are trained.

    Methods are collectives unless they say otherwise.
    """

    def __init__(
        self,
        settings: QueueSettings,
        manager: RolloutManager,
        prompts: PromptDataset,
        scorer: GroupScorer,
        timer: StepTimer,
        parts: GroupParts,
    ) -> None:
        self.settings, self.manager, self.prompts, self.scorer, self.timer = settings, manager, prompts, scorer, timer
        self.backend: MegatronBackend = scorer.backend
        self.parts = parts
        self.jobs: dict[int, RolloutJob] = {}  # rollout index → its job
        self.next_rollout = 0  # index of the next rollout to be started
        # Set when a checkpoint is saved or loaded, so that a run and its continuation send weights at the same moment.
        self.resend_weights = False

    # ---- rollouts are started ---------------------------------------------------------------------------------------

    def has(self, index: int) -> bool:
        """Return whether rollout ``index`` waits to be trained, or can still be started. Not a collective."""
        return index in self.jobs or (index >= self.next_rollout and self._has_prompts(index))

    def _has_prompts(self, index: int) -> bool:
        train = self.settings.train
        if train.epochs is None:
            return index < train.num_rollouts
        return self.prompts.remain(train.epochs) or self.parts.hand_out.has_groups(
            self.jobs.values(), self._number(index)
        )

    def _number(self, index: int) -> int:
        """Return the position, from 1, of rollout ``index`` among the rollouts that are not taken for training yet."""
        return index - min(self.jobs, default=self.next_rollout) + 1

    def start_ahead(self, index: int) -> None:
        """Start rollout ``index`` if it is not started yet, and as many later ones as the settings allow.

        The settings are ``rollout.producer.ahead`` and ``max_staleness_steps``.
        """
        settings = self.settings
        while self.next_rollout <= index + settings.producer.ahead and self._has_prompts(self.next_rollout):
            decision = may_start(
                trained=self.backend.weight_version,
                engine=self.manager.sent_version,
                between=self.next_rollout - index + self.parts.hand_out.late,
                steps_per_rollout=settings.steps_per_rollout,
                max_staleness_steps=settings.producer.max_staleness_steps,
                interval=settings.weight_sync.interval_steps,
                renew=self.resend_weights,
            )
            if decision is Start.LATER:
                return
            if decision is Start.AFTER_SYNC:
                self._send_weights()
            self._start_rollout(self.next_rollout, self._num_to_start(self.next_rollout))
            self.next_rollout += 1

    def _send_weights(self) -> None:
        if not self.settings.weight_sync.in_flight:
            with self.timer.measure("rollout"):
                self.manager.settle()
        with self.timer.measure("weight_sync"):  # sends nothing if the last step moved nothing
            self.manager.sync_weights()
        self.resend_weights = False

    def _num_to_start(self, index: int) -> int:
        train = self.settings.train
        is_last = train.epochs is None and index == train.num_rollouts - 1
        return self.parts.hand_out.num_to_start(self.jobs.values(), self._number(index), is_last=is_last)

    def _start_rollout(self, index: int, num_groups: int) -> None:
        again = self.parts.reroll.take(self._fraction_done(index), num_groups)
        prompts = [self.prompts.recall(*identity) for identity in again]
        prompts += self.prompts.next(num_groups - len(prompts), self.settings.train.epochs)
        arranged = self.parts.order.arrange(dict(enumerate(prompts)))
        self.jobs[index] = self.manager.job(arranged, self.parts.sizes.deal(arranged))
        self.manager.start(self.jobs[index])

    def _fraction_done(self, index: int) -> float:
        train = self.settings.train
        return index / train.num_rollouts if train.epochs is None else self.prompts.share_drawn(train.epochs)

    # ---- a rollout is taken -----------------------------------------------------------------------------------------

    def take(self, index: int) -> TrainingBatch:
        """Wait for rollout ``index``, and return its groups to be trained. Start it first if it is not started.

        Groups that are too old (``max_staleness_steps``) are dropped, and their prompts are drawn
        again later. Groups without signal (all advantages 0) may be replaced by groups of further
        prompts (``rollout.dynamic_sampling``), or by replayed groups. Raises NoSignalError if
        dynamic sampling finds too few groups and is configured to end the run.

        Afterwards the caller calls ``start_ahead``. Once the advantages are known, it calls
        ``remember``.
        """
        self.timer.add("weight_sync", 0.0)  # every row of the metrics has this time, even if nothing is sent
        self.start_ahead(index)
        scored, passes, num_dropped = self._collect_fresh(index)
        fresh = set(scored.facts.groups.tolist())
        selection = Selection.of_job(self.jobs[index], scored)
        num_dropped += self._drop_stale(index, fresh)
        # Metrics are taken before other groups replace any of them.
        metrics = self._metrics(index, selection) | {"async/dropped_stale": float(num_dropped)}
        metrics |= self.parts.hand_out.metrics() | self.parts.sizes.metrics(scored.facts)
        for group_filter in self.parts.filters:
            selection = group_filter.fill(index, selection)
        facts = selection.scored.facts
        return TrainingBatch(
            scored=selection.scored,
            known=merge_passes(facts, passes, fresh - selection.replaced),
            replayed=np.isin(facts.groups, sorted(selection.replayed)),
            trained_version=self.backend.weight_version,
            prompts=selection.prompts,
            groups=selection.groups,
            metrics=metrics | selection.metrics,
        )

    def _collect_fresh(self, index: int) -> tuple[ScoredBatch, list[LogProbPass], int]:
        """Collect a rollout's groups, and drop those older than ``max_staleness_steps``.

        If all are older, the rollout is started again with the current weights.

        Returns the groups that are kept, the results of log-prob passes over parts of the rollout,
        and the number of groups dropped.
        """
        num_dropped = 0
        while True:
            self.jobs[index] = self.parts.hand_out.take(self.jobs[index])
            collected = list(self._collect_parts(index))
            parts = [scored for scored, _ in collected]
            fresh = {number for scored in parts for number in self._fresh_places(scored)}
            if fresh:
                passes = [log_prob_pass for _, log_prob_pass in collected if log_prob_pass]
                return self.scorer.join(parts, fresh), passes, num_dropped
            num_dropped += self._drop_stale(index, set())
            self._send_weights()
            self._start_rollout(index, self.settings.train.prompts_per_rollout)

    def _collect_parts(self, index: int) -> Iterator[tuple[ScoredBatch, LogProbPass | None]]:
        """Yield a rollout in parts of ``min_groups`` scored groups, each with the result of its log-prob pass or None.

        A log-prob pass runs if ``passes_parts`` is set and the rollout has more than one part.
        """
        job, settings = self.jobs[index], self.settings
        places = sorted(job.prompts)
        size = settings.producer.min_groups or len(places)
        for first in range(0, len(places), size):
            scored = self._collect(job, places[first : first + size])
            self._note(scored, job.prompts)
            log_prob_pass = None
            if settings.passes_parts and size < len(places):
                fresh_S = np.isin(scored.facts.groups, self._fresh_places(scored))
                chosen = np.ones_like(scored.live) if settings.passes_all else scored.live & fresh_S
                with self.timer.measure("logprob"):
                    logprobs = self.backend.logprobs(scored.batch, chosen)
                log_prob_pass = LogProbPass(facts=scored.facts, chosen=chosen, logprobs=logprobs)
            yield scored, log_prob_pass
        self.manager.finish(job)

    def _collect(self, job: RolloutJob, places: Sequence[int]) -> ScoredBatch:
        with self.timer.enter("rollout"):
            durations = self.manager.collect(job, places)
        self.timer.add("rollout", durations.waited_s, before_s=durations.scored_s)
        self.timer.add("reward", durations.scored_s)
        with self.timer.measure("reward"):
            return self.scorer.gather({number: job.group(number) for number in places if number in job.mine})

    def _fresh_places(self, scored: ScoredBatch) -> list[int]:
        """Return the positions of the groups within ``max_staleness_steps``, ascending. Not a collective."""
        facts, limit = scored.facts, self.settings.producer.max_staleness_steps
        if limit is None:
            return sorted(set(facts.groups.tolist()))
        stale = self.backend.weight_version - facts.weight_versions > limit
        return sorted(set(facts.groups.tolist()) - set(facts.groups[stale].tolist()))

    def _drop_stale(self, index: int, fresh: set[int]) -> int:
        """Remove a rollout's job from ``jobs``. Put the prompts of its dropped groups back, to be drawn again.

        fresh: the positions of the groups that are kept; all others are dropped.

        Returns the number of groups dropped. Not a collective.
        """
        dropped = [prompt for number, prompt in sorted(self.jobs.pop(index).prompts.items()) if number not in fresh]
        if dropped:
            log.warning(
                "rollout %d: %d groups are older than rollout.producer.max_staleness_steps=%s; they are dropped, and "
                "their prompts are sampled again",
                index + 1,
                len(dropped),
                self.settings.producer.max_staleness_steps,
            )
            self.prompts.put_back(dropped)
        return len(dropped)

    def _note(self, scored: ScoredBatch, prompts: Mapping[int, Prompt]) -> None:
        """Pass newly scored groups to the run's StartOrder, GroupSizes and Reroll. Not a collective.

        StartOrder decides in which order later groups start, GroupSizes their numbers of samples.
        Reroll samples some prompts again.

        prompts: position in the rollout → prompt, for the groups of all ranks.
        """
        self.parts.order.note(prompts, scored.facts)
        self.parts.sizes.note(prompts, scored)
        self.parts.reroll.note(scored, prompts, self._fresh_places(scored))

    def _metrics(self, index: int, selection: Selection) -> dict[str, float]:
        """Return metric name → value for rewards and staleness. Raise RewardError if every sample's reward failed.

        selection: the groups of rollout ``index``, before dynamic sampling or replay replaces any.
        """
        scored = selection.scored
        groups = [selection.groups[number] for number in sorted(selection.groups)]
        pairs = [pair for group in groups for pair in zip(group.rollouts, group.scores, strict=True)]
        with self.timer.measure("reward"):
            errors = gather_errors(count_errors(pairs))
        judge_errors(errors, self.scorer.scoring.reward, f"rollout {index + 1}")
        staleness = self.backend.weight_version - scored.facts.weight_versions.min()
        return reward_metrics(self.scorer.scoring, scored, errors) | {"async/staleness_max": float(staleness)}

    def remember(self, taken: TrainingBatch, advantages: np.ndarray) -> dict[str, float]:
        """Offer the trained groups to the replay buffer; return the metrics of replay and of re-roll.

        Re-roll samples some prompts again. Not a collective.

        taken: the batch that ``take`` returned.
        advantages: float64 [S], the samples' advantages from rewards alone, without the noise of
            ``advantage.noise_std``.
        """
        self.parts.replay.remember(taken, advantages)
        return self.parts.replay.metrics() | self.parts.reroll.metrics()
