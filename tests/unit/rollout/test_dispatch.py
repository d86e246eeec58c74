"""Requests over replicas that fail in every way: each is finished exactly once, or handed back as lost."""

import math
import random
import re
import threading
import time
from concurrent.futures import Future, InvalidStateError
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import EngineError
from megatron_rl.rollout.engines.replica import UPDATING, Completion, GenerateRequest, ReplicaLost, RequestRefused
from megatron_rl.rollout.vllm import dispatch as dispatching
from megatron_rl.rollout.vllm.dispatch import Dispatched, dispatch
from tests.unit.rollout.server_requests import LONG_S, VERSION, request_of

# A deadline for replicas that hang; any other that is asked in such a call has answered before it is waited for.
SHORT_S = 0.05


def requests_of(count: int, n: int = 2) -> list[GenerateRequest]:
    return [request_of(f"q{index}", n) for index in range(count)]


def completion_of(mark: int, **changes) -> Completion:
    given = {"logprobs": np.full(3, -0.5, dtype=np.float32), "finish_reason": "stop", "weight_versions": ()}
    return Completion(token_ids=np.full(3, mark), **given | changes)


# The last sample of an answer under each word.
LAST = {
    "uneven": {"logprobs": np.full(2, -0.5, dtype=np.float32)},
    "nan": {"logprobs": np.array([-0.5, -np.inf, np.nan], dtype=np.float32)}, "abort": {"finish_reason": "abort"},
    "of files": {"weight_versions": ((-1, 3),)}, "older": {"weight_versions": ((2, 1), (3, 2))},
    "newer": {"weight_versions": ((3, 1), (4, 2))},
}


class FakeReplica:
    """A replica that does with each request what the next word of ``plan`` says, and ``rest`` after the plan.

    hang: it never answers. late: it answers as soon as it is aborted. held: it answers when ``release`` is called.
    soon, slow: it answers from a thread, within 2 ms or after 15 ms. Any other word: it answers at once.
    """

    def __init__(self, name: str, plan: list[str] | None = None, version: int = VERSION, rest: str = "answer") -> None:
        self.name, self.weight_version, self.plan, self.rest = name, version, plan or [], rest
        self.progressed_at = -math.inf
        self.given: list[str] = []
        self.aborted: list[str] = []
        self.most_under_way = 0
        self._under_way: dict[str, Future] = {}
        self._held: dict[str, tuple[GenerateRequest, Future]] = {}
        self._lock = threading.Lock()

    def submit(self, request: GenerateRequest) -> Future:
        word = self.plan[len(self.given)] if len(self.given) < len(self.plan) else self.rest
        self.given.append(request.request_id)
        if word == "gone":
            raise ReplicaLost(f"{self.name} is gone")
        future: Future = Future()
        with self._lock:
            self._under_way[request.request_id] = future
            self.most_under_way = max(self.most_under_way, len(self._under_way))
        if word in ("late", "held"):
            self._held[request.request_id] = request, future
        elif word in ("soon", "slow"):
            delay = 0.015 if word == "slow" else random.random() * 0.002
            timer = threading.Timer(delay, self._end, (request, future, word))
            timer.daemon = True
            timer.start()
        elif word != "hang":
            self._end(request, future, word)
        return future

    def release(self, request_id: str) -> None:
        request, future = self._held.pop(request_id)
        self._end(request, future, "answer")

    def _end(self, request: GenerateRequest, future: Future, word: str) -> None:
        mark = hash((self.name, request.request_id, len(self.given))) % 10_000
        count = request.n - 1 + {"fewer": -1, "more": 1}.get(word, 0)
        answers = [completion_of(mark)] * count + [completion_of(mark, **LAST.get(word, {}))]
        with self._lock:
            self._under_way.pop(request.request_id, None)
        try:
            match word:
                case "lost":
                    future.set_exception(ReplicaLost(f"{self.name} was killed"))
                case "refused":
                    future.set_exception(RequestRefused("the prompt is too long"))
                case _:
                    future.set_result(answers)
        except InvalidStateError:
            return

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if request_id in self._held:
            self.release(request_id)


def run(requests, replicas, **changes) -> Dispatched:
    given = {"weight_version": VERSION, "deadline_s": LONG_S, "max_in_flight": 4, "attempts": 3}
    return dispatch(requests, replicas, **given | changes)


