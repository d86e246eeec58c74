"""No sample is lost or doubled, or an error says why, where a real engine is killed, hangs, or does not start."""

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
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_rl.errors import EngineError
from megatron_rl.rollout.engines.engine import NO_WEIGHTS, EngineLost
from megatron_rl.rollout.engines.replica import GenerateRequest, ReplicaLost
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.rollout_metrics import RolloutMetrics
from megatron_rl.rollout.vllm import process_replica
from megatron_rl.rollout.vllm.arguments import engine_arguments
from megatron_rl.rollout.vllm.process_replica import ProcessReplica, engine_environment
from megatron_rl.rollout.worker import RolloutWorker
from megatron_rl.types import Score
from tests.patience import HANG_S, patient, until
from tests.vllm import rig
from tests.vllm.rig import LOGPROB_TOLERANCE, REQUEST_S, START_S, Bench, make_prompts, start_bench, told

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROMPTS = make_prompts(*range(3, 67, 2))
SAMPLES = 8
SEED = 21


@pytest.fixture(scope="module")
def own(inputs, tmp_path_factory) -> Iterator[Bench]:
    """Start an engine so wide that each prompt needs a block of ten megabytes, for which the system is asked."""
    root = tmp_path_factory.mktemp("faults")
    folder = rig.model_folder(inputs / "model", root / "model", "qwen2", tied=True, intermediate=65536)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "16384")  # for every larger block, so that a limit is met at once
        started = start_bench(folder, root / "run", "rollout.max_response_tokens=12", "rollout.vllm={max_num_seqs: 16}")
    started.engine._stop_ids = ()  # all answers have their full length
    with rig.ready(started):
        yield started


