"""Weights that change while a real engine generates.

Every token is that of the weights its span names, and a failure loses nothing.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from megatron_rl.rollout.engine import EngineLost
from megatron_rl.rollout.vllm.replica import UPDATING
from megatron_rl.rollout.vllm.server_replica import ANSWER_S as CONTROL_S
from megatron_rl.types import Rollout
from tests.vllm.calls import PROMPTS, Call, prompts_of, spans
from tests.vllm.rig import LOGPROB_TOLERANCE, Bench, model_folder, reference_logprobs, start_bench
from tests.vllm.served import KEY, Served

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]

FEW = 4  # of each kind are compared with Hugging Face
LONG = ("rollout.max_response_tokens=200", "rollout.request_s=200", "weight_sync.in_flight=true")


@pytest.fixture(scope="module")
def flying(inputs, tmp_path_factory) -> Iterator[Bench]:
    """Start an engine that takes weights in flight and whose calls last for some seconds.

    Requests are running, waiting and finished at any time.
    """
    root = tmp_path_factory.mktemp("in_flight")
    folder = model_folder(inputs / "model", root / "model", "qwen2", tied=True)
    started = start_bench(folder, root / "run", *LONG, "rollout.vllm={max_num_seqs: 4}")
    started.engine._stop_ids = ()  # all answers have their full length
    started.versions = itertools.count(0)
    try:
        started.engine.recover(())
        yield started
    finally:
        started.engine.close()


@pytest.fixture(scope="module")
def flying_server(inputs, tmp_path_factory) -> Iterator[Bench]:
    """Start an engine that takes weights in flight over HTTP: one server, its weights from the trainer alone."""
    root = tmp_path_factory.mktemp("in_flight_server")
    folder = model_folder(inputs / "model", root / "model", "qwen2", tied=True)
    served = Served(folder, root, "--load-format", "dummy", "--max-num-seqs", "4", replicas=1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KEY_OF_THE_TESTS", KEY)
            # A server with few requests at a time is not far ahead of what has been told of it, and hears of a pause
            # soon.
            servers = [
                f"rollout.servers=[{served.urls[0]}]",
                "rollout.api_key_env=KEY_OF_THE_TESTS",
                "rollout.max_requests=4",
            ]
            started = start_bench(folder, root / "run", *LONG, "rollout.vllm={}", *servers)
        started.engine._stop_ids = ()
        started.versions = itertools.count(0)
        started.engine.recover(())
        yield started
        started.engine.close()
    finally:
        served.end()


@pytest.fixture(params=["process", pytest.param("server", marks=pytest.mark.long)])
def either(request) -> Bench:
    return request.getfixturevalue("flying" if request.param == "process" else "flying_server")


def test_every_token_is_of_the_weights_that_its_span_names(either):
    """Every token is of the weights that its span names, with two updates in the middle of one call.

    The reference of each is Hugging Face with that version's weights.
    """
    for _ in range(4):  # an update may fall between the last token of four answers and the first of the next four
        versions, call = {either.load(1): 1}, Call(either)
        for seed in (2, 3):
            call.wait_for_the_middle()
            versions[either.load(seed)] = seed
        rollouts = call.result()
        assert all(sum(count for _, count in x.weight_versions) == len(x.response_ids) == 200 for x in rollouts)
        kinds: dict[tuple[int, ...], list[Rollout]] = {}
        for rollout in rollouts:
            kinds.setdefault(tuple(version for version, _ in rollout.weight_versions), []).append(rollout)
        seen = {version for kind in kinds for version in kind} == set(versions)
        if spanned := seen and sum(len(kind) > 1 for kind in kinds) > 1:
            break
    print("versions of the rollouts:", {kind: len(found) for kind, found in sorted(kinds.items())})
    assert spanned
    gaps, others = dict.fromkeys(versions, 0.0), []
    for version, seed in versions.items():
        either.weights(seed)
        for rollout in [x for found in kinds.values() for x in found[:FEW]]:
            gap = np.abs(
                np.array(rollout.logprobs)
                - reference_logprobs(either.model, rollout, either.config.rollout.temperature)
            )
            for named, tokens in spans(rollout):
                if named == version:
                    gaps[version] = max(gaps[version], gap[tokens].max())
                else:
                    others.append(gap[tokens].max())
    print("largest differences:", gaps)
    assert max(gaps.values()) < LOGPROB_TOLERANCE and max(others) > 1000 * LOGPROB_TOLERANCE
    assert [x for _, group in sorted(call.told) for x in group] == rollouts and len(call.told) == len(call.prompts)


def until_a_tie(one: Rollout, other: Rollout) -> bool:
    """Assert that two greedy rollouts are the same up to a tie, and return whether there is one.

    At a tie two tokens are equally likely, to rounding.
    """
    differ = np.flatnonzero(np.array(one.response_ids) != np.array(other.response_ids))
    end = int(differ[0]) + 1 if len(differ) else len(one.response_ids)
    gap = np.abs(np.subtract(one.logprobs, other.logprobs)[:end])
    assert gap.max() < LOGPROB_TOLERANCE, (one.sample_id, end, gap.max())
    return len(differ) > 0


def test_the_same_weights_in_flight_equal_an_undisturbed_run(either):
    """Weights that arrive after the last token prove nothing: then the call is made again, five times at most."""
    either.load(4)
    quiet = either.engine.generate(prompts_of(either, 2), 1, temperature=0.0)
    for _ in range(5):
        call = Call(either, 2, samples=1, temperature=0.0)
        call.wait_for_the_middle()
        version = either.load(4)
        disturbed = call.result()
        tied = [until_a_tie(x, y) for x, y in zip(disturbed, quiet, strict=True)]
        assert sum(tied) <= 2, f"{sum(tied)} of {len(tied)} rollouts differ from where two tokens were equally likely"
        if any(len(x.weight_versions) == 2 for x in disturbed):
            break
    assert any(len(x.weight_versions) == 2 for x in disturbed)
    assert max(v for x in disturbed for v, _ in x.weight_versions) == version


def test_a_call_that_begins_in_mid_update_waits_for_it(either, monkeypatch):
    """A call that begins in mid-update waits for it: a paused engine samples its requests by the new weights alone."""
    either.load(5)
    control, calls = either.replica.control, []

    def watched(method, arguments, timeout_s):
        if arguments.get("kind") == "end":
            assert either.replica.weight_version == UPDATING
            calls.append(Call(either, few=2))
            time.sleep(1.0)
            assert not calls[0].told
        return control(method, arguments, timeout_s)

    with monkeypatch.context() as planted:
        planted.setattr(either.replica, "control", watched)
        version = either.load(6)
    (call,) = calls
    assert {x.weight_versions for x in call.result()} == {((version, 200),)}
    assert either.engine.lost == []


def test_old_keys_and_values_would_show(flying, monkeypatch):
    """The comparison can fail: requests that go on with the old weights' keys and values show."""
    control = flying.replica.control
    for _ in range(5):  # an update may fall between the last token of four answers and the first of the next four
        flying.load(1)
        call = Call(flying)
        call.wait_for_the_middle()
        with monkeypatch.context() as planted:
            planted.setattr(
                flying.replica, "control", lambda m, a, t: None if m == "reset_prefix_cache" else control(m, a, t)
            )
            version = flying.load(2)
        if spanning := [x for x in call.result() if len(x.weight_versions) > 1]:
            break
    stale = [0.0]
    for rollout in spanning[:FEW]:
        gap = np.abs(
            np.array(rollout.logprobs) - reference_logprobs(flying.model, rollout, flying.config.rollout.temperature)
        )
        stale += [gap[tokens].max() for named, tokens in spans(rollout) if named == version and tokens.start]
    assert max(stale) > 1000 * LOGPROB_TOLERANCE
    flying.load(3)


