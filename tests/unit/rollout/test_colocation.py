"""The order in which a device changes hands between trainer and engine."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config import load_config
from megatron_rl.rollout.colocation import ColocatedDevice, DeviceOwner
from megatron_rl.rollout.engine import NO_WEIGHTS, EngineLost, SyncReport
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.vllm.engine import VllmEngine
from megatron_rl.rollout.vllm.replica import ReplicaFacts, ReplicaLost
from megatron_rl.rollout.weight_sync.sender import WeightSender
from megatron_rl.types import Prompt, Rollout, Score

PROMPTS = [Prompt(prompt_id=f"{index}@0", text="", token_ids=(5, 6), columns={}) for index in range(3)]
TO_WEIGHTS = ["offload", "wake weights"]
TO_ENGINE = ["wake kv_cache"]
TO_TRAINER = ["sleep", "restore"]


class RecordingEngine:
    """An engine that notes what it is asked to do, and asserts that it is awake for it."""

    def __init__(self, losses: int = 0) -> None:
        self.events: list[str] = []
        self.awake: set[str] = set()
        self.weight_version, self.lost, self.losses = NO_WEIGHTS, [], losses

    def recover(self, lost) -> None:
        self.events.append("recover")
        self.lost = []

    def load_weights(self, tensors, version: int) -> SyncReport:
        assert "weights" in self.awake
        self.events.append("load")
        return SyncReport(version=version, num_tensors=0, num_bytes=0, seconds=0.0)

    def take_report(self, version, failed, lost) -> None:
        self.weight_version = version

    def generate(
        self, prompts, samples_per_prompt, *, temperature=None, max_tokens=None, on_finished=None
    ) -> list[Rollout]:
        assert self.awake == {"weights", "kv_cache"}
        self.events.append("generate")
        if self.losses:
            self.losses -= 1
            self.lost, self.weight_version = ["the engine"], NO_WEIGHTS
            raise EngineLost("it was killed", finished={})
        groups = [
            [
                Rollout(
                    prompt=prompt,
                    sample_index=index,
                    response_ids=(7,),
                    logprobs=(-1.0,),
                    text="",
                    finish_reason="stop",
                    weight_versions=((self.weight_version, 1),),
                )
                for index in range(samples_per_prompt)
            ]
            for prompt in prompts
        ]
        for index, group in enumerate(groups if on_finished else ()):
            on_finished(index, group)
        return [rollout for group in groups for rollout in group]

    def sleep(self) -> None:
        self.events.append("sleep")
        self.awake = set()

    def wake(self, *, tags) -> None:
        self.events.append(f"wake {' '.join(tags)}")
        self.awake |= set(tags)

    def close(self) -> None:
        self.events.append("close")


def device_of(engine: RecordingEngine) -> ColocatedDevice:
    def note(word: str):
        return lambda: engine.events.append(word)

    return ColocatedDevice(
        engine, note("offload"), note("restore"), lambda ended: engine.events.append(f"ended {ended.value}")
    )


def without_turns(events: list[str]) -> list[str]:
    return [event for event in events if not event.startswith("ended")]


def test_a_round_goes_in_order():
    engine = RecordingEngine()
    device = device_of(engine)
    for move, turn in (
        (device.to_weights, DeviceOwner.WEIGHTS),
        (device.to_engine, DeviceOwner.ENGINE),
        (device.to_trainer, DeviceOwner.TRAINER),
    ):
        move()
        assert device.turn is turn
    assert without_turns(engine.events) == [*TO_WEIGHTS, *TO_ENGINE, *TO_TRAINER]
    assert [event for event in engine.events if event.startswith("ended")] == ["ended trainer", "ended engine"]


def test_every_move_is_idempotent():
    engine = RecordingEngine()
    device = device_of(engine)
    device.to_trainer()
    assert engine.events == []
    for move in (device.to_weights, device.to_engine, device.to_trainer):
        move()
        after = list(engine.events)
        move()
        assert engine.events == after
    device.to_engine()
    after = list(engine.events)
    device.to_weights()  # the engine has the device, and takes weights there
    assert engine.events == after and device.turn is DeviceOwner.ENGINE


@pytest.mark.parametrize("moves", [*itertools.product(("to_weights", "to_engine", "to_trainer"), repeat=4)])
def test_any_moves_keep_the_order(moves):
    """After any moves the trainer's state is away exactly while the engine is awake.

    It is away before anything wakes.
    """
    engine = RecordingEngine()
    device = device_of(engine)
    for move in moves:
        getattr(device, move)()
    away, awake = False, set()
    for event in without_turns(engine.events):
        match event:
            case "offload":
                assert not away and not awake
                away = True
            case "restore":
                assert away and not awake
                away = False
            case "sleep":
                assert away and awake
                awake = set()
            case "wake weights":
                assert away and not awake
                awake = {"weights"}
            case "wake kv_cache":
                assert away and awake == {"weights"}
                awake = {"weights", "kv_cache"}
    assert awake == engine.awake and away == (device.turn is not DeviceOwner.TRAINER)


def test_a_device_that_is_not_shared_is_left_alone():
    engine = RecordingEngine()
    device = ColocatedDevice(engine, None, None, lambda _: None)
    for move in (device.to_weights, device.to_engine, device.to_trainer):
        move()
    assert engine.events == []


@pytest.fixture(scope="module")
def alone():
    """Make a world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def generation_of(engine: RecordingEngine) -> RolloutManager:
    versions = itertools.count(1)
    engine.awake = {"weights", "kv_cache"}  # as it starts; the trainer has it sleep before its first step
    found = RolloutManager(
        engine,
        lambda rollouts: [Score(total=1.0, by_function=()) for _ in rollouts],
        load_config(),
        export=lambda: iter(()),
        version=lambda: next(versions),
        share=(0, 1),
        offload=lambda: engine.events.append("offload"),
        restore=lambda: engine.events.append("restore"),
    )
    engine.sleep()
    engine.events.clear()
    return found


