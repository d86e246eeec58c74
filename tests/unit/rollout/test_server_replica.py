"""A replica over HTTP against a server that misbehaves."""

import itertools
import re
import time
from collections.abc import Callable

import numpy as np
import pytest

from megatron_rl.errors import ConfigError, EngineError
from megatron_rl.rollout.engines.replica import ReplicaFacts, ReplicaLost, RequestRefused
from megatron_rl.rollout.vllm import server_health, server_replica
from megatron_rl.rollout.vllm.dispatch import dispatch
from megatron_rl.rollout.vllm.server_command import example
from megatron_rl.rollout.vllm.server_replica import ServerReplica
from tests.patience import until
from tests.unit.rollout.misbehaving_server import DESCRIPTION, FAULTS, Answer, fake_vllm, generate, in_turn, unused_port
from tests.unit.rollout.server_requests import BOUND_S, LONG_S, OUT_OF_MEMORY, SHORT_S, VERSION, replica_of, request_of

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def spread(*replicas: ServerReplica, num_requests: int = 4, deadline_s: float = LONG_S):
    given = {"weight_version": VERSION, "deadline_s": deadline_s, "max_in_flight": 8, "attempts": 3}
    return dispatch([request_of(f"q{index}") for index in range(num_requests)], replicas, **given)


def choices(change: Callable[[list[dict]], list[dict]]) -> Callable[[dict], dict]:
    """Return an answer whose choices are changed."""
    return lambda body: {"choices": change(generate(body)["choices"])}


def test_tokens_in_and_out():
    with fake_vllm() as server:
        (first, second) = replica_of(server.url).submit(request_of()).result(BOUND_S)
        method, path, body, headers = server.seen[0]
    assert first.token_ids.tolist() == second.token_ids.tolist() == [1, 2, 9] and first.token_ids.dtype == np.int64
    assert first.logprobs.tolist() == [-0.25, -0.5, -2.25] and first.logprobs.dtype == np.float32
    assert first.finish_reason == "stop" and first.weight_versions == ((3, 3),)
    assert (method, path) == ("POST", "/inference/v1/generate") and "Authorization" not in headers
    assert body["token_ids"] == [5, 6]
    assert {"stop_token_ids": [9], "n": 2}.items() <= body["sampling_params"].items()


ENDLESS = ("hang", "drip", "drip headers")
LOST = {
    **{fault: (FAULTS[fault], "without progress in the last 0.2 s") for fault in ENDLESS},
    "drop": (FAULTS["drop"], "the connection broke, IncompleteRead"),
    "reset": (FAULTS["reset"], "the connection broke"),
    "half without length": (FAULTS["half without length"], "an answer without a length"),
    "cut in the headers": (FAULTS["cut in the headers"], "an answer without a length"),
    "garble": (FAULTS["garble"], "the connection broke, BadStatusLine"),
    "out of memory": (Answer(500, {"error": {"message": OUT_OF_MEMORY}}), "500, " + OUT_OF_MEMORY),
    "a proxy's page": (Answer(502, b"<html>Bad Gateway</html>"), "502, <html>Bad Gateway</html>"),
    "busy": (Answer(429, {"detail": "queue is full"}), "429, queue is full"),
    "not JSON": (b"<html>welcome</html>", "not JSON, '<html>welcome</html>'"),
    "other JSON": ({"choices": [{"index": 0}]}, "cannot be read, KeyError"),
    "a list": ([1], "cannot be read, TypeError"),
    "broken off": (choices(lambda x: [each | {"finish_reason": "abort"} for each in x]), "broke off 2 of 2 samples"),
    "doubled sample": (choices(lambda x: x[:1] * 2), r"numbers its samples \[0, 0\]"),
}


