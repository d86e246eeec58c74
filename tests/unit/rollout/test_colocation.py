"""The order in which a device changes hands between trainer and engine."""

from __future__ import annotations

import datetime
import itertools
import math
import multiprocessing
import time

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config import load_config
from megatron_rl.rollout.colocation import ColocatedDevice, DeviceOwner
from megatron_rl.rollout.engine import NO_WEIGHTS, EngineLost, SyncReport
from megatron_rl.rollout.manager import RolloutManager
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
        self.is_elsewhere, self.progressed_at = True, -math.inf

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
        engine,
        note("offload"),
        note("restore"),
        lambda act: act(),
        lambda ended: engine.events.append(f"ended {ended.value}"),
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
    device = ColocatedDevice(engine, None, None, lambda act: act(), lambda _: None)
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


def _slow_engine(rank: int, events: object) -> ColocatedDevice:
    """Make rank 0's device, whose engine takes a while for each command, or rank 1's, whose engine has none."""

    class SlowEngine(RecordingEngine):
        def sleep(self) -> None:
            self._command("sleep")

        def wake(self, *, tags) -> None:
            self._command(f"wake {tags[0]}")

        def _command(self, word: str) -> None:
            if rank == 0:
                events.append((rank, f"{word} begins"))
                time.sleep(0.3)
                events.append((rank, f"{word} ends"))

    def state(word: str):
        def act() -> None:
            events.append((rank, f"{word} begins"))
            time.sleep(0.3 * (rank == 1))
            events.append((rank, f"{word} ends"))

        return act

    manager = RolloutManager(
        SlowEngine(),
        None,
        load_config(),
        export=lambda: iter(()),
        version=lambda: 1,
        share=(0, 1),
        offload=state("offload"),
        restore=state("restore"),
    )
    return manager.device


def _hand_over(rank: int, store_path: str, events) -> None:
    store = dist.FileStore(store_path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    device = _slow_engine(rank, events)
    device.to_engine()
    device.to_trainer()
    dist.destroy_process_group()


def test_no_rank_takes_memory_back_before_every_engine_sleeps(tmp_path):
    """An engine over two ranks' devices is commanded by one of them, and both wait for it.

    Each phase (offload, wake weights, wake keys and values, sleep, restore) ends on both ranks before the next begins.
    """
    with multiprocessing.get_context("spawn").Manager() as shared:
        events = shared.list()
        torch.multiprocessing.spawn(_hand_over, (str(tmp_path / "store"), events), nprocs=2)
        words = [word.rsplit(" ", 1) for _, word in events]
    phases = [phase for phase, _ in itertools.groupby(words, key=lambda word: word[0])]
    assert phases == ["offload", "wake weights", "wake kv_cache", "sleep", "restore"]