WORDS = st.lists(st.sampled_from(["answer", "soon", "slow", "lost", "gone", "hang", "late", "abort"]), max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    plans=st.lists(WORDS, min_size=1, max_size=4), num_requests=st.integers(0, 12), max_in_flight=st.integers(1, 4),
    attempts=st.integers(1, 4), rotation=st.integers(0, 7), n=st.integers(1, 3),
)
def test_every_request_is_finished_once_or_lost(plans, num_requests, max_in_flight, attempts, rotation, n):
    replicas = [FakeReplica(f"r{index}", plan, rest="soon") for index, plan in enumerate(plans)]
    requests, told = requests_of(num_requests, n), []
    bounds = {"deadline_s": 0.02, "max_in_flight": max_in_flight, "attempts": attempts, "rotation": rotation}
    found = run(requests, replicas, on_finished=lambda *x: told.append((*x, threading.get_ident())), **bounds)
    # a dict keeps the order
    assert told == [(name, completions, threading.get_ident()) for name, completions in found.finished.items()]
    lost = [request.request_id for request in found.lost]
    assert sorted([*found.finished, *lost]) == sorted(request.request_id for request in requests)
    issued = [name for replica in replicas for name in replica.given]
    assert all(issued.count(request.request_id) <= attempts for request in requests)
    assert all(replica.most_under_way <= max_in_flight for replica in replicas)
    assert all(len(found.finished[name]) == n for name in found.finished)
    assert all(len(causes) < attempts for name, causes in found.causes.items() if name in found.finished)
    if lost:  # lost only where its attempts were used up, or nobody was left
        assert len(found.down) == len(replicas) or all(len(found.causes[name]) == attempts for name in lost)


def test_requests_are_told_in_the_order_of_finishing():
    told, first_asked = [], FakeReplica("a", ["held"])

    def tell(name: str, completions: list[Completion]) -> None:
        told.append((name, completions))
        if len(told) == 3:
            first_asked.release("q0")

    found = run(requests_of(4), [first_asked, FakeReplica("b", rest="soon")], on_finished=tell)
    assert dict(told) == found.finished and len(told) == 4 and told == list(found.finished.items())
    assert told[0][0] != "q0" and told[-1][0] == "q0"  # replica a has it first and answers it last


@pytest.mark.parametrize(("word", "error"), [("answer", KeyError), ("refused", RequestRefused)])
def test_a_callback_that_raises_or_a_refusal_leaves_nothing_under_way(word, error):
    replicas = [FakeReplica("a", ["hang", "hang"]), FakeReplica("b", [word])]

    def refuse(name: str, _: object) -> None:
        raise KeyError(name)

    with pytest.raises(error, match="q1|the prompt is too long"):
        run(requests_of(3), replicas, max_in_flight=2, on_finished=refuse)
    assert sorted(replicas[0].aborted) == ["q0", "q2"] and replicas[1].given == ["q1"] and not replicas[1].aborted


def test_a_late_answer_is_not_taken():
    """The first replica answers, with marks of its own, once it was given up: the second one's answer counts."""
    slow, fast = FakeReplica("slow", ["late"]), FakeReplica("fast")
    found = run([request_of("q")], [slow, fast], deadline_s=SHORT_S)
    assert slow.given == fast.given == ["q"] and slow.aborted == ["q"]
    assert found.finished["q"][0].token_ids[0] == hash(("fast", "q", 1)) % 10_000
    late = r"did not answer request q in \d+\.\d s, without progress in the last 0.05 s"
    assert re.fullmatch(late, found.down["slow"])
    assert list(found.down) == ["slow"] and found.lost == ()


class SlowReplica(FakeReplica):
    """Answers its oldest request after three deadlines, in which it says at each look that it computes; or is mute."""

    def __init__(self, name: str, *, computes: bool) -> None:
        self.computes, self.since = computes, time.monotonic()
        super().__init__(name, rest="held")

    @property
    def progressed_at(self) -> float:
        now = time.monotonic()
        if self.computes and self._held and now > self.since + 3 * SHORT_S:
            self.since = now
            self.release(next(iter(self._held)))
        return now if self.computes else -math.inf

    @progressed_at.setter
    def progressed_at(self, _: float) -> None: ...


@pytest.mark.parametrize("computes", [True, False])
def test_a_request_may_take_longer_than_the_deadline_while_its_replica_computes(computes):
    told = []
    replica = SlowReplica("slow", computes=computes)
    found = run(requests_of(3), [replica], deadline_s=SHORT_S, on_finished=lambda *_: told.append(1))
    assert len(found.finished) == len(told) == (3 if computes else 0)
    assert bool(found.down) != computes