@pytest.mark.parametrize("fault", LOST)
def test_requests_of_a_bad_server_are_finished_by_the_other(fault):
    behaviour, told = LOST[fault]
    deadline_s = SHORT_S if fault in ENDLESS else LONG_S
    with fake_vllm(generate=behaviour) as bad, fake_vllm() as good:
        patient_one = replica_of(good.url)
        patient_one.health.progressed_at = time.monotonic() + LONG_S  # the deadline is the bad one's
        found = spread(replica_of(bad.url), patient_one, deadline_s=deadline_s)
        assert sorted(found.finished) == ["q0", "q1", "q2", "q3"] and not found.lost
        assert list(found.down) == [bad.url] and re.search(told, found.down[bad.url]), found.down
        found = spread(replica_of(bad.url), num_requests=1, deadline_s=deadline_s)  # here the dispatcher gives it up
        late = r"did not answer request q0 in \d+\.\d s, without progress in the last 0\.2 s"
        assert [request.request_id for request in found.lost] == ["q0"]
        assert deadline_s == LONG_S or re.fullmatch(late, found.down[bad.url]), found.down


def test_wrong_counts_are_asked_for_elsewhere_or_named():
    without_logprob = choices(lambda x: [x[0] | {"logprobs": {"content": x[0]["logprobs"]["content"][:2]}}, *x[1:]])
    told = "sample 0 has 3 tokens and 2 log-probs"
    with fake_vllm(generate=without_logprob) as bad, fake_vllm() as good:
        found = spread(replica_of(bad.url), replica_of(good.url))
        assert len(found.finished) == 4 and told in str(found.causes)
        with pytest.raises(EngineError, match=f"was answered wrongly 2 times: .*{told}"):
            spread(replica_of(bad.url), num_requests=1)


