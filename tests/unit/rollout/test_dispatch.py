"""Requests over replicas that fail in every way: each is finished exactly once, or handed back as lost."""

from __future__ import annotations

import dataclasses
import math
import random
import re
import threading
import time
from concurrent.futures import Future, InvalidStateError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import EngineError
from megatron_rl.rollout.vllm.dispatch import Dispatched, dispatch
from megatron_rl.rollout.vllm.replica import UPDATING, Completion, GenerateRequest, ReplicaLost, RequestRefused
from tests.patience import HANG_S, patient

LONG_S = patient(10 * HANG_S)  # a deadline that nothing here reaches
# A deadline for replicas that hang; any other that is asked in such a call has answered before it is waited for.
SHORT_S = 0.05
VERSION = 3


def request_of(name: str, n: int = 2) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, token_ids=(1, 2), n=n, max_tokens=4, temperature=1.0, seed=0, stop_token_ids=(9,)
    )


def completion_of(mark: int, *, tokens: int = 3, logprobs: int = 3, finish_reason: str = "stop") -> Completion:
    return Completion(
        token_ids=np.full(tokens, mark),
        logprobs=np.full(logprobs, -0.5, dtype=np.float32),
        finish_reason=finish_reason,
        weight_versions=(),
    )


class FakeReplica:
    """A replica that does with each request what the next word of ``plan`` says, and ``rest`` after the plan.

    hang: it never answers.
    late: it answers as soon as it is aborted.
    held: it answers when ``release`` is called.
    soon, slow: it answers from a thread, within 2 ms or after 15 ms.
    Any other word: it answers at once.
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
        answers = [completion_of(mark) for _ in range(request.n)]
        match word:
            case "fewer":
                answers = answers[:-1]
            case "more":
                answers = [*answers, answers[0]]
            case "uneven":
                answers[-1] = completion_of(mark, logprobs=2)
            case "older":
                answers = [dataclasses.replace(x, weight_versions=((-1, 3),)) for x in answers]
            case "abort":
                answers[0] = completion_of(mark, finish_reason="abort")
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
    return dispatch(
        requests,
        replicas,
        **{"weight_version": VERSION, "deadline_s": LONG_S, "max_in_flight": 4, "attempts": 3} | changes,
    )


WORDS = st.lists(st.sampled_from(["answer", "soon", "slow", "lost", "gone", "hang", "late", "abort"]), max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    plans=st.lists(WORDS, min_size=1, max_size=4),
    num_requests=st.integers(0, 12),
    max_in_flight=st.integers(1, 4),
    attempts=st.integers(1, 4),
    rotation=st.integers(0, 7),
    n=st.integers(1, 3),
)
def test_every_request_is_finished_once_or_lost(plans, num_requests, max_in_flight, attempts, rotation, n):
    replicas = [FakeReplica(f"r{index}", plan, rest="soon") for index, plan in enumerate(plans)]
    requests = [request_of(f"q{index}", n) for index in range(num_requests)]
    told: list[tuple] = []
    found = run(
        requests,
        replicas,
        deadline_s=0.02,
        max_in_flight=max_in_flight,
        attempts=attempts,
        rotation=rotation,
        on_finished=lambda *finished: told.append((*finished, threading.get_ident())),
    )
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

    requests = [request_of(f"q{index}") for index in range(4)]
    found = run(requests, [first_asked, FakeReplica("b", rest="soon")], max_in_flight=4, rotation=0, on_finished=tell)
    assert dict(told) == found.finished and len(told) == 4 and told == list(found.finished.items())
    first, last = told[0][0], told[-1][0]
    assert first != "q0" and last == "q0"  # replica a has it first and answers it last


def test_a_callback_that_raises_leaves_nothing_under_way():
    replicas = [FakeReplica("a", ["hang", "hang"]), FakeReplica("b")]

    def refuse(name: str, _: object) -> None:
        raise KeyError(name)

    with pytest.raises(KeyError, match="q1"):
        run([request_of(f"q{index}") for index in range(3)], replicas, max_in_flight=2, on_finished=refuse)
    assert sorted(replicas[0].aborted) == ["q0", "q2"] and replicas[1].given == ["q1"] and not replicas[1].aborted


def test_a_late_answer_is_not_taken():
    """A late answer is not taken: the second replica's answer counts.

    The first replica answers, with marks of its own, once it was given up.
    """
    slow, fast = FakeReplica("slow", ["late"]), FakeReplica("fast")
    found = run([request_of("q")], [slow, fast], deadline_s=SHORT_S)
    assert slow.given == fast.given == ["q"] and slow.aborted == ["q"]
    assert found.finished["q"][0].token_ids[0] == hash(("fast", "q", 1)) % 10_000
    assert re.fullmatch(r"did not answer request q in \d+\.\d s, the last 0.05 without progress", found.down["slow"])
    assert list(found.down) == ["slow"] and found.lost == ()


@pytest.mark.parametrize("computes", [True, False])
def test_a_request_may_take_longer_than_the_deadline_while_its_replica_computes(computes):
    """The deadline counts from the replica's last progress, which answers to other requests are too."""
    replica, told = FakeReplica("slow", ["held", "held", "held"]), []

    def work() -> None:
        for name in ("q0", "q1", "q2"):
            ends_at = time.monotonic() + 1.5 * limit_s
            while time.monotonic() < ends_at:
                time.sleep(limit_s / 20)
                if computes:
                    replica.progressed_at = time.monotonic()
            if name in replica._held:
                replica.release(name)

    limit_s = patient(1.0)
    thread = threading.Thread(target=work)
    thread.start()
    found = run(
        [request_of(f"q{i}") for i in range(3)], [replica], deadline_s=limit_s, on_finished=lambda *_: told.append(1)
    )
    thread.join()
    assert len(found.finished) == len(told) == (3 if computes else 0)
    assert bool(found.down) != computes


