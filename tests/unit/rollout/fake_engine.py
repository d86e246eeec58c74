"""Engines and rewards without a model, and workers and managers over them."""

import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from megatron_rl.config import ProducerConfig, load_config
from megatron_rl.rollout.engines.engine import NO_WEIGHTS, EngineLost, SyncReport, group_sizes
from megatron_rl.rollout.job import RolloutJob
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.rollout_metrics import RolloutMetrics
from megatron_rl.rollout.weight_source import AdapterWeights, PolicyWeights
from megatron_rl.rollout.worker import RolloutWorker
from megatron_rl.types import BatchFacts, Prompt, Rollout, Score
from tests.patience import HANG_S, patient, until

SAMPLES, BOUND_S = 2, patient(10 * HANG_S)  # longer than any wait for an end
MODES = ("sync", "prefetch", "streaming")
BACKGROUND = [(mode, apart) for mode in MODES[1:] for apart in (True, False)]


def prompt_of(number: int, *, epoch: int = 0, token_ids: tuple[int, ...] = (5,)) -> Prompt:
    return Prompt(prompt_id=f"{number}@{epoch}", text="", token_ids=token_ids, columns={})


def prompts_of(numbers: Sequence[int]) -> dict[int, Prompt]:
    """Return the prompts of these numbers by their places."""
    return {place: prompt_of(number) for place, number in enumerate(numbers)}


def rollout_of(prompt: Prompt, index: int, *, version: int = 0, ids: tuple[int, ...] = (3, 7)) -> Rollout:
    logprobs = tuple(-1.0 - place for place in range(len(ids)))
    said = {"text": "", "finish_reason": "stop", "weight_versions": ((version, len(ids)),)}
    return Rollout(prompt=prompt, sample_index=index, response_ids=ids, logprobs=logprobs, **said)


def group_of(prompt: Prompt, samples: int = SAMPLES, *, version: int = 0) -> list[Rollout]:
    return [rollout_of(prompt, index, version=version) for index in range(samples)]


def facts_of(places: Sequence[int], *, versions=None, lengths: Sequence[int] | None = None) -> BatchFacts:
    """Make facts of SAMPLES samples for the group at each place."""
    groups = np.repeat(np.array(places, dtype=np.int64), SAMPLES)
    zeros, rows = np.zeros(len(groups), dtype=np.int64), np.arange(len(groups))
    lengths = zeros + 2 if lengths is None else np.array(lengths, dtype=np.int64)
    versions = zeros if versions is None else np.array(versions)
    ids, places = tuple(f"s{i}" for i in rows), groups * SAMPLES + rows % SAMPLES
    tokens = {"prompt_tokens": zeros + 1, "response_tokens": lengths, "loss_tokens": lengths}
    owners = {"owners": zeros, "owner_rows": rows}
    return BatchFacts(sample_ids=ids, groups=groups, places=places, weight_versions=versions, **tokens, **owners)


def value_of(rollout: Rollout) -> float:
    return float(int(rollout.prompt.prompt_id.split("@")[0]) * SAMPLES + rollout.sample_index)


def scored_by(value: Callable[[Rollout], float]) -> Callable[[Sequence[Rollout]], list[Score]]:
    return lambda rollouts: [Score(total=value(rollout), by_function=()) for rollout in rollouts]


class WillingEngine:
    """An engine elsewhere that takes any weights, is never lost, samples by ``group_of``, and notes calls' prompts."""

    is_elsewhere, progressed_at = True, -math.inf

    def __init__(self) -> None:
        self.weight_version, self.lost = NO_WEIGHTS, []
        self.calls: list[list[str]] = []

    def generate(self, prompts, samples_per_prompt, *, temperature=None, max_tokens=None, on_finished=None):
        self.calls.append([prompt.name for prompt in prompts])
        sizes = group_sizes(prompts, samples_per_prompt)
        groups = [self.group(prompt, size) for prompt, size in zip(prompts, sizes, strict=True)]
        for index, group in enumerate(groups):
            on_finished(index, group)
        return [rollout for group in groups for rollout in group]

    def group(self, prompt: Prompt, samples: int) -> list[Rollout]:
        return group_of(prompt, samples, version=self.weight_version)

    def recover(self, lost) -> list[str]:
        return []

    def load_weights(self, tensors, version) -> SyncReport:
        return SyncReport(version=version, num_tensors=0, num_bytes=0, seconds=0.0)

    def take_report(self, version, failed, lost) -> None:
        self.weight_version = version

    def sleep(self) -> None: ...

    def wake(self, *, tags) -> None: ...

    def close(self) -> None: ...


class FakeTrainer:
    """Exports these tensors, under a version that ``version`` returns."""

    def __init__(self, version: Callable[[], int], weights: Mapping, adapters: Mapping) -> None:
        self._version, self._weights, self._adapters = version, weights, adapters

    @property
    def weight_version(self) -> int:
        return self._version()

    def export(self, *, bucket_bytes: int, merges: bool) -> Iterator[tuple]:
        assert merges == (not self._adapters)
        return iter(self._weights.items())

    def export_adapters(self, *, bucket_bytes: int) -> Iterator[tuple]:
        return iter(self._adapters.items())


