"""The queue of rollouts: decides when each is started, with which weights, and which of its groups are trained.

Every decision is made from data that all ranks hold (prompts, facts, rewards, versions, the buffers' entries), never
from a clock: a run that generates ahead repeats to the bit, and so does a run that goes on from a checkpoint. Only
``weight_sync.in_flight`` lets time decide at which token of a completion the weights change, and
``rollout.producer.straggler_share`` which groups join the next rollout.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.config import Config
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.errors import NoSignalError
from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.replay_buffer import Entry, ReplayBuffer, group_scores
from megatron_rl.rollout.reroll_buffer import RerollBuffer, failed_groups
from megatron_rl.rollout.reward_errors import judge_errors
from megatron_rl.rollout.selection import Selection
from megatron_rl.rollout.staleness import Start, may_start
from megatron_rl.rollout.start_order import StartOrder
from megatron_rl.rollout.stragglers import num_to_start, num_to_train
from megatron_rl.rollout.training_batch import (
    LogProbPass,
    ScoredBatch,
    TrainingBatch,
    kept_places,
    merge_passes,
    reward_metrics,
    score_groups,
)
from megatron_rl.rollout.worker import Group, RolloutJob
from megatron_rl.types import Prompt

log = logging.getLogger(__name__)


class RolloutQueue:
    """Starts rollouts, collects them, and chooses the groups of each that are trained.

    Methods are collectives unless they say otherwise.

    passes_parts: whether the parts of a rollout are passed for log-probs as soon as each is collected.
    passes_all:   whether such a pass takes every sample of a part, or only those that may have signal.
    """

    def __init__(
        self,
        config: Config,
        backend: MegatronBackend,
        manager: RolloutManager,
        prompts: PromptDataset,
        timer: StepTimer,
        *,
        passes_parts: bool,
        passes_all: bool,
        steps_per_rollout: int,
    ) -> None:
        self.config, self.backend, self.manager, self.prompts, self.timer = config, backend, manager, prompts, timer
        self.settings = config.rollout.producer
        self.passes_parts, self.passes_all, self.steps_per_rollout = passes_parts, passes_all, steps_per_rollout
        self.replay = ReplayBuffer(config.replay, config.run.seed)
        self.replay_groups: dict[str, Group] = {}  # this rank's groups of the replay buffer, by their prompts' names
        self.reroll = RerollBuffer(config.reroll)
        self.start_order = StartOrder(longest_first=config.rollout.start_order == "longest_first")
        self.num_stragglers = self.settings.num_stragglers(config.train.prompts_per_rollout)
        self.left: RolloutJob | None = None  # the stragglers of the rollout that was taken last
        self.jobs: dict[int, RolloutJob] = {}  # by the rollout's index
        self.next_rollout = 0  # the next one to be started
        # Set by a checkpoint: a run that goes on from it has engines with the weights of that moment.
        self.resend_weights = False

    # ---- rollouts are started ---------------------------------------------------------------------------------------

    def has(self, index: int) -> bool:
        """Return whether the run has a rollout of this index. Not a collective."""
        return index in self.jobs or (index >= self.next_rollout and self._has_prompts(index))

    def _has_prompts(self, index: int) -> bool:
        train = self.config.train
        if train.epochs is None:
            return index < train.num_rollouts
        return self.prompts.remain(train.epochs) or (
            self._is_split and self._outstanding > (index - self._first) * train.prompts_per_rollout
        )

    @property
    def _is_split(self) -> bool:
        """Return whether rollouts leave groups under way, or one did before a checkpoint."""
        return self.num_stragglers > 0 or self.left is not None

    @property
    def _first(self) -> int:
        """Return the index of the first rollout that is not taken."""
        return min(self.jobs, default=self.next_rollout)

    @property
    def _outstanding(self) -> int:
        """Count the groups, over all ranks, that are started and not taken."""
        return sum(len(job.prompts) for job in [*self.jobs.values(), *([self.left] if self.left else [])])

    def start_ahead(self, index: int) -> None:
        """Start rollout ``index`` if it is not started, and the later ones that ``max_staleness_steps`` allows."""
        while self.next_rollout <= index + self.settings.ahead and self._has_prompts(self.next_rollout):
            decision = may_start(
                trained=self.backend.weight_version,
                engine=self.manager.sent_version,
                between=self.next_rollout - index + (self.num_stragglers > 0),  # stragglers are trained one later
                steps_per_rollout=self.steps_per_rollout,
                max_staleness_steps=self.settings.max_staleness_steps,
                interval=self.config.weight_sync.interval_steps,
                renew=self.resend_weights,
            )
            if decision is Start.LATER:
                return
            if decision is Start.AFTER_SYNC:
                self._send_weights()
            self._start_rollout(self.next_rollout, self._room(self.next_rollout))
            self.next_rollout += 1

    def _send_weights(self) -> None:
        if not self.config.weight_sync.in_flight:
            with self.timer.measure("rollout"):
                self.manager.settle()
        with self.timer.measure("weight_sync"):  # sends nothing if the last step moved nothing
            self.manager.sync_weights()
        self.resend_weights = False

    def _room(self, index: int) -> int:
        """Return the number of groups that a rollout starts."""
        train = self.config.train
        if not self._is_split:
            return train.prompts_per_rollout
        return num_to_start(
            prompts_per_rollout=train.prompts_per_rollout,
            stragglers=self.num_stragglers,
            rollouts=index - self._first + 1,
            outstanding=self._outstanding,
            is_last=train.epochs is None and index == train.num_rollouts - 1,
        )

    def _start_rollout(self, index: int, room: int) -> None:
        epochs = self.config.train.epochs
        rerolled = self.reroll.take(self._fraction_done(index), room)
        prompts = [self.prompts.recall(*key) for key in rerolled]
        prompts += self.prompts.next(room - len(prompts), epochs)
        arranged = self.start_order.arrange(dict(enumerate(prompts)))
        self.jobs[index] = self.manager.job(arranged, self.config.rollout.samples_per_prompt)
        self.manager.start(self.jobs[index])

    def _fraction_done(self, index: int) -> float:
        train = self.config.train
        return index / train.num_rollouts if train.epochs is None else self.prompts.share_drawn(train.epochs)

    # ---- a rollout is taken -----------------------------------------------------------------------------------------

    def take(self, index: int) -> TrainingBatch:
        """Wait for rollout ``index``, started now if it was not before, and return its groups to be trained.

        Groups that are too old are dropped and their prompts come again; groups without signal may give way to groups
        of further prompts (``rollout.dynamic_sampling``) or to replayed ones. Raises NoSignalError if dynamic sampling
        does not help and is to end the run. Call ``start_ahead`` after it, and ``remember`` once the advantages are
        known.
        """
        self.timer.add("weight_sync", 0.0)  # every row of the metrics has this time, even if nothing is sent
        self.start_ahead(index)
        # Collect it in parts. If all its groups are too old, generate it again by the current weights.
        num_dropped = 0
        while True:
            self._hand_out(index)
            parts = list(self._collect_parts(index))
            fresh = {place for scored, _ in parts for place in self._fresh_places(scored)}
            if fresh:
                break
            num_dropped += self._drop_stale(index, set())
            self._send_weights()
            self._start_rollout(index, self.config.train.prompts_per_rollout)
        job = self.jobs[index]
        live = {place for scored, _ in parts for place in kept_places(self.config, scored)}
        selection = Selection.of_job(job, fresh, live)
        num_dropped += self._drop_stale(index, fresh)
        # Score the groups that are left as one batch; metrics are taken before other groups replace any of them.
        scored = parts[0][0]
        if len(parts) > 1 or fresh != set(scored.facts.groups.tolist()):
            scored = score_groups(self.config, self.backend, selection.groups)
        staleness = self.backend.weight_version - scored.facts.weight_versions.min()
        judge_errors(scored.errors, self.config.reward, f"rollout {index + 1}")
        metrics = reward_metrics(self.config, scored)
        metrics |= {"async/staleness_max": float(staleness), "async/dropped_stale": float(num_dropped)}
        if self.num_stragglers:
            metrics["async/stragglers"] = float(len(self.left.prompts) if self.left else 0)
        # Fill the places of groups without signal.
        selection, refill_metrics = self._refill(selection)
        selection, replay_metrics = self._replay(index, selection)
        with self.timer.measure("reward"):
            if selection.replaced:
                scored = score_groups(self.config, self.backend, selection.groups)
        passes = [log_prob_pass for _, log_prob_pass in parts if log_prob_pass]
        return TrainingBatch(
            scored=scored,
            known=merge_passes(scored.facts, passes, fresh - selection.replaced),
            replayed=np.isin(scored.facts.groups, sorted(selection.replayed)),
            trained_version=self.backend.weight_version,
            prompts=selection.prompts,
            groups=selection.groups,
            metrics=metrics | refill_metrics | replay_metrics,
        )

    def _hand_out(self, index: int) -> None:
        """Wait until enough of a rollout is scored, and put aside what stays under way (rollout/stragglers.py)."""
        if not self._is_split:
            return
        job, left = self.jobs[index], self.left
        num_groups = num_to_train(
            prompts_per_rollout=self.config.train.prompts_per_rollout,
            left=len(left.prompts) if left else 0,
            started=len(job.prompts),
        )
        with self.timer.enter("rollout"):
            self.jobs[index], durations = self.manager.collect_most(job, left, num_groups)
        self.timer.add("rollout", durations.waited_s, before_s=durations.scored_s)
        self.timer.add("reward", durations.scored_s)
        self.left = job if job.prompts else None

    def _collect_parts(self, index: int) -> Iterator[tuple[ScoredBatch, LogProbPass | None]]:
        """Yield a rollout in parts of ``min_groups`` as they come: scored and, if configured, passed for log-probs."""
        job = self.jobs[index]
        places = sorted(job.prompts)
        size = self.settings.min_groups or len(places)
        for first in range(0, len(places), size):
            scored = self._collect(job, places[first : first + size])
            self._note(scored, job.prompts)
            log_prob_pass = None
            if self.passes_parts and size < len(places):
                fresh_S = np.isin(scored.facts.groups, self._fresh_places(scored))
                chosen = np.ones_like(scored.live) if self.passes_all else scored.live & fresh_S
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
            return score_groups(
                self.config, self.backend, {place: job.group(place) for place in places if place in job.mine}
            )

    def _fresh_places(self, scored: ScoredBatch) -> list[int]:
        """Return the places of groups that are not too old. Not a collective."""
        facts, limit = scored.facts, self.settings.max_staleness_steps
        if limit is None:
            return sorted(set(facts.groups.tolist()))
        stale = self.backend.weight_version - facts.weight_versions > limit
        return sorted(set(facts.groups.tolist()) - set(facts.groups[stale].tolist()))

    def _drop_stale(self, index: int, kept: set[int]) -> int:
        """End a rollout's job; put back the prompts of places not kept and return their number. Not a collective."""
        dropped = [prompt for place, prompt in sorted(self.jobs.pop(index).prompts.items()) if place not in kept]
        if dropped:
            log.warning(
                "rollout %d: %d groups are older than rollout.producer.max_staleness_steps=%s and are asked again",
                index + 1,
                len(dropped),
                self.settings.max_staleness_steps,
            )
            self.prompts.put_back(dropped)
        return len(dropped)

    def _note(self, scored: ScoredBatch, prompts: Mapping[int, Prompt]) -> None:
        """Note how long groups came, and for the re-roll buffer which of them failed as a whole. Not a collective."""
        self.start_order.note(prompts, scored.facts)
        if self.config.reroll.max_groups:
            failed = failed_groups(scored.rewards.totals, scored.facts.groups, self.config.reroll.fail_threshold)
            failed = np.intersect1d(failed, self._fresh_places(scored))
            self.reroll.note([(prompts[place].prompt_id, prompts[place].attempt) for place in failed.tolist()])

    # ---- groups without signal are replaced -------------------------------------------------------------------------

    def _refill(self, selection: Selection) -> tuple[Selection, dict[str, float]]:
        """Replace groups without signal by groups of further prompts (dynamic sampling), round after round."""
        settings, num_rounds = self.config.rollout.dynamic_sampling, 0
        while num_rounds < settings.max_rounds and selection.dead:
            further = self.prompts.next(len(selection.dead), self.config.train.epochs)
            if not further:
                break
            num_rounds += 1
            prompts = self.start_order.arrange(dict(zip(selection.dead, further, strict=False)))
            with self.timer.measure("rollout"):
                job = self.manager.produce(prompts, self.config.rollout.samples_per_prompt)
            with self.timer.measure("reward"):
                scored = score_groups(self.config, self.backend, job.groups())
            self._note(scored, prompts)
            selection = selection.refill(prompts, job.groups(), kept_places(self.config, scored))
        if not settings.max_rounds:
            return selection, {}
        num_dead, num_places = len(selection.dead), len(selection.prompts)
        if num_dead and settings.on_exhausted == "fail":
            raise NoSignalError(
                f"{num_dead} of {num_places} groups have no signal after {num_rounds} rounds "
                f"(rollout.dynamic_sampling.max_rounds={settings.max_rounds}); raise it, set "
                "rollout.dynamic_sampling.on_exhausted=skip, or take harder prompts"
            )
        return selection, {"dynamic_sampling/rounds": float(num_rounds), "dynamic_sampling/left": float(num_dead)}

    def _replay(self, index: int, selection: Selection) -> tuple[Selection, dict[str, float]]:
        """Replace groups without signal by replayed groups. Not a collective."""
        if not self.config.replay.capacity_groups:
            return selection, {}
        self._forget(self.replay.expire(self.backend.weight_version))
        names = [prompt.name for prompt in selection.prompts.values()]
        keys = self.replay.draw(len(selection.dead), rollout=index, exclude=names)
        placed = dict(zip(selection.dead, keys, strict=False))
        metrics = {"replay/replaced": float(len(keys))}
        if keys:
            versions = {entry.key: entry.version for entry in self.replay.entries}
            metrics["replay/age_max"] = float(self.backend.weight_version - min(versions[key] for key in keys))
        groups = {place: self.replay_groups[key] for place, key in placed.items() if key in self.replay_groups}
        return selection.replay(placed, groups), metrics

    def remember(self, taken: TrainingBatch, advantages: np.ndarray) -> dict[str, float]:
        """Keep groups with signal for replay, drop the used-up ones, and return the metrics of the buffers.

        advantages: [S], by rewards alone and without noise. Not a collective.
        """
        if self.config.replay.capacity_groups:
            self._remember(taken, advantages)
        return {
            "replay/size": float(len(self.replay)),
            "reroll/size": float(len(self.reroll)),
            "reroll/buffered": float(self.reroll.num_buffered),
            "reroll/issued": float(self.reroll.num_issued),
        }

    def _remember(self, taken: TrainingBatch, advantages: np.ndarray) -> None:
        facts, scored = taken.facts, taken.scored
        replayed = set(facts.groups[taken.replayed].tolist())
        entries = []
        for place, score in zip(
            *group_scores(advantages, facts.groups, scored.rewards.included, scored.by_function), strict=True
        ):
            if place not in replayed:  # a score of 0 is never kept
                version = int(facts.weight_versions[facts.groups == place].min())
                entries.append(Entry(key=taken.prompts[int(place)].name, score=float(score), version=version))
        self._forget(self.replay.retire())
        gone = self.replay.add(entries)
        self.replay_groups |= {
            taken.prompts[place].name: group for place, group in taken.groups.items() if place not in replayed
        }
        keys = {entry.key for entry in self.replay.entries}
        self._forget([*gone, *(name for name in list(self.replay_groups) if name not in keys)])

    def _forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.replay_groups.pop(key, None)