SCALE_OUT = {"error": {"message": "Restart vllm serve with --enable-scale-out to enable them."}}
REFUSED = {
    "no key": (Answer(401, {"error": "Unauthorized"}), "401, no key was sent; set rollout.api_key_env"),
    "missing route": (Answer(404, {"detail": "Not Found"}), "404, Not Found. Start the server with --enable-scale-out"),
    "disabled route": (Answer(403, SCALE_OUT), "403, Restart .* Start the server with --enable-scale-out"),
    "too long": (Answer(400, {"error": {"message": "longer than 32"}}), "400, longer than 32"),
    "redirect": (Answer(307, b""), "307, no text"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_will_never_work_ends_the_call(fault):
    behaviour, told = REFUSED[fault]
    with fake_vllm(generate=behaviour) as bad, fake_vllm() as good, pytest.raises(RequestRefused, match=told):
        spread(replica_of(bad.url), replica_of(good.url))


def test_what_a_server_with_a_dead_engine_holds_is_cut(monkeypatch):
    """Its /health says that its engine is dead, and it would hold the weight update that it has taken for ever."""
    monkeypatch.setattr(server_health, "HEALTH_S", 0.1)
    with fake_vllm(start_weight_update=FAULTS["hang"], health=Answer(503, {"detail": "EngineDeadError"})) as sick:
        replica = replica_of(sick.url)
        replica.start()
        with pytest.raises(ReplicaLost, match="start_weight_update was given up here.*/health: 503, EngineDeadError"):
            replica.control("start_weight_update", {}, LONG_S)
        replica.close()


def test_abort_ends_the_request_at_once():
    with fake_vllm(generate=FAULTS["hang"]) as server:
        replica = replica_of(server.url)
        futures = [replica.submit(request_of(name)) for name in "ab"]
        assert until(lambda: len(server.seen) == 2)
        for future, act in zip(futures, (lambda: replica.abort("a"), replica.close), strict=True):
            assert not future.done()
            act()
            with pytest.raises(ReplicaLost, match="was given up here"):
                future.result(BOUND_S)
        replica.close()
        with pytest.raises(ReplicaLost, match="was closed here"):
            replica.submit(request_of())


def test_wait_ready_gives_the_facts_and_asks_again_while_the_server_starts_or_restarts(monkeypatch):
    """It is not healthy, then healthy for a moment, then its engine is found dead, then it is there again."""
    monkeypatch.setattr(server_replica, "POLL_S", 0.02)
    health = in_turn(Answer(503, b""), Answer(503, b""), Answer(200, b""))
    dead, alive = Answer(500, {"error": "EngineCore encountered an issue"}), Answer(200, {"results": [DESCRIPTION]})
    with fake_vllm(health=health, collective_rpc=in_turn(dead, alive)) as server:
        facts = replica_of(server.url).wait_ready(BOUND_S)
    assert facts == ReplicaFacts(vllm_version="0.32.0", **DESCRIPTION)


@pytest.mark.parametrize("fault", ENDLESS)
def test_an_answers_deadline_is_over_the_whole_of_it(fault):
    with fake_vllm(start_weight_update=FAULTS[fault]) as server, pytest.raises(ReplicaLost, match="answered in 0.2 s"):
        replica_of(server.url).control("start_weight_update", {}, SHORT_S)


def metrics_of(*counts: int) -> bytes:
    """Return /metrics as vLLM writes them; a counter of another name moves, and is none of tokens."""
    lines = [f'vllm:generation_tokens_total{{engine="{i}",model_name="m"}} {count}.0' for i, count in enumerate(counts)]
    return "\n".join(["# HELP vllm:generation_tokens_total x", *lines, f"process_cpu_total {time.time()}\n"]).encode()


def test_a_servers_counters_that_move_are_its_progress(monkeypatch, caplog):
    """A replica that progresses keeps a long request (test_dispatch.py)."""
    monkeypatch.setattr(server_health, "HEALTH_S", 0.02)
    computed = itertools.count()
    with fake_vllm(generate=FAULTS["hang"], metrics=lambda _: metrics_of(5, next(computed))) as server:
        replica = replica_of(server.url)
        replica.start()
        replica.submit(request_of())
        for _ in range(2):
            before = replica.progressed_at
            assert until(lambda before=before: replica.progressed_at > before)
        replica.close()
    assert "no token counters" not in caplog.text


@pytest.mark.parametrize("metrics", [metrics_of(7, 7), Answer(404, {"detail": "Not Found"}), b"process_cpu_total 3.0"])
def test_a_server_whose_counters_stand_still_is_given_up(monkeypatch, caplog, metrics):
    monkeypatch.setattr(server_health, "HEALTH_S", 0.02)
    with fake_vllm(generate=FAULTS["hang"], metrics=metrics) as stuck:
        replica = replica_of(stuck.url)
        replica.start()
        replica.submit(request_of("first"))  # the server owes an answer, so its counters are looked at
        assert until(lambda: [path for _, path, *_ in stuck.seen].count("/metrics") > 1)
        found = spread(replica, num_requests=1, deadline_s=0.5)
        replica.close()
    assert [request.request_id for request in found.lost] == ["q0"] and "without progress" in found.down[stuck.url]
    assert caplog.text.count("has no token counters") <= 1


def test_a_server_that_refuses_connections_is_passed_over_and_nothing_listens_says_how_to_start_one():
    port = unused_port()
    gone = f"http://127.0.0.1:{port}"
    with fake_vllm() as good:
        found = spread(replica_of(gone), replica_of(good.url))
        assert len(found.finished) == 4 and found.down == {gone: f"{gone}: connection refused, nothing listens there"}
    with pytest.raises(ReplicaLost, match=f"{gone} was not ready in 0.3 s: .*connection refused") as raised:
        replica_of(gone, model="my model").wait_ready(0.3)
    assert example("my model", "127.0.0.1", port) in str(raised.value) and RECEIVER in str(raised.value)


def workers(*changes: dict) -> dict:
    return {"results": [DESCRIPTION | change for change in changes]}


NO_DESCRIBE = Answer(500, {"error": {"message": "Worker failed, no attribute 'describe'"}})
RECEIVER = "--worker-extension-cls megatron_rl.rollout.weight_sync.receiver.Receiver"
NO_RECEIVER = f"cannot take weights .*{RECEIVER}"
RAW = {"logprobs_mode": "raw_logprobs"}
START = {
    "hang": ("health", FAULTS["hang"], ReplicaLost, "was not ready in 0.2 s: .*GET /health was not answered"),
    "not vLLM": ("health", Answer(404, b""), RequestRefused, "another program listens there"),
    "old": ("version", {"version": "0.28.3"}, RequestRefused, "runs vLLM 0.28.3; 0.32 or newer is needed"),
    "raw log-probs": ("collective_rpc", workers(RAW), RequestRefused, "'raw_logprobs'.*processed_logprobs"),
    "no dev mode": ("collective_rpc", Answer(404, b""), RequestRefused, "only with VLLM_SERVER_DEV_MODE=1"),
    "no receiver": ("collective_rpc", NO_DESCRIBE, RequestRefused, NO_RECEIVER),
    "workers differ": ("collective_rpc", workers({}, {"vocab_size": 65}), RequestRefused, "disagree"),
    "no results": ("collective_rpc", {}, ReplicaLost, "without 'results'"),
    "no version": ("version", {}, ReplicaLost, "GET /version answered without 'version'"),
    "wrong key": ("version", Answer(401, {"error": "Unauthorized"}), RequestRefused, "401, no key was sent"),
}


@pytest.mark.parametrize("fault", START)
def test_a_server_that_cannot_serve_is_refused_at_the_start(monkeypatch, fault):
    monkeypatch.setattr(server_replica, "POLL_S", 2 * LONG_S)  # a server that might still recover is asked once
    route, answer, kind, told = START[fault]
    with fake_vllm(**{route: answer}) as server, pytest.raises(kind, match=told):
        replica_of(server.url).wait_ready(SHORT_S if fault == "hang" else LONG_S)


def test_the_key_is_sent_and_never_told(monkeypatch):
    monkeypatch.setenv("KEY_OF_MINE", "sesame")
    with fake_vllm() as server:
        replica = replica_of(server.url, api_key_env="KEY_OF_MINE")
        replica.submit(request_of()).result(BOUND_S)
        assert server.seen[0][3]["Authorization"] == "Bearer sesame"
        server.routes["/inference/v1/generate"] = Answer(401, {"error": "Bearer sesame is wrong"})
        with pytest.raises(RequestRefused, match="the key that was sent.*rollout.api_key_env") as raised:
            replica.submit(request_of()).result(BOUND_S)
        assert "sesame" not in str(raised.value)
        server.routes["/inference/v1/generate"] = Answer(500, {"error": "I heard Bearer sesame"})
        with pytest.raises(ReplicaLost, match=r"I heard Bearer \*\*\*"):
            replica.submit(request_of()).result(BOUND_S)
    monkeypatch.setenv("KEY_OF_MINE", "two\nlines")
    with pytest.raises(ConfigError, match="rollout.api_key_env") as refused:
        replica_of(server.url, api_key_env="KEY_OF_MINE")
    assert "lines" not in str(refused.value)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "http://user:word@host:1", "ftp://host"])
def test_what_is_not_an_address_is_named(url):
    with pytest.raises(ConfigError, match="write it as http://HOST:PORT"):
        replica_of(url)


def test_another_tokenizer_is_refused():
    with fake_vllm() as server:
        replica = replica_of(server.url)
        replica.check_tokenizer(lambda text: [*map(ord, text)], ["a+b", "ü"])
        assert all(body["add_special_tokens"] is False for _, _, body, _ in server.seen)
        with pytest.raises(RequestRefused, match=r"'ab' is \[97, 98\] there and \[97, 0\] here"):
            replica.check_tokenizer(lambda text: [97, 0], ["ab"])
        for status, content in ((404, b""), (501, {"error": "no tokenizer"}), (400, {"error": "skip_tokenizer_init"})):
            server.routes["/tokenize"] = Answer(status, content)
            replica.check_tokenizer(list, ["a+b"])
        server.routes["/tokenize"] = Answer(400, {"error": "another matter"})
        with pytest.raises(RequestRefused, match="another matter"):
            replica.check_tokenizer(list, ["a+b"])