def manager_of(
    engine, *overrides: str, score=None, version=lambda: 0, share=(0, 1), apart=False, take_counts=dict,
    weights: Mapping = {}, adapters: Mapping = {}, models=(),
) -> RolloutManager:  # fmt: skip
    """Make a manager over an engine, whose trainer exports nothing and stays at version 0 unless told otherwise."""
    config = load_config(None, list(overrides))
    producer, weight_sync, deadline_s = config.rollout.producer, config.weight_sync, config.run.deadline_s
    score, settings = score or scored_by(value_of), {"share": share, "deadline_s": deadline_s}
    worker = RolloutWorker(engine, score, producer, apart=apart, **settings)
    counted = {"has_turns": config.plays_episodes, "has_delta": weight_sync.delta}
    metrics = RolloutMetrics(**counted, take_counts=take_counts)
    source = AdapterWeights if weight_sync.adapters == "alone" else PolicyWeights
    weights = source(FakeTrainer(version, dict(weights), dict(adapters)), 1)
    return RolloutManager(worker, weight_sync, weights=weights, metrics=metrics, models=models)


class FakeEngine(WillingEngine):
    """Finishes groups in a random order, and is lost in the calls that ``losses`` names.

    losses[k]: how many groups its k-th call finishes before the engine is lost. group_s: waited before each group.
    finished: names of prompts, one each time that a group is finished.
    held: once ``holds`` groups are finished, it waits until this event is set; groups then go in the order given.
    last: the prompts whose groups come last of their call, and not before ``held``.
    """

    def __init__(self, *, seed=0, losses: Sequence[int] = (), group_s=0.0, holds: int | None = None, last=()) -> None:
        super().__init__()
        self.random, self.losses, self.group_s, self.holds = random.Random(seed), list(losses), group_s, holds
        self.last, self.progressed_at = last, -math.inf
        self.finished: list[str] = []
        self.held, self.closed = threading.Event(), threading.Event()
        self.on_finished = None

    def generate(self, prompts, samples_per_prompt, *, temperature=None, max_tokens=None, on_finished=None):
        assert group_sizes(prompts, samples_per_prompt) == [SAMPLES] * len(prompts)
        self.calls.append([prompt.name for prompt in prompts])
        self.on_finished = on_finished
        order = self.random.sample(range(len(prompts)), len(prompts)) if self.holds is None else range(len(prompts))
        order = sorted(order, key=lambda k: prompts[k].name in self.last)
        limit = self.losses.pop(0) if self.losses else len(prompts)
        done: dict[int, list[Rollout]] = {}
        for k in order:
            if len(done) == limit:
                raise EngineLost("it was killed", finished=done)
            if len(self.finished) == self.holds or prompts[k].name in self.last:
                assert self.held.wait(BOUND_S)
            if self.closed.wait(self.group_s):
                raise RuntimeError("the engine is closed")
            done[k] = group_of(prompts[k])
            self.finished.append(prompts[k].name)
            on_finished(k, done[k])
        return [rollout for k in range(len(prompts)) for rollout in done[k]]

    def close(self) -> None:
        self.closed.set()


class FakeReward:
    """Scores a rollout by its prompt's number and its place in the group, and notes each call.

    calls: (name of the thread, sample ids). At the groups of ``prompt`` it waits for ``hold`` or raises ``error``.
    """

    def __init__(self, prompt: str = "", error: Exception | None = None, hold: threading.Event | None = None) -> None:
        self.prompt, self.error, self.hold = prompt, error, hold
        self.calls: list[tuple[str, list[str]]] = []

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        self.calls.append((threading.current_thread().name, [rollout.sample_id for rollout in rollouts]))
        if self.prompt in {rollout.prompt.name for rollout in rollouts}:
            if self.hold is not None:
                assert self.hold.wait(BOUND_S)
            if self.error is not None:
                raise self.error
        return [Score(total=value_of(rollout), by_function=()) for rollout in rollouts]


def producer_of(engine, score, mode: str, *, apart, min_groups=1, share=(0, 1), deadline_s=BOUND_S) -> RolloutWorker:
    config = ProducerConfig(mode=mode, min_groups=min_groups)
    return RolloutWorker(engine, score, config, apart=apart, share=share, deadline_s=deadline_s)


def job_of(producer: RolloutWorker, numbers: Sequence[int]) -> RolloutJob:
    prompts = prompts_of(numbers)
    return RolloutJob(prompts, producer.places(len(numbers)), dict.fromkeys(prompts, SAMPLES))


def end(producer: RolloutWorker) -> None:
    """Close the engine and the producer, whose threads end."""
    producer.engine.close()
    producer.close()
    assert until(lambda: not any(thread.is_alive() for thread in producer._threads))