def test_an_answer_to_one_request_is_progress_for_the_others(monkeypatch):
    """By a clock of the test's own each answer comes 0.6 of the deadline after the one before."""
    replica, now, due = FakeReplica("slow", ["answer"], rest="held"), [0.0], []

    def clock() -> float:
        if due:  # the call is about to wait
            threading.Timer(0.02, replica.release, [due.pop()]).start()
        return now[0]

    def tell(*_) -> None:
        now[0] += 0.6 * LONG_S
        due.extend([*replica._held][:1])

    monkeypatch.setattr(dispatching, "time", SimpleNamespace(monotonic=clock))
    found = run(requests_of(4), [replica], on_finished=tell)
    assert len(found.finished) == 4 and not found.down


def test_the_least_loaded_replica_comes_first_and_rotation_starts_clients_on_different_ones():
    replicas = [FakeReplica(name, rest="soon") for name in "abc"]
    run([request_of("big", 6), *requests_of(6)], replicas, max_in_flight=9)
    assert [replica.given for replica in replicas] == [["big"], ["q0", "q2", "q4"], ["q1", "q3", "q5"]]
    for rotation in range(6):
        replicas = [FakeReplica(name) for name in "abc"]
        run([request_of("q")], replicas, rotation=rotation)
        assert [len(replica.given) for replica in replicas] == [int(index == rotation % 3) for index in range(3)]


def test_a_replica_of_newer_weights_or_in_an_update_gets_requests_and_its_tokens_are_taken():
    versions = {"old": 2, "failed": -1, "newer": 4, "updating": UPDATING}
    replicas = {name: FakeReplica(name, version=version) for name, version in versions.items()}
    found = run(requests_of(6, 1), replicas.values())
    assert [name for name, replica in replicas.items() if replica.given] == ["newer", "updating"]
    assert len(found.finished) == 6
    told = {name: f"it holds weight version {versions[name]}, this call asks for 3" for name in ("old", "failed")}
    assert found.down == told
    # of files: the server was started again between two calls, under the same URL
    names = ("of files", "older", "newer")
    found = run([request_of("q")], [FakeReplica(name, [name]) for name in names])
    assert found.finished["q"][-1].weight_versions == ((3, 1), (4, 2)) and list(found.down) == ["of files", "older"]
    assert "version -1, not 3" in found.down["of files"] and "version 2, not 3" in found.down["older"]


def test_an_update_that_fails_within_the_call_takes_its_replica_out():
    """The requests that wait for it go elsewhere; the name that is told is the one that it had before."""
    updating, sound = FakeReplica("updating", ["lost"], version=UPDATING), FakeReplica("sound")
    submit = updating.submit

    def submit_and_fail(request: GenerateRequest) -> Future:
        updating.weight_version, updating.name = -1, "restarted"
        return submit(request)

    updating.submit = submit_and_fail
    found = run(requests_of(6, 1), [updating, sound], max_in_flight=1)
    assert len(found.finished) == 6 and updating.given == ["q0"] and list(found.down) == ["updating"]


@pytest.mark.parametrize("word, told", [
    ("fewer", "gave 1 completions where 2"),
    ("more", "gave 3 completions where 2"),
    ("uneven", "3 tokens and 2 log-probs"),
    ("nan", "2 of 3 log-probs are not finite"),
])
def test_a_wrong_answer_is_asked_for_elsewhere_once(word, told):
    wrong, right = FakeReplica("wrong", [word] * 9), FakeReplica("right")
    found = run([request_of("q")], [wrong, right])
    assert wrong.given == right.given == ["q"] and told in found.causes["q"][0] and not found.down
    with pytest.raises(EngineError, match=f"q was answered wrongly 2 times: wrong: .*{told}.*; also wrong: .*{told}"):
        run([request_of("q")], [FakeReplica("wrong", [word]), FakeReplica("also wrong", [word])])
    alone = FakeReplica("alone", [word])
    assert len(run([request_of("q")], [alone]).finished) == 1 and alone.given == ["q", "q"]


def test_doubled_request_ids_are_named_and_no_requests_or_replicas_end_at_once():
    with pytest.raises(ValueError, match="'q' is there 2 times"):
        run([request_of("q"), request_of("q")], [FakeReplica("a")])
    assert run([], [FakeReplica("a")]).finished == {}
    assert run([request_of("q")], []).lost == (request_of("q"),)