def test_an_answer_to_one_request_is_progress_for_the_others():
    replica = FakeReplica("slow", ["held"] * 4)
    limit_s = patient(1.0)

    def work() -> None:
        for i in range(4):
            time.sleep(0.6 * limit_s)
            replica.release(f"q{i}")

    thread = threading.Thread(target=work)
    thread.start()
    found = run([request_of(f"q{i}") for i in range(4)], [replica], deadline_s=limit_s)
    thread.join()
    assert len(found.finished) == 4 and not found.down


def test_a_late_answer_after_the_call_is_not_taken():
    """A late answer is not taken when nobody is left to ask and it comes after the call has ended."""
    slow = FakeReplica("slow", ["hang"])
    submit, futures = slow.submit, []
    slow.submit = lambda request: futures.append(submit(request)) or futures[-1]
    found = run([request_of("q")], [slow], deadline_s=SHORT_S)
    futures[0].set_result([completion_of(7)] * 2)
    assert found.finished == {} and [request.request_id for request in found.lost] == ["q"] and slow.aborted == ["q"]


def test_a_late_answer_among_others_is_not_taken():
    """A late answer is not taken when it is there while the call still waits for the others."""
    slow, fast = FakeReplica("slow", ["late"]), FakeReplica("fast")
    requests = [request_of(f"q{index}") for index in range(20)]
    found = run(requests, [slow, fast], max_in_flight=1, deadline_s=SHORT_S)
    assert len(found.finished) == 20 and slow.given == ["q0"] and slow.aborted == ["q0"]
    assert found.finished["q0"][0].token_ids[0] in {hash(("fast", "q0", k)) % 10_000 for k in range(1, 41)}


def test_all_replicas_lost_hands_everything_unfinished_back():
    replicas = [FakeReplica("a", ["answer", "lost"]), FakeReplica("b", ["lost"])]
    requests = [request_of(f"q{index}") for index in range(5)]
    found = run(requests, replicas, max_in_flight=1)
    assert len(found.finished) == 1 and len(found.lost) == 4
    assert found.down == {"a": "a was killed", "b": "b was killed"}


def test_the_least_loaded_replica_comes_first():
    replicas = [FakeReplica(name, ["slow"] * 9) for name in "abc"]
    run([request_of("big", 6), *(request_of(f"q{index}", 2) for index in range(6))], replicas, max_in_flight=9)
    assert [replica.given for replica in replicas] == [["big"], ["q0", "q2", "q4"], ["q1", "q3", "q5"]]


def test_rotation_starts_clients_on_different_replicas():
    for rotation in range(6):
        replicas = [FakeReplica(name) for name in "abc"]
        run([request_of("q")], replicas, rotation=rotation)
        assert [len(replica.given) for replica in replicas] == [int(index == rotation % 3) for index in range(3)]


def test_a_replica_with_other_weights_gets_nothing():
    old, new = FakeReplica("old", version=2), FakeReplica("new")
    found = run([request_of(f"q{index}") for index in range(6)], [old, new])
    assert not old.given and len(found.finished) == 6
    assert found.down == {"old": "it holds weight version 2, this call asks for 3"}


