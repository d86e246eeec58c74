"""rollout/vllm/server_replica.py's control messages, to a server that is a thread of this process."""

import asyncio
import contextlib

import pytest

from megatron_rl.rollout.engines.engine import NO_WEIGHTS
from megatron_rl.rollout.engines.replica import ReplicaLost, RequestRefused
from megatron_rl.rollout.vllm import server_replica
from megatron_rl.rollout.vllm.auth_middleware import Guard
from megatron_rl.rollout.vllm.server_replica import ServerReplica
from tests.patience import until
from tests.unit.rollout.misbehaving_server import FAULTS, Answer, fake_vllm, in_turn
from tests.unit.rollout.server_requests import BOUND_S, LONG_S, VERSION, replica_of, request_of

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_an_update_in_flight_pauses_and_resumes():
    routes = dict.fromkeys(["pause", "resume", "update_weight_version", "reset_prefix_cache"], {"success": True})
    with fake_vllm(**routes) as server:
        for method, arguments in [("pause", {}), ("reset_prefix_cache", {"running": True}), ("resume", {})]:
            replica_of(server.url).control(method, arguments, LONG_S)
        seen = [(path, body) for _, path, body, _ in server.seen]
    assert seen == [
        ("/pause?mode=keep&clear_cache=false", None),
        ("/update_weight_version", {"new_version": "updating"}),
        ("/reset_prefix_cache?reset_running_requests=true", None),
        ("/resume", None),
    ]


def test_a_server_that_gives_up_is_resumed_however_often_that_takes(monkeypatch):
    monkeypatch.setattr(server_replica, "POLL_S", 0.02)
    failing = Answer(500, {"error": "busy"})
    resume = in_turn(failing, failing, Answer(200, {"status": "resumed"}))
    routes = {"pause": failing, "resume": resume, "update_weight_version": {"success": True}}
    with fake_vllm(generate=FAULTS["hang"], **routes) as server:
        replica = replica_of(server.url)
        future = replica.submit(request_of())
        assert until(lambda: server.seen)
        replica.give_up("the update failed")
        asked = [path.partition("?")[0] for _, path, _, _ in server.seen[-4:]]
        # the samples of its weights are labelled as nobody's before it goes on
        assert asked == ["/update_weight_version", "/resume"] * 2
        # it did not hear of the pause, so its requests are cut off
        with pytest.raises(ReplicaLost, match="was given up here"):
            future.result(BOUND_S)
        server.routes["/resume"] = failing
        monkeypatch.setattr(server_replica, "RESUME_S", 0.1)  # resuming is bounded all the same
        replica.give_up("never")
    replica.give_up("it is gone")


def test_control_messages_are_the_servers_routes():
    channel, tags = {"channel": "shared_memory"}, ["weights", "kv_cache"]
    messages = [  # method and arguments, and the request that they make
        ("init_weight_transfer", channel, "/init_weight_transfer_engine", {"init_info": channel}),
        ("start_weight_update", {}, "/start_weight_update", None),
        ("update_weights", {"kind": "end"}, "/update_weights", {"update_info": {"kind": "end"}}),
        ("finish_weight_update", {"weight_version": 7}, "/finish_weight_update", {"weight_version": "7"}),
        ("reset_prefix_cache", {}, "/reset_prefix_cache", None),
        ("sleep", {"level": 2}, "/sleep?level=2", None),
        ("wake", {"tags": tags}, "/wake_up?tags=weights&tags=kv_cache", None),
        ("wake", {"tags": None}, "/wake_up", None),
    ]
    with fake_vllm(**{path[1:].partition("?")[0]: {"success": True} for _, _, path, _ in messages}) as server:
        replica = replica_of(server.url)
        for method, arguments, *_ in messages:
            replica.control(method, arguments, LONG_S)
        server.routes["/collective_rpc"] = {"results": [{"version": 7}]}
        assert replica.control("weights_received", {}, LONG_S) == [{"version": 7}]
        # without the first message, /resume, which the server may not know
        *seen, (_, last) = [(path, body) for _, path, body, _ in server.seen if path != "/resume"]
    assert seen == [(path, body) for *_, path, body in messages] and last["method"] == "weights_received"


def test_a_message_that_fails_tells_the_servers_words_and_a_held_prefix_cache_is_tried_again(monkeypatch):
    with fake_vllm(update_weights=Answer(500, {"error": {"message": "checksum 5, the trainer sent 6"}})) as server:
        with pytest.raises(ReplicaLost, match="POST /update_weights: 500, checksum 5, the trainer sent 6"):
            replica_of(server.url).control("update_weights", {}, LONG_S)
        with pytest.raises(RequestRefused, match="/start_weight_update: 404, .*VLLM_SERVER_DEV_MODE=1"):
            replica_of(server.url).control("start_weight_update", {}, LONG_S)
        server.routes["/start_weight_update"] = FAULTS["cut in the headers"]  # must not pass for an empty success
        with pytest.raises(ReplicaLost, match="an answer without a length"):
            replica_of(server.url).control("start_weight_update", {}, LONG_S)
    answers = [{"success": False}, {"success": False}, {"success": True}]
    with fake_vllm(reset_prefix_cache=lambda body: answers.pop(0)) as server:
        replica_of(server.url).control("reset_prefix_cache", {}, LONG_S)
        assert not answers
        monkeypatch.setattr(server_replica, "POLL_S", 2 * LONG_S)  # so that there is no time for another try
        server.routes["/reset_prefix_cache"] = {"success": False}
        with pytest.raises(ReplicaLost, match=f"did not reset its prefix cache in {LONG_S:g} s"):
            replica_of(server.url).control("reset_prefix_cache", {}, LONG_S)


@pytest.mark.parametrize("said, holds", [("3", VERSION), ("default", NO_WEIGHTS), ("2", NO_WEIGHTS)])
def test_after_a_restart_the_server_says_what_it_holds(said, holds):
    with fake_vllm(weight_info={"weight_version": said}) as server:
        replica = replica_of(server.url)
        replica.restart()
        assert replica.weight_version == NO_WEIGHTS
        replica.wait_ready(LONG_S)
        assert replica.weight_version == holds
        fresh = ServerReplica(server.url)
        fresh.wait_ready(LONG_S)
        assert fresh.weight_version == NO_WEIGHTS  # a version that this side never saw arrive


def status_from_guard(path: str, authorization: bytes | None) -> int:
    sent = []

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message) -> None:
        sent.append(message)

    headers = [] if authorization is None else [(b"authorization", authorization)]
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(Guard(app)({"type": "http", "path": path, "headers": headers}, None, send))
    return sent[0]["status"]


def test_the_guard_wants_the_key_everywhere_but_for_health(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    for path in ("/update_weights", "/collective_rpc", "/v1/models", "/version", "/healthy", "//health"):
        given = (None, b"Bearer wrong", b"sesame", b"Bearer sesame")
        assert [status_from_guard(path, x) for x in given] == [401, 401, 401, 200]
    assert status_from_guard("/health", None) == 200
    monkeypatch.delenv("VLLM_API_KEY")
    assert status_from_guard("/update_weights", None) == 200