@pytest.fixture(scope="module")
def produce(own) -> Iterator[Callable[[], list[tuple]]]:
    """Return a call by RolloutManager over the engine, whose weights are those of one seed under one version."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # of this process alone
    weights, scores = own.weights(SEED), lambda rollouts: [Score(total=1.0, by_function=()) for _ in rollouts]
    source, settings = SimpleNamespace(version=1000, tensors=lambda _: iter(weights.items())), own.config
    deadline_s, producer = settings.run.deadline_s, settings.rollout.producer
    worker = RolloutWorker(own.engine, scores, producer, apart=False, share=(0, 1), deadline_s=deadline_s)
    metrics = RolloutMetrics(has_turns=False, has_delta=False)
    manager = RolloutManager(worker, settings.weight_sync, weights=source, metrics=metrics)

    def call() -> list[tuple]:
        manager.sync_weights()
        found = manager.produce(dict(enumerate(PROMPTS)), SAMPLES).rollouts
        return told(rollout for place in sorted(found) for rollout in found[place])

    yield call
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def quiet(produce) -> list[tuple]:
    return produce()


@contextlib.contextmanager
def settings(bench: Bench, **changes) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(bench.engine, "_rollout", replace(bench.engine._rollout, **changes))
        yield


@contextlib.contextmanager
def in_mid_generation(bench: Bench, act: Callable[[int], None], after: int) -> Iterator[None]:
    """Call ``act(pid)`` once ``after`` requests of the next call are answered."""
    replica, deliver, count = bench.replica, bench.replica._deliver, itertools.count(1)

    def counted(header, arrays, ready):
        deliver(header, arrays, ready)
        if header["kind"] == "output" and next(count) == after:
            act(replica.pid)

    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(replica, "_deliver", counted)
        yield
    assert next(count) > after, "the call had fewer answers than that"


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_an_engine_killed_in_mid_generation_hands_over_what_is_finished(own, produce, quiet):
    with in_mid_generation(own, kill, after=5), pytest.raises(EngineLost) as lost:
        own.engine.generate(PROMPTS, SAMPLES)
    finished = lost.value.finished
    assert 5 <= len(finished) < len(PROMPTS) and all(len(rollouts) == SAMPLES for rollouts in finished.values())
    assert told(x for place in sorted(finished) for x in finished[place]) == [
        row for place in sorted(finished) for row in quiet[place * SAMPLES : (place + 1) * SAMPLES]
    ]
    assert "exit code -9" in str(lost.value) and str(own.replica.log_path) in str(lost.value)
    assert own.engine.weight_version == NO_WEIGHTS and own.engine.lost and produce() == quiet


def test_an_engine_says_that_it_computes(own, produce, quiet):
    """Its word, once a second at most, is the progress from which rollout.request_s counts."""
    before = time.monotonic()
    assert until(lambda: produce() == quiet and own.replica.progressed_at >= before)


@pytest.mark.long
@pytest.mark.parametrize("after", [1, 17])
def test_a_call_disturbed_by_a_kill_equals_an_undisturbed_one(own, produce, quiet, after):
    """None is lost, none doubled, bitwise the same tokens, and the engine that came instead is exact."""
    pid = own.pid
    with in_mid_generation(own, kill, after):
        assert produce() == quiet
    assert own.pid != pid and own.largest_gap(PROMPTS[:4], 1) < LOGPROB_TOLERANCE


@pytest.mark.long
def test_a_call_disturbed_by_a_hang_equals_an_undisturbed_one(own, produce, quiet):
    """A stopped engine makes no progress and is restarted; the one that came instead has all the time."""
    pid, restart = own.pid, own.replica.restart

    def restart_with_time() -> None:
        own.engine._rollout = replace(own.engine._rollout, request_s=REQUEST_S)
        restart()

    stopped = in_mid_generation(own, lambda pid: os.kill(pid, signal.SIGSTOP), 6)
    with settings(own, request_s=10.0), stopped, pytest.MonkeyPatch.context() as planted:
        planted.setattr(own.replica, "restart", restart_with_time)
        assert produce() == quiet
    assert own.pid != pid and not pathlib.Path(f"/proc/{pid}").exists()


@pytest.mark.long
def test_an_engine_killed_between_two_calls_is_replaced_by_the_next_sync(own, produce, quiet):
    pid = own.pid
    kill(pid)
    own.replica._process.wait(patient(HANG_S))
    assert until(lambda: own.engine.weight_version == NO_WEIGHTS) and produce() == quiet and own.pid != pid


@pytest.mark.long
def test_a_send_to_an_engine_that_hangs_ends(own, produce, quiet, monkeypatch):
    """The engine's socket is full, so the prompt itself cannot be sent: that wait has a bound too."""
    monkeypatch.setattr(process_replica, "SEND_S", 2)
    own.replica.restart()
    own.replica.wait_ready(START_S)
    os.kill(own.pid, signal.SIGSTOP)
    given = dict(token_ids=(5,) * 2_000_000, n=1, max_tokens=1, temperature=1.0, seed=0, stop_token_ids=())
    request = GenerateRequest(request_id="long", **given)
    with pytest.raises(ReplicaLost, match="is gone"):
        own.replica.submit(request).result(patient(HANG_S))
    own.engine.recover([own.replica.name])
    assert produce() == quiet


def limit_memory(pid: int) -> None:
    """Let the running engine have no further memory of the system; its heap may hold some that is free."""
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        resource.prlimit(pid, limit, (1 << 20, 1 << 20))


@pytest.mark.long
def test_an_engine_out_of_memory_is_replaced_or_ends_with_advice(own, produce, quiet):
    pid = own.pid
    with settings(own, request_s=REQUEST_S), in_mid_generation(own, limit_memory, 4):
        assert produce() == quiet
    assert own.pid != pid
    with settings(own, request_s=REQUEST_S, max_restarts=0), in_mid_generation(own, limit_memory, 4):
        own.engine._restarts = 0
        with pytest.raises(EngineError) as ended:
            produce()
    assert "was lost 1 times in a row, and rollout.max_restarts=0" in str(ended.value)
    advice = "little memory: lower rollout.gpu_memory_utilization, rollout.max_requests or rollout.vllm.max_num_seqs"
    # native code that is refused memory may crash before it can say why; then vLLM's own last word stands there
    assert advice in str(ended.value) or "Segfault encountered" in str(ended.value)
    own.engine._lost = [own.replica]
    assert produce() == quiet


