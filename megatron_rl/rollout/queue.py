"""Rollouts in their order, as all ranks see them: which are started when, with which weights, and which groups of them are trained.

Every decision is made from what every rank holds (prompts, facts, rewards, versions, the buffers' entries), never from a clock: a run that
fetches ahead repeats to the bit, and so does one that goes on from a checkpoint. Only ``weight_sync.in_flight`` lets time decide where
in a completion the weights change.
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
from megatron_rl.rollout.serialization import SavedGroup, pack_groups, unpack_groups
from megatron_rl.rollout.staleness import Start, may_start
from megatron_rl.rollout.training_batch import (
    LogProbPass,
    ScoredBatch,
    TrainingBatch,
    merge_passes,
    noisy_advantages,
    plain_advantages,
    reward_metrics,
    score_groups,
)
from megatron_rl.rollout.worker import Group, RolloutJob
from megatron_rl.types import Prompt

log = logging.getLogger(__name__)


class RolloutQueue:
    """Methods are collectives unless they say otherwise.

    passes_parts: whether parts of a rollout are passed for log-probs as they come; of each, the samples that may have signal, or all.
    """

    def __init__(
        self, config: Config, backend: MegatronBackend, generation: RolloutManager, prompts: PromptDataset, *, passes_parts: bool,
        passes_all: bool, steps_per_rollout: int,
    ) -> None:  # fmt: skip
        self.config, self.backend, self.generation, self.prompts = config, backend, generation, prompts
        self.producer = config.rollout.producer
        self.passes_parts, self.passes_all, self.steps_per_rollout = passes_parts, passes_all, steps_per_rollout
        self.replay = ReplayBuffer(config.replay, config.run.seed)
        self.kept: dict[str, Group] = {}  # rows of the replay buffer's groups that this rank holds
        self.reroll = RerollBuffer(config.reroll)
        self.jobs: dict[int, RolloutJob] = {}  # by the rollout's number
        self.next_rollout = 0  # to be started
        self.renew = False  # a checkpoint was taken: who goes on from it has engines with the weights of that moment

    # ---- what is started -------------------------------------------------------------------------------------------

    def has(self, turn: int) -> bool:
        """Whether there is a rollout of this number. Not a collective."""
        return turn in self.jobs or (turn >= self.next_rollout and self._more(turn))

    def _more(self, number: int) -> bool:
        given = self.config.train
        return number < given.num_rollouts if given.epochs is None else self.prompts.remain(given.epochs)

    def start(self, turn: int, clock: StepTimer) -> None:
        """Starts what may be started while rollout ``turn`` has its turn: itself, and those ahead of it that the staleness allows."""
        while self.next_rollout <= turn + self.producer.ahead and self._more(self.next_rollout):
            decision = may_start(
                trained=self.backend.weight_version, engine=self.generation.sent_version, between=self.next_rollout - turn,
                steps_per_rollout=self.steps_per_rollout, max_staleness_steps=self.producer.max_staleness_steps,
                interval=self.config.weight_sync.interval_steps, renew=self.renew,
            )  # fmt: skip
            if decision is Start.LATER:
                return
            if decision is Start.AFTER_SYNC:
                self._sync(clock)
            self._ask(self.next_rollout)
            self.next_rollout += 1

    def _sync(self, clock: StepTimer) -> None:
        if not self.config.weight_sync.in_flight:
            with clock.measure("rollout"):
                self.generation.settle()
        with clock.measure("weight_sync"):  # nothing where the last step moved nothing
            self.generation.sync_weights()
        self.renew = False

    def _ask(self, number: int) -> None:
        room, epochs = self.config.train.prompts_per_rollout, self.config.train.epochs
        again = self.reroll.take(self._fraction(number), room)
        prompts = [self.prompts.recall(*which) for which in again]
        prompts += self.prompts.next(room - len(prompts), epochs)
        self.jobs[number] = self.generation.job(dict(enumerate(prompts)), self.config.rollout.samples_per_prompt)
        self.generation.start(self.jobs[number])

    def _fraction(self, number: int) -> float:
        given = self.config.train
        return number / given.num_rollouts if given.epochs is None else self.prompts.share_drawn(given.epochs)

    # ---- what is trained -------------------------------------------------------------------------------------------

    def take(self, turn: int, clock: StepTimer) -> TrainingBatch:
        """Rollout ``turn``, started if it was not. Call ``start`` after it for those ahead.

        Groups that are too old go, and their prompts come again; groups without signal may give way to further prompts'
        (``rollout.dynamic_sampling``) or to replayed ones. Raises NoSignalError where the former does not help and is to end the run.
        """
        clock.add("weight_sync", 0.0)  # also where nothing has to be sent
        self.start(turn, clock)
        metrics: dict[str, float] = {}
        dropped = 0
        while True:
            parts = list(self._parts(turn, clock))
            fresh = [self._fresh(part) for part, _ in parts]
            if any(fresh):
                break
            dropped += self._drop(turn, set())
            self._sync(clock)
            self._ask(turn)
        held, prompts = self._held(turn), dict(self.jobs[turn].prompts)
        kept_places = {place for places in fresh for place in places}
        dropped += self._drop(turn, kept_places)
        live = {place for part, _ in parts for place in part.live_places()} & kept_places
        held = {place: group for place, group in held.items() if place in kept_places}
        prompts = {place: prompts[place] for place in sorted(kept_places)}
        first = self._whole(parts, kept_places, held)
        metrics |= reward_metrics(self.config, first)
        metrics |= {
            "async/staleness_max": float(self.backend.weight_version - first.batch.facts.weight_versions.min()),
            "async/dropped_stale": float(dropped),
        }
        refilled = self._refill(prompts, held, live, clock, metrics)
        replayed = self._replay(turn, prompts, held, live, metrics)
        with clock.measure("reward"):
            scored = score_groups(self.config, self.backend, held) if refilled or replayed else first
        plain = plain_advantages(self.config, scored)
        values = noisy_advantages(self.config, scored, plain)
        self._remember(scored, plain, prompts, held, replayed)
        metrics |= {"replay/size": float(len(self.replay)), **self._reroll_metrics()}
        facts = scored.batch.facts
        old, known, sums = merge_passes(facts, [passed for _, passed in parts if passed], kept_places - refilled - replayed)
        return TrainingBatch(
            batch=scored.batch, totals=scored.totals, by_function=scored.by_function, advantages=values, old=old, known=known, sums=sums,
            replayed=np.isin(facts.groups, sorted(replayed)), metrics=metrics, trained_version=self.backend.weight_version,
        )  # fmt: skip

    def _parts(self, turn: int, clock: StepTimer) -> Iterator[tuple[ScoredBatch, LogProbPass | None]]:
        """A rollout in parts of ``min_groups``, each as soon as it is there: scored, and passed for log-probs."""
        job = self.jobs[turn]
        places = sorted(job.prompts)
        size = self.producer.min_groups or len(places)
        for first in range(0, len(places), size):
            scored = self._collect(job, places[first : first + size], clock)
            self._note_failed(scored, job.prompts)
            passed = None
            if self.passes_parts and size < len(places):
                facts = scored.batch.facts
                chosen = np.ones_like(scored.live) if self.passes_all else scored.live & np.isin(facts.groups, self._fresh(scored))
                with clock.measure("logprob"):
                    passed = LogProbPass(facts=facts, chosen=chosen, logprobs=self.backend.logprobs(scored.batch, chosen))
            yield scored, passed
        self.generation.finish(job)

    def _collect(self, job: RolloutJob, places: Sequence[int], clock: StepTimer) -> ScoredBatch:
        producer = self.generation.producer
        scored_s = producer.scored_here_s
        with clock.measure("rollout"):
            self.generation.collect(job, places)
        scored_s = producer.scored_here_s - scored_s
        clock.add("rollout", -scored_s)
        clock.add("reward", scored_s)
        with clock.measure("reward"):
            return score_groups(self.config, self.backend, {place: job.group(place) for place in places if place in job.mine})

    def _fresh(self, scored: ScoredBatch) -> list[int]:
        """Places of groups that are not too old. Not a collective."""
        facts, limit = scored.batch.facts, self.producer.max_staleness_steps
        stale = np.zeros(facts.num_samples, bool) if limit is None else self.backend.weight_version - facts.weight_versions > limit
        return sorted(set(facts.groups.tolist()) - set(facts.groups[stale].tolist()))

    def _held(self, turn: int) -> dict[int, Group]:
        job = self.jobs[turn]
        return {place: job.group(place) for place in job.mine}

    def _drop(self, turn: int, kept: set[int]) -> int:
        """Ends a rollout's job; prompts of what is not kept come again. Not a collective."""
        gone = [prompt for place, prompt in sorted(self.jobs.pop(turn).prompts.items()) if place not in kept]
        if gone:
            limit = self.producer.max_staleness_steps
            log.warning(
                "rollout %d: %d groups are older than rollout.producer.max_staleness_steps=%s and are asked again", turn + 1, len(gone), limit
            )
            self.prompts.put_back(gone)
        return len(gone)

    def _whole(self, parts: Sequence[tuple[ScoredBatch, LogProbPass | None]], kept: set[int], held: Mapping[int, Group]) -> ScoredBatch:
        """What is kept of a rollout as one batch."""
        if len(parts) == 1 and kept == set(parts[0][0].batch.facts.groups.tolist()):
            return parts[0][0]
        return score_groups(self.config, self.backend, held)

    def _note_failed(self, scored: ScoredBatch, prompts: Mapping[int, Prompt]) -> None:
        """Not a collective."""
        if self.config.reroll.max_groups:
            failed = failed_groups(scored.totals, scored.batch.facts.groups, self.config.reroll.fail_threshold)
            failed = np.intersect1d(failed, self._fresh(scored))
            self.reroll.note([(prompts[place].prompt_id, prompts[place].attempt) for place in failed.tolist()])

    def _reroll_metrics(self) -> dict[str, float]:
        buffer = self.reroll
        return {"reroll/size": float(len(buffer)), "reroll/buffered": float(buffer.num_buffered), "reroll/issued": float(buffer.num_issued)}

    # ---- what stands in for groups without signal ------------------------------------------------------------------

    def _refill(
        self, prompts: dict[int, Prompt], held: dict[int, Group], live: set[int], clock: StepTimer, metrics: dict[str, float]
    ) -> set[int]:
        """Dynamic sampling: further prompts in the places of groups without signal; the places that have another group now."""
        given, replaced, rounds = self.config.rollout.dynamic_sampling, set(), 0
        while rounds < given.max_rounds and len(live) < len(prompts):
            dead = sorted(set(prompts) - live)
            further = self.prompts.next(len(dead), self.config.train.epochs)
            if not further:
                break
            rounds += 1
            asked = dict(zip(dead, further, strict=False))
            with clock.measure("rollout"):
                job = self.generation.produce(asked, self.config.rollout.samples_per_prompt)
            with clock.measure("reward"):
                scored = score_groups(self.config, self.backend, {place: job.group(place) for place in job.mine})
            self._note_failed(scored, asked)
            prompts |= asked
            for place in asked:
                held.pop(place, None)
            held |= {place: job.group(place) for place in job.mine}
            live |= scored.live_places()
            replaced |= set(asked)
        if given.max_rounds:
            left = len(prompts) - len(live)
            metrics |= {"dynamic_sampling/rounds": float(rounds), "dynamic_sampling/left": float(left)}
            if left and given.on_exhausted == "fail":
                raise NoSignalError(
                    f"{left} of {len(prompts)} groups have no signal after {rounds} rounds (rollout.dynamic_sampling.max_rounds="
                    f"{given.max_rounds}); raise it, set rollout.dynamic_sampling.on_exhausted=skip, or take harder prompts"
                )
        return replaced

    def _replay(
        self, turn: int, prompts: dict[int, Prompt], held: dict[int, Group], live: set[int], metrics: dict[str, float]
    ) -> set[int]:  # fmt: skip
        """Replayed groups in the places of those without signal; those places. Not a collective."""
        if not self.config.replay.capacity_groups:
            return set()
        self._forget(self.replay.expire(self.backend.weight_version))
        dead = sorted(set(prompts) - live)
        keys = self.replay.draw(len(dead), rollout=turn, exclude=[prompt.name for prompt in prompts.values()])
        versions = {entry.key: entry.version for entry in self.replay.entries}
        for place, key in zip(dead, keys, strict=False):
            held.pop(place, None)
            if key in self.kept:
                held[place] = self.kept[key]
        metrics["replay/replaced"] = float(len(keys))
        if keys:
            metrics["replay/age_max"] = float(self.backend.weight_version - min(versions[key] for key in keys))
        return set(dead[: len(keys)])

    def _remember(
        self, scored: ScoredBatch, values: np.ndarray, prompts: Mapping[int, Prompt], held: Mapping[int, Group], replayed: set[int]
    ) -> None:
        """Keeps what was generated now and has signal, and lets go of what was replayed often enough. Not a collective."""
        if not self.config.replay.capacity_groups:
            return
        facts = scored.batch.facts
        entries = []
        for place, score in zip(*group_scores(values, facts.groups, scored.included, scored.by_function), strict=True):
            if place not in replayed:  # a score of 0 is never kept
                version = int(facts.weight_versions[facts.groups == place].min())
                entries.append(Entry(key=prompts[int(place)].name, score=float(score), version=version))
        self._forget(self.replay.retire())
        gone = self.replay.add(entries)
        self.kept |= {prompts[place].name: group for place, group in held.items() if place not in replayed}
        held_keys = {entry.key for entry in self.replay.entries}
        self._forget([*gone, *(name for name in list(self.kept) if name not in held_keys)])

    def _forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.kept.pop(key, None)

    # ---- what a checkpoint keeps -----------------------------------------------------------------------------------

    def save(self) -> tuple[dict, bytes]:
        """(what every rank holds, JSON; what this rank alone holds), of a moment between rollouts. What is generated is waited for, since
        the weights that it comes from are gone after a checkpoint. The next rollout that is started has the weights of now."""
        self.generation.settle()
        self.renew = True
        groups = {
            f"kept/{name}": SavedGroup(prompt=group.prompt, rollouts=group.rollouts, scores=group.scores)
            for name, group in self.kept.items()
        }
        for number, job in self.jobs.items():
            with job.change:  # reward workers may be at it
                groups |= {
                    f"job/{number}/{place}": SavedGroup(prompt=job.prompts[place], rollouts=job.found[place], scores=job.scores.get(place))
                    for place in job.mine
                }
        jobs = {
            str(number): [[place, prompt.prompt_id, prompt.attempt] for place, prompt in job.prompts.items()]
            for number, job in self.jobs.items()
        }
        state = {"next_rollout": self.next_rollout, "jobs": jobs, "replay": self.replay.state(), "reroll": self.reroll.state()}
        return state, pack_groups(groups)

    def restore(self, state: Mapping, rows: Sequence[bytes]) -> None:
        """rows: what ``save`` gave of some ranks of then; every one is given to exactly one rank of now. The prompts' cursor is restored
        before it. Not a collective."""
        self.next_rollout, self.renew = state["next_rollout"], True
        gone = self.replay.load_state(state["replay"])
        self.reroll.load_state(state["reroll"])
        groups = {key: group for data in rows for key, group in unpack_groups(data, self.prompts.recall).items()}
        for number, asked in sorted((int(number), asked) for number, asked in state["jobs"].items()):
            job = self.generation.restored_job({place: self.prompts.recall(*which) for place, *which in asked})
            for key, group in groups.items():
                kind, _, place = key.rpartition("/")
                if kind == f"job/{number}":
                    job.put(int(place), group.rollouts, group.scores)
            self.jobs[number] = job
            self.generation.start(job)
        kept = {key.removeprefix("kept/"): group for key, group in groups.items() if key.startswith("kept/")}
        self.kept = {name: Group(rollouts=tuple(group.rollouts), scores=tuple(group.scores)) for name, group in kept.items()}
        self._forget(gone)
