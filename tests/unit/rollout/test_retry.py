"""rollout/retry.py: failed samples are sampled again, in every mode as a naive loop does, and nothing else is."""

import dataclasses
import logging
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.environment import Step
from megatron_rl.errors import EpisodeError, RewardError
from megatron_rl.reward import Reward
from megatron_rl.rollout.engines.engine import NO_WEIGHTS, Engine, EngineLost
from megatron_rl.rollout.job import RolloutJob
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.retry import SampleRetry
from megatron_rl.trainer.rollouts import unscored
from megatron_rl.types import Prompt, Rollout, Score
from tests.patience import HANG_S, patient
from tests.unit.rollout import letter_episodes
from tests.unit.rollout.endpoint.agents_at_work import PROMPTS, chat_tokenizer, chatted, served
from tests.unit.rollout.fake_engine import MODES, WillingEngine, group_of, manager_of, prompt_of, prompts_of
from tests.unit.rollout.tiny_model import ROUNDING, engine_of

SAMPLES, MOST, PARTS = 6, 2, 2
ASKED = {place: prompt_of(place, token_ids=(2 + place, 5, 3)[: 1 + place % 3]) for place in range(5)}
BOUND_S = patient(HANG_S)
HERE = "tests.unit.rollout.test_retry"
pytestmark = pytest.mark.usefixtures("alone")


def retrying(engine: Engine, *overrides: str, retries=(MOST, MOST), beside=False, **given) -> RolloutManager:
    """Make a manager that samples failed samples again. retries: of rewards, of environments."""
    retry = SampleRetry(reward=retries[0], environment=retries[1], beside=beside)
    manager = manager_of(engine, *overrides, take_counts=retry.take_counts, **given)
    manager.retry = retry.complete
    return manager


def collected(manager: RolloutManager, prompts: dict[int, Prompt], samples: int, size: int = PARTS) -> RolloutJob:
    """Return the job of these prompts, which is collected in parts as the queue collects them."""
    manager.sync_weights()
    job = manager.job(prompts, samples)
    manager.start(job)
    for first in range(0, len(prompts), size):
        manager.collect(job, sorted(prompts)[first : first + size])
    manager.finish(job)
    return job


def naive(engine: Engine, score, prompts: dict[int, Prompt], samples: int, most: int) -> tuple[dict, int, int]:
    """Return {place: pairs of rollout and reward} of a loop over single samples, its retries and its drops."""
    found, num_retried, num_dropped = {}, 0, 0
    for place, prompt in prompts.items():
        found[place] = []
        for index, rollout in enumerate(engine.generate([prompt], samples)):
            (said,) = score([rollout])
            for number in range(1, most + 1):
                if said.total is not None:
                    break
                num_retried += 1
                again = dataclasses.replace(prompt, prompt_id=f"{prompt.prompt_id}#{index}~{number}")
                (rollout,) = engine.generate([again], 1)
                (said,) = score([rollout])
            num_dropped += said.total is None
            found[place].append((rollout, said.total))
    return found, num_retried, num_dropped


def assert_equal(job: RolloutJob, wanted: dict) -> None:
    for place, pairs in wanted.items():
        group = job.group(place)
        assert [x.sample_id for x in group.rollouts] == [f"{place}@0#{k}" for k in range(len(pairs))]
        assert {id(x.prompt) for x in group.rollouts} == {id(job.prompts[place])}
        for rollout, score, (other, total) in zip(group.rollouts, group.scores, pairs, strict=True):
            assert (rollout.response_ids, rollout.text, score.total) == (other.response_ids, other.text, total)
            assert rollout.loss_mask == other.loss_mask and rollout.weight_versions == other.weight_versions
            assert rollout.environment_reward == other.environment_reward
            assert (
                np.abs(np.subtract(rollout.logprobs, other.logprobs)).max() < ROUNDING
            )  # other batches round otherwise


@pytest.fixture(scope="module")
def rewards() -> Iterator[dict[int, Reward]]:
    """Make the rewards that fail on one completion of three, called here and in a worker."""
    given = {"functions": ("tests.reward_functions:picky",), "on_error": "retry_sample", "deadline_s": BOUND_S}
    found = {workers: Reward(RewardConfig(**given, num_workers=workers)) for workers in (0, 1)}
    yield found
    for reward in found.values():
        reward.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_equals_a_naive_loop(model, hf_path, rewards, mode, workers):
    """The embedded engine's samples, on which a function fails by their tokens: retried, then kept or dropped."""
    reward, engine = rewards[workers], engine_of(hf_path, model)
    overrides = (f"rollout.producer.mode={mode}", "rollout.producer.min_groups=1")
    manager = retrying(engine, *overrides, score=reward.score, apart=reward.runs_apart, version=lambda: 1)
    job = collected(manager, ASKED, SAMPLES)
    wanted, num_retried, num_dropped = naive(engine, rewards[0].score, ASKED, SAMPLES, MOST)
    assert_equal(job, wanted)
    assert num_retried > 5 and num_dropped > 0
    metrics = manager.take_metrics()
    assert (metrics["reward/retried"], metrics["reward/retry_failed"]) == (num_retried, num_dropped)
    assert metrics["rollout/tokens"] > sum(
        len(rollout.response_ids) for pairs in wanted.values() for rollout, _ in pairs
    )
    assert manager.take_metrics() == {} and manager.jobs == []
    manager.close()


