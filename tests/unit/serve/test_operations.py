"""The queue of the server keeps its invariants, whatever the order in which requests arrive and how they end."""

import asyncio
import dataclasses
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.serve.operation import ENDED, Operation, digest_of
from megatron_rl.serve.operations import Operations
from megatron_rl.serve.values import Fault, RequestError
from tests.patience import patient


class Clock:
    """Counts the seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def queue_of(clock: Clock | None = None, **changes: object) -> Operations:
    given = {"gap_s": 10.0, "queue_s": 100.0, "max_bytes": 10**6, "max_batch": 8, **changes}
    return Operations(**given, clock=clock or Clock())


def one_line(clock: Clock | None = None, **changes: object) -> Operations:
    queue = queue_of(clock, **changes)
    queue.open_line("m")
    return queue


def operation_of(line: str, seq: int, *, body: bytes = b"", depends: bool = False, **header: object) -> Operation:
    named = {"id": f"{line}:{seq}", "owner": "o", "line": line, "seq": seq, "kind": "forward_backward"}
    return Operation(**named, header=header, body=body, held=len(body), depends=depends, digest=digest_of(body))


def take_all(queue: Operations) -> list[Operation]:
    """Take and finish everything that is ready, in turn."""
    taken = []
    while batch := queue.take(0.0):
        for operation in batch:
            queue.finish(operation, b"answer", "text")
        taken += batch
    return taken


@settings(max_examples=60)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.randoms(use_true_random=False), st.data())
def test_operations_run_once_and_in_order_however_they_arrive(sizes, chance, data) -> None:
    queue, ran = queue_of(), []
    for line in range(len(sizes)):
        queue.open_line(f"m{line}")
    arrivals = [(f"m{line}", seq) for line, size in enumerate(sizes) for seq in range(size)] * 2
    chance.shuffle(arrivals)
    answers: dict[tuple[str, int], Operation] = {}
    for line, seq in arrivals:
        found = queue.find(f"{line}:{seq}")
        operation = queue.add(operation_of(line, seq, body=f"{line}{seq}".encode()))
        assert found is None or operation is found  # 2: the same operation, once
        answers[line, seq] = operation
        if data.draw(st.booleans()):
            ran += take_all(queue)
    ran += take_all(queue)
    assert len(ran) == sum(sizes)  # 1: none is left out, none runs twice
    for line, size in enumerate(sizes):
        assert [x.seq for x in ran if x.line == f"m{line}"] == list(range(size))  # 1: in order
    assert all(x.state == ENDED and x.content == (b"answer", "text") for x in answers.values())  # 4


def test_a_number_that_was_used_or_forgotten_is_refused() -> None:
    queue = one_line()
    queue.add(operation_of("m", 0, body=b"one"))
    with pytest.raises(RequestError, match="number 0 of m was used by another") as refused:  # 3
        queue.add(operation_of("m", 0, body=b"two"))
    assert refused.value.status == 422
    queue = one_line(clock := Clock())
    queue.add(operation_of("m", 0))
    take_all(queue)
    clock.now = 50.0
    assert queue.forget(20.0) == ["m:0"]
    with pytest.raises(RequestError, match="number 0 of m is over: 1 is next"):
        queue.add(operation_of("m", 0))


def test_what_waits_behind_a_gap_ends_with_its_number() -> None:
    queue = one_line(clock := Clock())
    late = [queue.add(operation_of("m", seq)) for seq in (2, 1)]
    assert queue.take(0.0) == []
    clock.now = 11.0
    assert queue.take(0.0) == []
    for operation in late:  # 4
        assert "number 0 did not arrive in serve.gap_s=10 s" in operation.error[0]
        assert "numbers 1, 2" in operation.error[0]
    queue.tell(late[0])
    queue.add(operation_of("m", 3))
    assert [x.seq for x in take_all(queue)] == [3]


def test_a_line_is_begun_once_and_answers_take_no_more_than_their_bytes() -> None:
    queue = one_line(max_bytes=10**5)
    first = queue.add(operation_of("m", 0))
    assert not queue.open_line("m") and queue.take(0.0) == [first]  # what waited is still there
    queue.finish(first, b"a" * 40_000, "text")
    queue.tell(first)
    for line in ("n", "p"):  # of other owners
        queue.open_line(line)
        queue.add(dataclasses.replace(operation_of(line, 0), owner=line))
        (taken,) = queue.take(0.0)
        queue.finish(taken, b"b" * 25_000, "text")
    for seq in (1, 2):
        (taken,) = [queue.add(operation_of("m", seq))] and queue.take(0.0)
        queue.finish(taken, b"c" * 40_000, "text")
        assert queue.find(f"m:{seq}") is taken  # nobody has read it yet
    kept = [queue.find(id) is not None for id in ("m:0", "m:1", "m:2", "n:0", "p:0")]
    assert kept == [False, False, True, True, True]  # who has the most loses its own, those that were told first


def test_what_waits_too_long_ends_too_much_is_refused_and_a_failure_alone_stops_nothing() -> None:
    queue = one_line(clock := Clock())
    queue.add(operation_of("m", 0))
    (running,) = queue.take(0.0)
    second = queue.add(operation_of("m", 1))
    clock.now = 101.0
    assert queue.take(0.0) == []
    assert "serve.queue_s=100" in second.error[0] and running.state != ENDED
    queue = one_line()
    queue.add(operation_of("m", 0))
    queue.add(operation_of("m", 1))
    (taken,) = queue.take(0.0)
    queue.fail(taken, "no room", Fault.SERVER)
    assert [x.seq for x in take_all(queue)] == [1]
    queue = one_line(max_bytes=10)
    queue.add(operation_of("m", 0, body=b"123456"))
    with pytest.raises(RequestError, match="serve.max_queue_mb") as refused:
        queue.add(operation_of("m", 1, body=b"123456"))
    assert refused.value.status == 429
    take_all(queue)
    queue.add(operation_of("m", 1, body=b"123456"))


def test_what_is_queued_behind_a_failure_or_in_a_failed_line_fails_until_the_client_was_told() -> None:
    queue = one_line()
    first = queue.add(operation_of("m", 0, depends=True))
    second = queue.add(operation_of("m", 1))
    (taken,) = queue.take(0.0)
    queue.fail(taken, "broken", Fault.USER)
    third = queue.add(operation_of("m", 2))
    assert queue.take(0.0) == []
    for operation in (second, third):  # 5
        assert operation.error == ("it was queued behind number 0, which failed: broken", Fault.USER)
    queue.tell(first)
    queue.add(operation_of("m", 3))
    assert [x.seq for x in take_all(queue)] == [3]
    queue, why = queue_of(), ("lost", Fault.SERVER)
    queue.open_line("m")
    ran = queue.add(operation_of("m", 0))
    queue.fail(*queue.take(0.0), "no room", Fault.SERVER)
    waiting = queue.add(operation_of("m", 2))
    queue.fail_line("m", why)
    late = queue.add(operation_of("m", 1))  # it was on its way, and a later number has failed
    assert waiting.error == late.error == queue.failure_of("m") == why
    queue.tell(ran)  # an older answer, asked for again, says nothing of it
    assert queue.failure_of("m") == why
    queue.tell(late)
    queue.add(operation_of("m", 3))
    assert [x.seq for x in take_all(queue)] == [3]


def test_lines_take_turns() -> None:
    queue = queue_of()
    for line in "abc":
        queue.open_line(line)
    for seq in range(3):
        for line in "aab" if not seq else "abc":
            if queue.find(f"{line}:{seq}") is None:
                queue.add(operation_of(line, seq))
    queue.add(operation_of("c", 0))
    order = [x.line for x in take_all(queue)]
    assert sorted(order[:3]) == sorted(order[3:6]) == ["a", "b", "c"]  # 6


def test_sampling_requests_of_the_same_weights_run_together() -> None:
    queue = queue_of(max_batch=3)
    for line in ("s", "t", "u"):
        queue.open_line(line, ordered=False)
    for line, weights in (("s", "w"), ("t", "w"), ("u", "other")):
        for seq in (7, 3):
            queue.add(operation_of(line, seq, weights=weights))
    batches = []
    while batch := queue.take(0.0):
        batches.append({x.id for x in batch})
        for operation in batch:
            queue.finish(operation, b"", "")
    assert sorted(map(len, batches)) == [1, 2, 3]
    assert {"u:7", "u:3"} in batches


def test_a_client_that_waits_is_woken_by_the_end() -> None:
    queue = one_line()
    operation = queue.add(operation_of("m", 0))

    async def ask() -> tuple[bool, bool]:
        early = await queue.wait(operation, 0.001)
        threading.Thread(target=lambda: take_all(queue)).start()
        return early, await queue.wait(operation, patient(60.0))

    assert asyncio.run(ask()) == (False, True)


@pytest.mark.parametrize("how", ["failed", "behind a gap", "too long", "lost"])
def test_what_a_client_sends_as_soon_as_it_was_told_runs(how: str) -> None:
    clock, sent = Clock(), []

    def quick(operation: Operation) -> None:
        if operation.error is not None and not sent:  # told, and the next request is there, in the same instant
            queue.tell(operation)
            sent.append(queue.add(operation_of("m", 9)))

    queue = queue_of(clock, ended=quick)
    first = 7 if how == "behind a gap" else 8
    queue.open_line("m", first=first, failed=("lost", Fault.SERVER) if how == "lost" else None)
    queue.add(operation_of("m", 8, depends=True))
    if how == "failed":
        queue.fail(*queue.take(0.0), "broken", Fault.USER)
    elif how == "behind a gap":
        clock.now = 11.0
    elif how == "too long":
        clock.now = 101.0
    assert [x.seq for x in take_all(queue)] == [9] and sent[0].error is None


def test_an_answer_is_kept_from_when_it_was_last_asked_for() -> None:
    clock = Clock()
    queue = queue_of(clock)
    queue.open_line("m")
    operation = queue.add(operation_of("m", 0))
    take_all(queue)
    clock.now = 50.0
    queue.tell(operation)
    assert queue.forget(20.0) == [] and queue.find("m:0") is operation
    clock.now = 71.0
    assert queue.forget(20.0) == ["m:0"]
