"""Weights that change while a real engine generates: each token is that of its span's, and nothing is lost."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from megatron_rl.rollout.engines.engine import EngineLost
from megatron_rl.rollout.engines.replica import UPDATING
from megatron_rl.rollout.vllm.server_replica import ANSWER_S as CONTROL_S
from megatron_rl.types import Rollout
from tests.patience import until
from tests.vllm.calls import FEW, LONG, PROMPTS, Call, lengths_of, prompts_of, spans, spans_hold
from tests.vllm.rig import LOGPROB_TOLERANCE, Bench, model_folder, running, start_bench
from tests.vllm.served import KEY, Served

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]


@pytest.fixture(scope="module")
def flying(inputs, tmp_path_factory) -> Iterator[Bench]:
    """Start an engine that takes weights in flight; requests are running, waiting and finished at any time."""
    with running(inputs, tmp_path_factory.mktemp("flying"), "qwen2", *LONG, "rollout.vllm={max_num_seqs: 4}") as bench:
        bench.engine._stop_ids = ()  # all answers have their full length
        yield bench


@pytest.fixture(scope="module")
def flying_server(inputs, tmp_path_factory) -> Iterator[Bench]:
    """Start an engine that takes weights in flight over HTTP: one server, its weights from the trainer alone."""
    root = tmp_path_factory.mktemp("in_flight_server")
    folder = model_folder(inputs / "model", root / "model", "qwen2", tied=True)
    with Served(folder, root, "--load-format", "dummy", "--max-num-seqs", "4", replicas=1) as served:
        # A server with few requests at a time is not far ahead of what has been told of it, and hears of a pause soon.
        servers = (f"rollout.servers=[{served.urls[0]}]", "rollout.api_key_env=KEY_OF_THE_TESTS")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KEY_OF_THE_TESTS", KEY)
            bench = start_bench(folder, root / "run", *LONG, "rollout.vllm={}", *servers, "rollout.max_requests=4")
        bench.engine._stop_ids = ()
        bench.engine.recover(())
        yield bench
        bench.engine.close()


@pytest.fixture(params=["process", pytest.param("server", marks=pytest.mark.long)])
def either(request) -> Bench:
    return request.getfixturevalue("flying" if request.param == "process" else "flying_server")


def test_every_token_is_of_the_weights_that_its_span_names(either):
    spans_hold(either, either.load, either.weights)


def until_a_tie(one: Rollout, other: Rollout) -> bool:
    """Assert that two greedy rollouts are the same up to a tie, to rounding; return whether there is one."""
    differ = np.flatnonzero(np.array(one.response_ids) != np.array(other.response_ids))
    end = int(differ[0]) + 1 if len(differ) else len(one.response_ids)
    gap = np.abs(np.subtract(one.logprobs, other.logprobs)[:end])
    assert gap.max() < LOGPROB_TOLERANCE, (one.sample_id, end, gap.max())
    return len(differ) > 0


def test_the_same_weights_in_flight_equal_an_undisturbed_run(either):
    either.load(4)
    prompts = prompts_of(either, 2)
    quiet = either.engine.generate(prompts, 1, temperature=0.0, max_tokens=lengths_of(prompts))
    call = Call(either, 2, samples=1, temperature=0.0)
    call.wait_for_the_middle()
    version = either.load(4)
    disturbed = call.result()
    tied = [until_a_tie(x, y) for x, y in zip(disturbed, quiet, strict=True)]
    assert sum(tied) <= 2, f"{sum(tied)} of {len(tied)} rollouts differ from where two tokens were equally likely"
    assert any(len(x.weight_versions) == 2 for x in disturbed)
    assert max(v for x in disturbed for v, _ in x.weight_versions) == version


def new_weights_alone(bench: Bench, rollouts: list[Rollout], version: int) -> bool:
    return all(x.weight_versions == ((version, len(x.response_ids)),) for x in rollouts)


def test_a_call_that_begins_in_mid_update_waits_for_it(either, monkeypatch):
    """An engine that was paused samples the requests that came meanwhile by the new weights alone."""
    either.load(5)
    calls, sent, submit = [], [], either.replica.submit

    def begin(_, arguments):
        if arguments.get("kind") == "end":
            assert either.replica.weight_version == UPDATING
            calls.append(Call(either, few=2))
            assert until(lambda: len(sent) == 2) and not calls[0].told

    with monkeypatch.context() as planted:
        planted.setattr(either.replica, "submit", lambda request: (submit(request), sent.append(request))[0])
        either.watch_control(planted, begin)
        version = either.load(6)
    (call,) = calls
    assert new_weights_alone(either, call.result(), version) and either.engine.lost == []


def test_old_keys_and_values_would_show(flying, monkeypatch):
    """The comparison can fail: requests that go on with the old weights' keys and values show."""
    flying.load(1)
    call = Call(flying)
    call.wait_for_the_middle()
    with monkeypatch.context() as planted:
        flying.skip_resets(planted)
        version = flying.load(2)
    stale = [0.0]
    for rollout in [x for x in call.result() if len(x.weight_versions) > 1][:FEW]:
        gap = flying.gap(rollout)
        stale += [gap[tokens].max() for named, tokens in spans(rollout) if named == version and tokens.start]
    assert max(stale) > 1000 * LOGPROB_TOLERANCE
    flying.load(3)