def test_replicas_with_newer_weights_or_in_an_update_get_requests():
    newer, updating, failed = (
        FakeReplica("newer", version=4),
        FakeReplica("updating", version=UPDATING),
        FakeReplica("failed", version=-1),
    )
    found = run([request_of(f"q{index}", 1) for index in range(6)], [newer, updating, failed])
    assert newer.given and updating.given and not failed.given and len(found.finished) == 6
    assert found.down == {"failed": "it holds weight version -1, this call asks for 3"}


def test_an_update_that_fails_within_the_call_takes_its_replica_out():
    """Requests that wait for a replica whose update fails within the call go elsewhere.

    The name that is told is the one that the replica had before.
    """
    updating, sound = FakeReplica("updating", ["lost"], version=UPDATING), FakeReplica("sound")
    submit = updating.submit

    def submit_and_fail(request: GenerateRequest) -> Future:
        updating.weight_version, updating.name = -1, "restarted"
        return submit(request)

    updating.submit = submit_and_fail
    found = run([request_of(f"q{index}", 1) for index in range(6)], [updating, sound], max_in_flight=1)
    assert len(found.finished) == 6 and updating.given == ["q0"] and list(found.down) == ["updating"]


def test_tokens_of_newer_weights_are_taken_and_of_older_ones_not():
    class Spans(FakeReplica):
        def submit(self, request: GenerateRequest) -> Future:
            self.given.append(request.request_id)
            future: Future = Future()
            versions = {"older": ((2, 1), (3, 2)), "both": ((3, 1), (4, 2))}[self.name]
            future.set_result([dataclasses.replace(completion_of(1), weight_versions=versions)] * request.n)
            return future

    found = run([request_of("q")], [Spans("older"), Spans("both")])
    assert found.finished["q"][0].weight_versions == ((3, 1), (4, 2)) and "version 2, not 3" in found.down["older"]


def test_an_answer_from_older_weights_is_not_taken():
    """An answer from older weights than the call's is not taken.

    The server was started again between two calls, under the same URL, and samples from its files.
    """
    restarted, sound = FakeReplica("restarted", ["older"]), FakeReplica("sound")
    found = run([request_of("q")], [restarted, sound], max_in_flight=1, attempts=2)
    assert "version -1, not 3" in found.down["restarted"] and sound.given == ["q"]
    assert all(x.weight_versions == () for x in found.finished["q"])


def test_a_refused_request_ends_the_call_and_aborts_the_others():
    replicas = [FakeReplica("a", ["hang", "hang"]), FakeReplica("b", ["refused"])]
    with pytest.raises(RequestRefused, match="the prompt is too long"):
        run([request_of(f"q{index}") for index in range(3)], replicas)
    assert sorted(replicas[0].aborted) == ["q0", "q2"]


@pytest.mark.parametrize(
    "word, told",
    [
        ("fewer", "gave 1 completions where 2"),
        ("more", "gave 3 completions where 2"),
        ("uneven", "3 tokens and 2 log-probs"),
    ],
)
def test_a_wrong_answer_is_asked_for_elsewhere_once(word, told):
    wrong, right = FakeReplica("wrong", [word] * 9), FakeReplica("right")
    found = run([request_of("q")], [wrong, right])
    assert wrong.given == right.given == ["q"] and told in found.causes["q"][0] and not found.down
    with pytest.raises(EngineError, match=f"q was answered wrongly 2 times: wrong: .*{told}.*; also wrong: .*{told}"):
        run([request_of("q")], [FakeReplica("wrong", [word]), FakeReplica("also wrong", [word])])
    alone = FakeReplica("alone", [word])
    assert len(run([request_of("q")], [alone]).finished) == 1 and alone.given == ["q", "q"]


def test_log_probs_that_are_not_numbers_are_a_defect():
    class Nan(FakeReplica):
        def submit(self, request):
            future: Future = Future()
            bad = Completion(
                token_ids=np.array([1, 9]),
                logprobs=np.array([-1.0, -np.inf], dtype=np.float32),
                finish_reason="stop",
                weight_versions=(),
            )
            future.set_result([bad] * request.n)
            return future

    with pytest.raises(EngineError, match="sample 0: 1 of 2 log-probs are not finite"):
        run([request_of("q")], [Nan("a"), Nan("b")])


def test_doubled_request_ids_are_named():
    with pytest.raises(ValueError, match="'q' is there 2 times"):
        run([request_of("q"), request_of("q")], [FakeReplica("a")])


def test_no_requests_and_no_replicas():
    assert run([], [FakeReplica("a")]).finished == {}
    assert run([request_of("q")], []).lost == (request_of("q"),)
