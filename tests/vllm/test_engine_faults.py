"""No sample is lost or doubled, or an error says why, where a real engine is killed, hangs, or does not start."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from megatron_rl.errors import EngineError
from megatron_rl.rollout.build import engine_arguments
from megatron_rl.rollout.engine import NO_WEIGHTS, EngineLost
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.vllm import process_replica
from megatron_rl.rollout.vllm.process_replica import ProcessReplica, engine_environment
from megatron_rl.rollout.vllm.replica import GenerateRequest, ReplicaLost
from megatron_rl.types import Score
from tests.patience import HANG_S, patient, until
from tests.vllm.rig import (
    CPU,
    LOGPROB_TOLERANCE,
    REQUEST_S,
    START_S,
    Bench,
    config_of,
    make_prompts,
    model_folder,
    start_bench,
    told,
)

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROMPTS = make_prompts(*range(3, 67, 2))
SAMPLES = 8
SEED = 21


@pytest.fixture(scope="module")
def own(inputs, tmp_path_factory) -> Iterator[Bench]:
    """Start an engine for these tests alone, whose calls last for some seconds.

    Its layers are so wide that each prompt needs a block of ten megabytes, which no heap has free: the system is asked.
    """
    root = tmp_path_factory.mktemp("faults")
    folder = model_folder(inputs / "model", root / "model", "qwen2", tied=True, intermediate=65536)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "16384")  # for every larger block, so that a limit is met at once
        started = start_bench(folder, root / "run", "rollout.max_response_tokens=12", "rollout.vllm={max_num_seqs: 16}")
    started.engine._stop_ids = ()  # all answers have their full length
    try:
        started.engine.recover(())
        yield started
    finally:
        started.engine.close()


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """Make a world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Driver:
    """RolloutManager over the engine, with an undisturbed call to compare with.

    The engine's weights are those of one seed under one version.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench, version = bench, 1000
        weights = bench.weights(SEED)
        self.generation = RolloutManager(
            bench.engine,
            lambda rollouts: [Score(total=1.0, by_function=()) for _ in rollouts],
            bench.config,
            export=lambda: iter(weights.items()),
            version=lambda: version,
            share=(0, 1),
        )

    def produce(self) -> list[tuple]:
        self.generation.sync_weights()
        found = self.generation.produce(dict(enumerate(PROMPTS)), SAMPLES).rollouts
        return told(rollout for place in sorted(found) for rollout in found[place])


@pytest.fixture(scope="module")
def driver(own, alone) -> Driver:
    return Driver(own)


@pytest.fixture(scope="module")
def quiet(driver) -> list[tuple]:
    return driver.produce()


@contextlib.contextmanager
def settings(bench: Bench, **changes) -> Iterator[None]:
    before = bench.engine._rollout
    bench.engine._rollout = replace(before, **changes)
    try:
        yield
    finally:
        bench.engine._rollout = before


@contextlib.contextmanager
def in_mid_generation(bench: Bench, act: Callable[[int], None], after: int) -> Iterator[list[float]]:
    """Call ``act(pid)`` once ``after`` requests of the next call are answered; yield when that was."""
    replica, deliver, count, when = bench.replica, bench.replica._deliver, itertools.count(1), []

    def counted(header, arrays, ready):
        deliver(header, arrays, ready)
        if header["kind"] == "output" and next(count) == after:
            when.append(time.monotonic())
            act(replica.pid)

    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(replica, "_deliver", counted)
        yield when
    assert when, "the call had fewer answers than that"


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def test_an_engine_killed_in_mid_generation_hands_over_what_is_finished(own, driver, quiet):
    with in_mid_generation(own, kill, after=5), pytest.raises(EngineLost) as lost:
        own.engine.generate(PROMPTS, SAMPLES)
    finished = lost.value.finished
    assert 5 <= len(finished) < len(PROMPTS) and all(len(rollouts) == SAMPLES for rollouts in finished.values())
    assert told(x for place in sorted(finished) for x in finished[place]) == [
        row for place in sorted(finished) for row in quiet[place * SAMPLES : (place + 1) * SAMPLES]
    ]
    assert "exit code -9" in str(lost.value) and str(own.replica.log_path) in str(lost.value)
    assert own.engine.weight_version == NO_WEIGHTS and own.engine.lost
    assert driver.produce() == quiet


def test_an_engine_says_that_it_computes(own, driver, quiet):
    """Its word, once a second at most, is the progress from which rollout.request_s counts."""
    before = time.monotonic()
    assert until(lambda: driver.produce() == quiet and own.replica.progressed_at >= before)


@pytest.mark.parametrize("after", [1, 17])
def test_a_call_disturbed_by_a_kill_equals_an_undisturbed_one(own, driver, quiet, after):
    """A call disturbed by a kill equals an undisturbed one: none lost, none doubled, bitwise the same tokens.

    The engine that came instead is exact.
    """
    pid = own.pid
    with in_mid_generation(own, kill, after) as when:
        assert driver.produce() == quiet
    print(f"killed after {after} of {len(PROMPTS)} requests, all there {time.monotonic() - when[0]:.1f} s later")
    assert own.pid != pid
    assert own.largest_gap(PROMPTS[:4], 1) < LOGPROB_TOLERANCE


@pytest.mark.long
def test_a_call_disturbed_twice_equals_an_undisturbed_one(own, driver, quiet):
    with in_mid_generation(own, kill, 3), in_mid_generation(own, kill, 9):
        assert driver.produce() == quiet


@pytest.mark.long
def test_a_call_disturbed_by_a_hang_equals_an_undisturbed_one(own, driver, quiet):
    """A stopped engine makes no progress and is restarted; the one that came instead has all the time."""
    pid, restart = own.pid, own.replica.restart

    def restart_with_time() -> None:
        own.engine._rollout = replace(own.engine._rollout, request_s=REQUEST_S)
        restart()

    with (
        settings(own, request_s=10.0),
        in_mid_generation(own, stop, 6) as when,
        pytest.MonkeyPatch.context() as planted,
    ):
        planted.setattr(own.replica, "restart", restart_with_time)
        assert driver.produce() == quiet
    print(f"all there {time.monotonic() - when[0]:.1f} s after it was stopped")
    assert own.pid != pid and not pathlib.Path(f"/proc/{pid}").exists()


def test_an_engine_killed_between_two_calls_is_replaced_by_the_next_sync(own, driver, quiet):
    pid = own.pid
    kill(pid)
    own.replica._process.wait(patient(HANG_S))
    assert until(lambda: own.engine.weight_version == NO_WEIGHTS)
    assert driver.produce() == quiet and own.pid != pid


@pytest.mark.long
def test_an_engine_killed_in_mid_sync_is_replaced_and_the_sync_sent_again(own, driver, quiet):
    replica, control, pids = own.replica, own.replica.control, [own.pid]

    def killing(method, arguments, timeout_s):
        if arguments.get("kind") == "end" and len(pids) == 1:
            kill(pids[0])
            pids.append(0)
        return control(method, arguments, timeout_s)

    replica.weight_version = NO_WEIGHTS  # so that there is a sync
    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(replica, "control", killing)
        assert driver.produce() == quiet
    assert len(pids) == 2 and own.pid != pids[0]


@pytest.mark.long
def test_a_send_to_an_engine_that_hangs_ends(own, driver, quiet, monkeypatch):
    """A send to an engine that hangs ends.

    The engine's socket is full, so the prompt itself cannot be sent: that wait has a bound too.
    """
    monkeypatch.setattr(process_replica, "SEND_S", 2)
    own.replica.restart()
    own.replica.wait_ready(START_S)
    stop(own.pid)
    request = GenerateRequest(
        request_id="long", token_ids=(5,) * 2_000_000, n=1, max_tokens=1, temperature=1.0, seed=0, stop_token_ids=()
    )
    with pytest.raises(ReplicaLost, match="is gone"):
        own.replica.submit(request).result(patient(HANG_S))
    own.engine.recover([own.replica.name])
    assert driver.produce() == quiet


def limit_memory(pid: int) -> None:
    """Let the running engine have no further memory of the system; its heap may hold some that is free."""
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        resource.prlimit(pid, limit, (1 << 20, 1 << 20))


def test_an_engine_out_of_memory_is_replaced(own, driver, quiet):
    pid = own.pid
    with settings(own, request_s=REQUEST_S), in_mid_generation(own, limit_memory, 4):
        assert driver.produce() == quiet
    assert own.pid != pid


def test_an_engine_out_of_memory_too_often_ends_with_advice(own, driver, quiet):
    with settings(own, request_s=REQUEST_S, max_restarts=0):
        own.engine._restarts = 0
        with in_mid_generation(own, limit_memory, 4), pytest.raises(EngineError) as ended:
            driver.produce()
    assert "was lost 1 times in a row, and rollout.max_restarts=0" in str(ended.value)
    advice = "little memory: lower rollout.gpu_memory_utilization, rollout.max_requests or rollout.vllm.max_num_seqs"
    # native code that is refused memory may crash before it can say why; then vLLM's own last word stands there
    assert advice in str(ended.value) or "Segfault encountered" in str(ended.value)
    own.engine._lost = [own.replica]
    assert driver.produce() == quiet


@pytest.mark.long
def test_too_many_restarts_in_a_row_end_the_call(own, driver, quiet):
    """Too many restarts in a row end the call.

    Each engine is killed at its first answer; there is one restart, and then the error.
    """
    with settings(own, max_restarts=1), pytest.MonkeyPatch.context() as planted:
        replica, deliver = own.replica, own.replica._deliver

        def deadly(header, arrays, ready):
            if header["kind"] == "output":
                kill(replica.pid)
            deliver(header, arrays, ready)

        planted.setattr(replica, "_deliver", deadly)
        with pytest.raises(EngineError, match="was lost 2 times in a row, and rollout.max_restarts=1. .*exit code -9"):
            driver.produce()
    own.engine._lost, own.engine._restarts = [own.replica], 0
    assert driver.produce() == quiet


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_for_the_rank_does_not_end_its_engine(own, driver, quiet, number):
    """A signal for the rank does not end its engine.

    Schedulers signal whole jobs; the rank finishes its step and saves, with its engine.
    """
    pid = own.pid
    with in_mid_generation(own, lambda pid: os.kill(pid, number), 2):
        assert driver.produce() == quiet
    assert own.pid == pid


def alive(pid: int) -> bool:
    """Return whether a process is alive; a zombie, whom nobody has waited for, is not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