def test_generation_goes_in_order(alone):
    """Two steps hand the device over and back in order.

    The trainer's state leaves, weights wake and are sent, keys and values wake, rollouts are made, the engine sleeps,
    and the trainer's state returns.
    """
    engine = RecordingEngine()
    generation = generation_of(engine)
    for _ in range(2):
        assert len(generation.produce(dict(enumerate(PROMPTS)), 2).rollouts) == 3
    step = [*TO_WEIGHTS, "recover", "load", *TO_ENGINE, "generate", *TO_TRAINER]
    assert engine.events == step * 2
    assert {"perf/update_peak_memory_bytes", "perf/rollout_peak_memory_bytes"} <= set(generation.take_metrics())


def test_an_engine_lost_while_it_has_the_device_keeps_it(alone):
    """An engine lost while it has the device is loaded again; the trainer's state returns once, at the end."""
    engine = RecordingEngine(losses=1)
    generation = generation_of(engine)
    generation.produce(dict(enumerate(PROMPTS)), 1)
    lost = ["generate", "recover", "load"]
    assert engine.events == [*TO_WEIGHTS, "recover", "load", *TO_ENGINE, *lost, "generate", *TO_TRAINER]


class FakeReplica:
    """Answers every control message, except the words in ``silent``, each of which finds it gone."""

    ours = True

    def __init__(self) -> None:
        self.name, self.weight_version, self.asked, self.silent = "the engine", NO_WEIGHTS, [], ()

    def start(self) -> None:
        self.asked.append("start")

    def restart(self) -> None:
        self.asked.append("restart")
        self.silent = ()

    def wait_ready(self, timeout_s: float) -> ReplicaFacts:
        self.asked.append("ready")
        return ReplicaFacts(
            vllm_version="0.32.0", vocab_size=17, max_model_tokens=8, logprobs_mode="processed_logprobs"
        )

    def check_tokenizer(self, encode, texts) -> None: ...

    def control(self, method: str, arguments, timeout_s: float) -> object:
        if method in self.silent:
            raise ReplicaLost(f"it did not answer {method}")
        self.asked.append(" ".join([method, *arguments.get("tags", ())]))


class WordlessTokenizer:
    def decode(self, ids, **_: object) -> str:
        return ""


def vllm_engine_of(replica: FakeReplica) -> VllmEngine:
    sync = WeightSender(channel="shared_memory", bucket_bytes=1, deadline_s=1.0, device=torch.device("cpu"))
    rollout = load_config(None, ["rollout.max_response_tokens=2"]).rollout
    return VllmEngine(
        [replica], sync, WordlessTokenizer(), rollout, seed=0, stop_ids=(0,), vocab_size=17, longest=8, drives=True
    )


def test_an_engine_that_still_starts_is_not_woken():
    """An engine that still starts is not woken, since it is awake once it serves.

    Its answer would be waited for by another deadline than its start's.
    """
    replica = FakeReplica()
    engine = vllm_engine_of(replica)
    engine.wake(tags=["weights"])
    engine.recover(())
    engine.wake(tags=["kv_cache"])
    engine.sleep()
    assert replica.asked == ["start", "ready", "wake kv_cache", "sleep"]


@pytest.mark.parametrize("silent", ["sleep", "wake"])
def test_an_engine_that_does_not_sleep_or_wake_is_lost_and_mended_by_the_next_sync(silent):
    """An engine that does not sleep or wake is lost, and the next sync mends it.

    A rank that raised here would leave the others in a collective.
    """
    replica = FakeReplica()
    engine = vllm_engine_of(replica)
    engine.recover(())
    replica.weight_version, replica.silent = 3, (silent,)
    engine.sleep()
    engine.wake(tags=["weights", "kv_cache"])
    assert engine.lost == ["the engine"] and engine.weight_version == NO_WEIGHTS
    with pytest.raises(EngineLost, match=f"it did not answer {silent}"):
        engine.generate(PROMPTS, 1)
    engine.recover(engine.lost)
    assert replica.asked[-2:] == ["restart", "ready"] and engine.lost == []