class Fragile(letter_episodes.Echo):
    """An environment that breaks at a turn with an f."""

    def step(self, action: str) -> Step:
        if "f" in action:
            raise OSError("the sandbox is full")
        return super().step(action)


@pytest.mark.parametrize("mode", MODES[:2])
def test_an_environments_episodes_equal_a_naive_loop(mode):
    prompts = {place: letter_episodes.prompt_of(place) for place in range(4)}
    given = {"environment": f"{HERE}:Fragile", "on_error": "retry_sample"}
    episodes, plain = (letter_episodes.episodes_of(letter_episodes.LetterEngine(), **given) for _ in range(2))
    manager = retrying(episodes, f"rollout.producer.mode={mode}", score=unscored, version=lambda: 3)
    job = collected(manager, prompts, SAMPLES)
    wanted, num_retried, num_dropped = naive(plain, unscored, prompts, SAMPLES, MOST)
    assert_equal(job, wanted)
    assert num_retried > num_dropped > 0
    metrics = manager.take_metrics()
    assert (metrics["reward/retried"], metrics["reward/retry_failed"]) == (num_retried, num_dropped)
    manager.close()
    plain.close()


def test_an_agents_session_begins_again(model, hf_path):
    """Each session that failed once has another, and the group keeps its size; the endpoint counts all of them."""
    failed, lock = set(), threading.Lock()

    def agent(base_url: str, row) -> float:
        said = chatted(base_url, [{"role": "user", "content": row["question"]}], max_tokens=4)
        with lock:
            first = row["question"] not in failed
            failed.add(row["question"])
        if first:
            raise RuntimeError("the tool is away")
        return float(len(said["message"]["content"]))

    inner = engine_of(hf_path, model, chat_tokenizer(), max_response_tokens=24)
    with served(inner, agent, on_error="retry_sample") as engine:
        manager = retrying(engine, score=unscored, version=lambda: 1)
        job = collected(manager, dict(enumerate(PROMPTS)), 3)
        assert engine.tally.counts["failed"] == len(PROMPTS) and engine.tally.counts["sessions"] == 4 * len(PROMPTS)
    metrics = manager.take_metrics()
    assert (metrics["reward/retried"], metrics["reward/retry_failed"]) == (len(PROMPTS), 0)
    rollouts = [rollout for place in job.mine for rollout in job.rollouts[place]]
    assert [x.sample_id for x in rollouts] == [f"{k}@0#{sample}" for k in range(len(PROMPTS)) for sample in range(3)]
    assert not [x for x in rollouts if x.excluded is not None] and all(
        sum(x.loss_mask or x.response_ids) for x in rollouts
    )


def failing(names: Sequence[str], error: str = "E: away"):
    """Return a function that scores, and fails on the samples of the prompts of these names."""
    return lambda rollouts: [
        Score(total=None, by_function=(), error=error) if x.prompt.name in names else Score(total=1.0, by_function=())
        for x in rollouts
    ]


def test_the_last_failure_is_dropped_and_said(caplog):
    """Prompt 1 fails always, its sample 0 once: both are counted, and the log names the first."""
    names = ["1@0", "1@0#1~1", "1@0#1~2", "1@0#1~3"]
    manager = retrying(engine := WillingEngine(), score=failing(names))
    with caplog.at_level(logging.INFO):
        job = collected(manager, prompts_of(range(3)), 2, size=3)
    assert engine.calls == [["0@0", "1@0", "2@0"], ["1@0#0~1", "1@0#1~1"], ["1@0#1~2"]]
    assert [score.total for score in job.scores[1]] == [1.0, None] and job.scores[1][1].error == "E: away"
    said = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert said == [
        "2 samples failed and are sampled again, retry 1: the first is 1@0#0: E: away",
        "1 samples failed and are sampled again, retry 2: the first is 1@0#1: E: away",
        "1 samples failed in their last retry too, and are dropped: the first is 1@0#1: E: away",
    ]


def test_only_what_is_configured_is_sampled_again():
    """An environment's failure under ``drop`` is not, beside rewards that are. A sample that is fine never is."""

    class Excluding(WillingEngine):
        def group(self, prompt: Prompt, samples: int) -> list[Rollout]:
            return [
                dataclasses.replace(x, excluded="away" if x.sample_index else None) for x in group_of(prompt, samples)
            ]

    for retries, calls in (((0, 1), [["0@0#1~1"]]), ((1, 0), [["0@0#0~1"]]), ((1, 1), [["0@0#0~1", "0@0#1~1"]])):
        manager = retrying(engine := Excluding(), score=failing(["0@0"]), retries=retries)
        collected(manager, prompts_of(range(1)), 2)
        assert engine.calls == [["0@0"], *calls]
    manager = retrying(engine := WillingEngine(), score=failing(["0@0"]))
    manager.produce(prompts_of(range(1)), 2, temperature=0.5)
    assert engine.calls == [["0@0"]]  # an evaluation's samples are never sampled again