RANK = """
import pathlib, sys, time
sys.path.insert(0, {root!r})
from tests.vllm.rig import start_bench
bench = start_bench(pathlib.Path({folder!r}), pathlib.Path({run!r}))
print(bench.pid, flush=True)
if {ready}:
    bench.engine.recover(())
    bench.load(1)
print("ready", flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("ready", [False, True])
def test_a_rank_killed_takes_its_engine_along(own, tmp_path, ready):
    """A rank that is killed takes its engine along, while the engine starts as well as when it serves.

    kill -9 leaves the rank no time to end it.
    """
    program = RANK.format(root=str(ROOT), folder=str(own.folder), run=str(tmp_path), ready=ready)
    rank = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    watchdog = threading.Timer(patient(180), rank.kill)
    watchdog.start()
    try:
        pid = int(rank.stdout.readline())
        assert rank.stdout.readline().strip() == "ready" and alive(pid)
        if not ready:
            time.sleep(1.0)  # it has begun
    finally:
        rank.kill()
        rank.wait(patient(HANG_S))
        rank.stdout.close()
        watchdog.cancel()
    assert until(lambda: not alive(pid))


@pytest.mark.parametrize(
    "override, words",
    [
        ("rollout.vllm={no_such_argument: 3}", ["unexpected keyword argument 'no_such_argument'"]),
        ("rollout.vllm={block_size: 32, max_model_len: 100000}", ["max_model_len (100000)"]),
        ("model.hf_path=/no/such/folder", ["/no/such/folder"]),
    ],
)
def test_an_engine_that_cannot_start_says_why(own, tmp_path, override, words):
    """An engine that cannot start says why, in its own words, and where its log is.

    Nobody waits until rollout.start_s.
    """
    config = config_of(own.folder, tmp_path, override)
    replica = ProcessReplica(
        engine_arguments(config, CPU), engine_environment(os.environ, None, 1), tmp_path / "engine.log"
    )
    replica.start()
    try:
        with pytest.raises(ReplicaLost) as lost:
            replica.wait_ready(START_S)
        assert all(word in str(lost.value) for word in ["ended (exit code 1)", str(tmp_path / "engine.log"), *words]), (
            lost.value
        )
    finally:
        replica.close()
    assert not alive(replica.pid)


def test_an_engine_that_is_late_says_which_setting_to_raise(own, tmp_path):
    late = start_bench(own.folder, tmp_path)
    try:
        late.engine._rollout = replace(late.engine._rollout, start_s=1.0)
        with pytest.raises(EngineError, match="was not ready after 1 s; raise rollout.start_s, or read .*vllm_0.log"):
            late.engine.recover(())
    finally:
        late.engine.close()
    assert not alive(late.pid)


def test_the_engines_environment_is_its_own(own):
    """The engine's environment has no variable of a launcher, and none that would let vLLM unpickle."""
    environment = pathlib.Path(f"/proc/{own.pid}/environ").read_bytes().decode().split("\0")
    names = {entry.partition("=")[0] for entry in environment}
    assert not names & {"RANK", "WORLD_SIZE", "MASTER_ADDR", "VLLM_ALLOW_INSECURE_SERIALIZATION"}