def serves_again(bench: Bench, prompts=PROMPTS[:2]) -> None:
    version = bench.load(8)
    rollouts = bench.engine.generate(prompts, 1)
    assert new_weights_alone(bench, rollouts, version) and bench.worst(rollouts[:2]) < LOGPROB_TOLERANCE
    assert bench.engine.lost == []


def fails_in_flight(bench: Bench, weights: dict, plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Assert that a failed update raises EngineLost in the generating thread, long before a request's deadline.

    The rest is generated once the engine has weights again.
    """
    name, pid = bench.replica.name, bench.pid
    call = Call(bench)
    call.wait_for_the_middle()
    with pytest.MonkeyPatch.context() as planted:
        plant(planted)
        report = bench.sync(weights.items())
    assert list(report.failed) == [name] and bench.engine.lost == [name]
    with pytest.raises(EngineLost) as lost:
        call.result()
    finished = lost.value.finished
    assert dict(call.told) == finished and 0 < len(finished) < len(PROMPTS)
    with pytest.raises(EngineLost):
        bench.engine.generate(PROMPTS[:1], 1)
    bench.engine.recover(bench.engine.lost)
    assert bench.pid != pid
    serves_again(bench, [prompt for index, prompt in enumerate(PROMPTS) if index not in finished])


def without_the_norm(bench: Bench) -> dict:
    weights = bench.weights(3)
    del weights["model.norm.weight"]
    return weights


def test_an_update_that_is_refused_in_flight_ends_the_call(flying):
    flying.load(7)
    fails_in_flight(flying, without_the_norm(flying), lambda _: None)


@pytest.mark.long
def test_an_engine_killed_in_mid_update_ends_the_call(flying):
    flying.load(7)

    def kill(_, arguments):
        if arguments.get("kind") == "end":
            os.kill(flying.pid, signal.SIGKILL)

    fails_in_flight(flying, flying.weights(3), lambda planted: flying.watch_control(planted, kill))


def is_paused(bench: Bench) -> bool:
    return not bench.replica.ours and bench.replica.server.call("GET", "/is_paused", timeout_s=CONTROL_S)["is_paused"]


def test_an_exporter_that_raises_in_flight_ends_the_call(either):
    """The engine itself is well: no server stays paused, and the next update goes through without a restart."""
    either.load(7)
    call, pid = Call(either), either.replica.ours and either.pid

    def broken() -> Iterator:
        assert either.replica.ours or is_paused(either)
        yield from itertools.islice(either.weights(3).items(), 6)
        raise OSError("the exporter broke")

    call.wait_for_the_middle()
    with pytest.raises(OSError, match="the exporter broke"):
        either.sync(broken())
    assert not is_paused(either)
    with pytest.raises(EngineLost, match="broke off"):  # the update, or a server's samples, whichever is heard first
        call.result()
    assert either.engine.lost == [either.replica.name]
    serves_again(either)
    assert (either.replica.ours and either.pid) == pid


@pytest.mark.long
def test_a_server_whose_update_fails_in_flight_goes_on_serving(flying_server):
    """It is not paused, what was under way ended, nobody takes what its weights sample, the next update mends it."""
    bench = flying_server
    bench.load(7)
    call = Call(bench)
    call.wait_for_the_middle()
    report = bench.sync(without_the_norm(bench).items())
    assert list(report.failed) == [bench.replica.name] and "did not arrive" in report.failed[bench.replica.name]
    with pytest.raises(EngineLost, match="broke off"):
        call.result()
    assert not is_paused(bench) and bench.replica._get("/weight_info", "weight_version") == "updating"
    with pytest.raises(EngineLost):
        bench.engine.generate(PROMPTS[:1], 1)
    assert bench.engine.recover(bench.engine.lost) == [] and bench.engine.lost == []
    serves_again(bench)


@pytest.mark.long
def test_what_a_killed_trainer_left_paused_serves_the_next_one(flying_server, monkeypatch):
    """It does so whether or not the next one's updates are in flight."""
    bench = flying_server
    bench.replica.control("pause", {}, CONTROL_S)
    assert is_paused(bench)
    bench.engine._sync.forget(bench.replica)  # as one that has just begun
    monkeypatch.setattr(bench.engine, "_in_flight", False)
    bench.load(9)
    assert not is_paused(bench) and bench.largest_gap(PROMPTS[:2], 1) < LOGPROB_TOLERANCE