class Losing(WillingEngine):
    """An engine that is lost in its second call, or breaks in it."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error

    def recover(self, lost) -> None:
        self.lost = []

    def generate(self, prompts, samples_per_prompt, **given):
        if len(self.calls) != 1:
            return super().generate(prompts, samples_per_prompt, **given)
        self.calls.append([prompt.name for prompt in prompts])
        if self.error is not None:
            raise self.error
        self.lost, self.weight_version = ["the engine"], NO_WEIGHTS
        raise EngineLost("it was killed", finished={})


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_retry_survives_a_lost_engine_and_raises_an_error(mode, beside):
    mode = (f"rollout.producer.mode={mode}", "rollout.producer.min_groups=1")
    manager = retrying(engine := Losing(), *mode, score=failing(["1@0"]), beside=beside)
    job = collected(manager, prompts_of(range(3)), 2, size=3)
    again = ["1@0#0~1", "1@0#1~1"]
    assert engine.calls == [["0@0", "1@0", "2@0"], again, again] and manager.jobs == []
    assert [score.total for place in range(3) for score in job.scores[place]] == [1.0] * 6
    manager.close()
    broken = retrying(Losing(EpisodeError("it broke")), *mode, score=failing(["1@0"]), beside=beside)
    with pytest.raises(EpisodeError, match="it broke"):
        collected(broken, prompts_of(range(3)), 2, size=3)
    assert broken.jobs == []
    broken.close()


@pytest.mark.parametrize("apart", [False, True])
def test_an_error_of_a_reward_in_a_retry_ends_the_call(apart):
    def score(rollouts: Sequence[Rollout]) -> list[Score]:
        if "~" in rollouts[0].prompt.name:
            raise RewardError("the workers are gone")
        return failing(["0@0"])(rollouts)

    manager = retrying(WillingEngine(), "rollout.producer.mode=prefetch", score=score, apart=apart)
    with pytest.raises(RewardError, match="the workers are gone"):
        collected(manager, prompts_of(range(2)), 2)
    assert manager.jobs == []
    manager.close()


def test_a_retry_has_the_engines_current_weights():
    """Its group was sampled by version 0, and is collected after version 1 was sent."""
    held = [0]
    mode = "rollout.producer.mode=prefetch"
    manager = retrying(WillingEngine(), mode, score=failing(["0@0"]), version=lambda: held[0])
    manager.sync_weights()
    job = manager.job(prompts_of(range(2)), 2)
    manager.start(job)
    manager.settle()
    held[0] = 1
    manager.sync_weights()
    manager.collect(job, [0, 1])
    assert [[x.weight_version for x in job.rollouts[place]] for place in (0, 1)] == [[1, 1], [0, 0]]
    manager.close()


def test_an_engine_that_slept_gets_weights_before_a_retry():
    class Sleeping(WillingEngine):
        is_elsewhere = False

        def sleep(self) -> None:
            self.weight_version = NO_WEIGHTS

        def generate(self, *given, **more):
            assert self.weight_version == 0
            return super().generate(*given, **more)

    class Model:
        def offload(self) -> None: ...

        def restore(self) -> None: ...

    manager = retrying(engine := Sleeping(), score=failing(["0@0"]), models=[Model()])
    job = collected(manager, prompts_of(range(2)), 2)
    assert engine.calls == [["0@0", "1@0"], ["0@0#0~1", "0@0#1~1"]] and manager.metrics.totals["syncs"] == 2
    assert {rollout.weight_version for rollout in job.rollouts[0]} == {0}


def test_a_retry_does_not_wait_for_the_rollout_that_is_generated_meanwhile():
    class Held(WillingEngine):
        begun, held = threading.Event(), threading.Event()

        def generate(self, prompts, samples_per_prompt, **given):
            if prompts[0].name == "9@0":
                self.begun.set()
                assert self.held.wait(BOUND_S)
            return super().generate(prompts, samples_per_prompt, **given)

    manager = retrying(engine := Held(), "rollout.producer.mode=prefetch", score=failing(["0@0"]), beside=True)
    manager.sync_weights()
    first, second = (manager.job(prompts_of(numbers), 2) for numbers in ([0, 1], [9]))
    manager.start(first)
    manager.start(second)
    assert engine.begun.wait(BOUND_S)
    manager.collect(first, [0, 1])
    assert second.rollouts == {} and [score.total for score in first.scores[0]] == [1.0, 1.0]
    engine.held.set()
    manager.collect(second, [0])
    manager.close()
