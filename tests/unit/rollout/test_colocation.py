"""The order in which a device changes hands between trainer and engine."""

import itertools
import os
import pathlib
import time
from types import SimpleNamespace

import pytest

from megatron_rl.rollout.colocation import ColocatedDevice, DeviceOwner
from megatron_rl.rollout.engines.engine import NO_WEIGHTS, EngineLost, SyncReport
from megatron_rl.rollout.manager import RolloutManager
from tests.unit.rollout.fake_engine import WillingEngine, manager_of, prompts_of

TO_WEIGHTS, TO_ENGINE, TO_TRAINER = ["offload", "wake weights"], ["wake kv_cache"], ["sleep", "restore"]
MOVES = ("to_weights", "to_engine", "to_trainer")


class RecordingEngine(WillingEngine):
    """An engine that notes what it is asked to do, and asserts that it is awake for it."""

    def __init__(self, losses: int = 0) -> None:
        super().__init__()
        self.events: list[str] = []
        self.awake: set[str] = set()
        self.losses = losses

    def recover(self, lost) -> None:
        self.events.append("recover")
        self.lost = []

    def load_weights(self, tensors, version: int) -> SyncReport:
        assert "weights" in self.awake
        self.events.append("load")
        return super().load_weights(tensors, version)

    def generate(self, prompts, samples_per_prompt, **given):
        assert self.awake == {"weights", "kv_cache"}
        self.events.append("generate")
        if self.losses:
            self.losses -= 1
            self.lost, self.weight_version = ["the engine"], NO_WEIGHTS
            raise EngineLost("it was killed", finished={})
        return super().generate(prompts, samples_per_prompt, **given)

    def sleep(self) -> None:
        self.events.append("sleep")
        self.awake = set()

    def wake(self, *, tags) -> None:
        self.events.append(f"wake {' '.join(tags)}")
        self.awake |= set(tags)


def device_of(engine: RecordingEngine) -> ColocatedDevice:
    def note(word: str):
        return lambda: engine.events.append(word)

    def ended(owner: DeviceOwner) -> None:
        engine.events.append(f"ended {owner.value}")

    model = SimpleNamespace(offload=note("offload"), restore=note("restore"))
    return ColocatedDevice(engine, [model], lambda act: act(), ended)


def test_a_round_goes_in_order_and_a_device_that_is_not_shared_is_left_alone():
    engine = RecordingEngine()
    device = device_of(engine)
    for move, turn in zip(MOVES, (DeviceOwner.WEIGHTS, DeviceOwner.ENGINE, DeviceOwner.TRAINER), strict=True):
        getattr(device, move)()
        assert device.turn is turn
    assert engine.events == ["ended trainer", *TO_WEIGHTS, *TO_ENGINE, "ended engine", *TO_TRAINER]
    engine = RecordingEngine()
    device = ColocatedDevice(engine, (), lambda act: act(), lambda _: None)
    for move in MOVES:
        getattr(device, move)()
    assert engine.events == []


@pytest.mark.parametrize("first", MOVES)
def test_any_moves_keep_the_order(first):
    """After any four moves the trainer's state is away exactly while the engine is awake, and before anything wakes."""
    allowed = {  # event → (away, awake) before and after it
        "offload": ((False, ""), (True, "")),
        "restore": ((True, ""), (False, "")),
        "wake weights": ((True, ""), (True, "weights")),
        "wake kv_cache": ((True, "weights"), (True, "weights kv_cache")),
    }
    for rest in itertools.product(MOVES, repeat=3):
        engine = RecordingEngine()
        device = device_of(engine)
        for move in (first, *rest):
            getattr(device, move)()
        away, awake = False, ""
        for event in (event for event in engine.events if not event.startswith("ended")):
            if event == "sleep":
                assert away and awake
                awake = ""
                continue
            before, after = allowed[event]
            assert (away, awake) == before, (event, rest)
            away, awake = after
        assert set(awake.split()) == engine.awake and away == (device.turn is not DeviceOwner.TRAINER)


def generation_of(engine: RecordingEngine) -> RolloutManager:
    versions = itertools.count(1)
    engine.awake = {"weights", "kv_cache"}  # as it starts; the trainer has it sleep before its first step
    moves = {word: lambda word=word: engine.events.append(word) for word in ("offload", "restore")}
    found = manager_of(engine, version=lambda: next(versions), models=[SimpleNamespace(**moves)])
    engine.sleep()
    engine.events.clear()
    return found


def test_generation_goes_in_order_and_an_engine_lost_while_it_has_the_device_keeps_it(alone):
    engine = RecordingEngine()
    generation = generation_of(engine)
    for _ in range(2):
        assert len(generation.produce(prompts_of(range(3)), 2).rollouts) == 3
    step = [*TO_WEIGHTS, "recover", "load", *TO_ENGINE, "generate", *TO_TRAINER]
    assert engine.events == step * 2
    assert {"perf/update_peak_memory_bytes", "perf/rollout_peak_memory_bytes"} <= set(generation.take_metrics())
    engine = RecordingEngine(losses=1)
    generation_of(engine).produce(prompts_of(range(3)), 1)
    lost = ["generate", "recover", "load"]
    assert engine.events == [*TO_WEIGHTS, "recover", "load", *TO_ENGINE, *lost, "generate", *TO_TRAINER]


def hand_over(rank: int, world: int, path: str) -> None:
    """Hand the device over and back; rank 0's engine is slow, and rank 1, which has none, is slow with its state."""
    events = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def act(word: str, slow: bool) -> None:
        os.write(events, f"{word} begins\n".encode())
        time.sleep(0.3 * slow)  # for a rank that does not wait to go on in between
        os.write(events, f"{word} ends\n".encode())

    engine = RecordingEngine() if rank == 0 else WillingEngine()
    engine.events = SimpleNamespace(append=lambda word: act(word, True))
    moves = {word: lambda word=word: act(word, rank == 1) for word in ("offload", "restore")}
    device = manager_of(engine, models=[SimpleNamespace(**moves)]).device
    device.to_engine()
    device.to_trainer()


def test_no_rank_takes_memory_back_before_every_engine_sleeps(pool, tmp_path: pathlib.Path):
    """An engine over two ranks' devices is commanded by one; each phase ends on both before the next begins."""
    pool.run(2, hand_over, str(tmp_path / "events"))
    words = [line.rsplit(" ", 1)[0] for line in (tmp_path / "events").read_text().splitlines()]
    phases = [phase for phase, _ in itertools.groupby(words)]
    assert phases == ["offload", "wake weights", "wake kv_cache", "sleep", "restore"]