def fails_in_flight(bench: Bench, weights: dict, plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Assert that a failed update raises EngineLost in the generating thread at once.

    The rest is generated once the engine has weights again.
    """
    name, pid = bench.replica.name, bench.pid
    call = Call(bench)
    call.wait_for_the_middle()
    with pytest.MonkeyPatch.context() as planted:
        plant(planted)
        report = bench.sync(weights.items())
    assert list(report.failed) == [name] and bench.engine.lost == [name]
    failed = time.monotonic()
    with pytest.raises(EngineLost) as lost:
        call.result()
    assert time.monotonic() - failed < 100.0  # not after rollout.request_s
    finished = lost.value.finished
    assert dict(call.told) == finished and 0 < len(finished) < len(PROMPTS)
    with pytest.raises(EngineLost):
        bench.engine.generate(PROMPTS[:1], 1)
    bench.engine.recover(bench.engine.lost)
    assert bench.pid != pid and bench.engine.lost == []
    version = bench.load(8)
    rest = [prompt for index, prompt in enumerate(PROMPTS) if index not in finished]
    rollouts = bench.engine.generate(rest, 1)
    assert {x.weight_versions for x in rollouts} == {((version, 200),)}
    assert bench.largest_gap(rest[:2], 1) < LOGPROB_TOLERANCE


def test_an_update_that_is_refused_in_flight_ends_the_call(flying):
    flying.load(7)
    weights = flying.weights(3)
    del weights["model.norm.weight"]
    fails_in_flight(flying, weights, lambda _: None)


def test_an_engine_killed_in_mid_update_ends_the_call(flying):
    flying.load(7)
    control = flying.replica.control

    def killing(method, arguments, timeout_s):
        if arguments.get("kind") == "end":
            os.kill(flying.pid, signal.SIGKILL)
        return control(method, arguments, timeout_s)

    fails_in_flight(flying, flying.weights(3), lambda planted: planted.setattr(flying.replica, "control", killing))


def test_an_exporter_that_raises_in_flight_ends_the_call(flying):
    """An exporter that raises in flight ends the call.

    The engine itself is well: the next update goes through without a restart.
    """
    flying.load(7)
    call, pid = Call(flying), flying.pid

    def broken() -> Iterator:
        yield from itertools.islice(flying.weights(3).items(), 6)
        raise OSError("the exporter broke")

    call.wait_for_the_middle()
    with pytest.raises(OSError, match="the exporter broke"):
        flying.sync(broken())
    with pytest.raises(EngineLost, match="the weight update in flight broke off"):
        call.result()
    assert flying.engine.lost == [flying.replica.name]
    flying.load(8)
    assert flying.engine.lost == [] and flying.pid == pid and flying.largest_gap(PROMPTS[:2], 1) < LOGPROB_TOLERANCE


def is_paused(bench: Bench) -> bool:
    return bench.replica.server.call("GET", "/is_paused", timeout_s=CONTROL_S)["is_paused"]


@pytest.mark.long
def test_a_server_whose_update_fails_in_flight_goes_on_serving(flying_server):
    """A server whose update fails in flight goes on serving.

    It is not paused, what was under way ended, nobody takes what its weights sample, and the next update mends it.
    """
    bench = flying_server
    bench.load(7)
    call = Call(bench)
    call.wait_for_the_middle()
    weights = bench.weights(3)
    del weights["model.norm.weight"]
    report = bench.sync(weights.items())
    assert list(report.failed) == [bench.replica.name] and "did not arrive" in report.failed[bench.replica.name]
    with pytest.raises(EngineLost, match="broke off"):
        call.result()
    assert not is_paused(bench) and bench.replica._get("/weight_info", "weight_version") == "updating"
    with pytest.raises(EngineLost):
        bench.engine.generate(PROMPTS[:1], 1)
    assert bench.engine.recover(bench.engine.lost) == [] and bench.engine.lost == []
    version = bench.load(8)
    assert {x.weight_versions for x in bench.engine.generate(PROMPTS[:2], 2)} == {((version, 200),)}
    assert bench.largest_gap(PROMPTS[:2], 1) < LOGPROB_TOLERANCE


@pytest.mark.long
def test_an_exporter_that_raises_leaves_no_server_paused(flying_server):
    bench = flying_server
    bench.load(7)
    call = Call(bench)

    def broken() -> Iterator:
        assert is_paused(bench)
        yield from itertools.islice(bench.weights(3).items(), 6)
        raise OSError("the exporter broke")

    call.wait_for_the_middle()
    with pytest.raises(OSError, match="the exporter broke"):
        bench.sync(broken())
    assert not is_paused(bench)
    with pytest.raises(EngineLost, match="broke off"):
        call.result()
    bench.engine.recover(bench.engine.lost)
    bench.load(8)
    assert bench.largest_gap(PROMPTS[:2], 1) < LOGPROB_TOLERANCE


def test_what_a_killed_trainer_left_paused_serves_the_next_one(flying_server):
    """A server that a killed trainer left paused serves the next trainer.

    It does so whether or not the next one's updates are in flight.
    """
    bench = flying_server
    bench.replica.control("pause", {}, CONTROL_S)
    assert is_paused(bench)
    bench.engine._sync.forget(bench.replica)  # as one that has just begun
    bench.engine._in_flight = False
    try:
        bench.load(9)
        assert not is_paused(bench) and bench.largest_gap(PROMPTS[:2], 1) < LOGPROB_TOLERANCE
    finally:
        bench.engine._in_flight = True