@pytest.mark.long
def test_a_signal_for_the_rank_does_not_end_its_engine(own, produce, quiet):
    """Schedulers signal whole jobs; the rank finishes its step and saves, with its engine."""
    pid = own.pid
    for after, number in enumerate((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), start=1):
        with in_mid_generation(own, lambda pid, number=number: os.kill(pid, number), after):
            assert produce() == quiet
        assert own.pid == pid, number


def alive(pid: int) -> bool:
    """Return whether a process is alive; a zombie, whom nobody has waited for, is not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


RANK = """
import pathlib, sys
from tests.vllm.rig import start_bench
folder, run, ready = sys.argv[1:]
bench = start_bench(pathlib.Path(folder), pathlib.Path(run))
print(bench.pid, flush=True)
if ready == "True":
    bench.engine.recover(())
    bench.load(1)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
@pytest.mark.parametrize("ready", [False, True])
def test_a_rank_killed_takes_its_engine_along(own, tmp_path, ready):
    """While the engine starts as well as when it serves; kill -9 leaves the rank no time to end it."""
    command = [sys.executable, "-c", RANK, str(own.folder), str(tmp_path), str(ready)]
    rank = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    watchdog = threading.Timer(patient(180), rank.kill)
    watchdog.start()
    try:
        pid = int(rank.stdout.readline())
        assert rank.stdout.readline().strip() == "ready" and alive(pid)
        # its log has a word once Python runs in it
        assert ready or until(lambda: any(x.stat().st_size for x in tmp_path.glob("engines/*.log")))
    finally:
        rank.kill()
        rank.wait(patient(HANG_S))
        rank.stdin.close()
        rank.stdout.close()
        watchdog.cancel()
    assert until(lambda: not alive(pid))


FALSE_STARTS = {"rollout.vllm={no_such_argument: 3}": "unexpected keyword argument 'no_such_argument'",
                "rollout.vllm={block_size: 32, max_model_len: 100000}": "max_model_len (100000)",
                "model.hf_path=/no/such/folder": "/no/such/folder"}


@pytest.mark.long
@pytest.mark.parametrize("override", FALSE_STARTS)
def test_an_engine_that_cannot_start_says_why(own, tmp_path, override):
    """It says so in its own words, and where its log is; nobody waits until rollout.start_s."""
    path = tmp_path / "engine.log"
    config = rig.config_of(own.folder, tmp_path, override)
    sections = config.model, config.rollout, config.weight_sync, config.lora
    arguments = engine_arguments(*sections, max_prompt_tokens=config.data.max_prompt_tokens, seed=0, device=rig.CPU)
    replica = ProcessReplica(arguments, engine_environment(os.environ, None, 1), path)
    replica.start()
    try:
        with pytest.raises(ReplicaLost) as lost:
            replica.wait_ready(START_S)
        said = str(lost.value)
        assert "ended (exit code 1)" in said and str(path) in said and FALSE_STARTS[override] in said, said
    finally:
        replica.close()
    assert not alive(replica.pid)


@pytest.mark.long
def test_an_engine_that_is_late_says_which_setting_to_raise(own, tmp_path):
    late = start_bench(own.folder, tmp_path)
    try:
        late.engine._rollout = replace(late.engine._rollout, start_s=1.0)
        with pytest.raises(EngineError, match="was not ready after 1 s; raise rollout.start_s, or read .*vllm_0.log"):
            late.engine.recover(())
    finally:
        late.engine.close()
    assert not alive(late.pid)
