"""Checks the environments' threads: order, deadlines, and calls that hang without taking the others with them."""

import os
import sys
import threading

import pytest

from megatron_rl.environment.step_pool import Overdue, StepPool
from tests.patience import HANG_S, patient, until

BOUND_S = patient(HANG_S)
SHORT_S = 0.5  # a deadline, where some calls hang for ever and the others return at once


def test_results_and_errors_reach_who_asks_and_a_deadline_is_met_though_nobody_waits() -> None:
    pool = StepPool(3, BOUND_S)
    tickets = [pool.submit(lambda k=k: 10 // k) for k in range(20)]
    assert [pool.wait(ticket).result() for ticket in tickets[1:]] == [10 // k for k in range(1, 20)]
    with pytest.raises(ZeroDivisionError):
        pool.wait(tickets[0]).result()
    pool.close()
    # a call that hangs is given up while its caller does something else, and the next one begins
    pool, held, began = StepPool(1, SHORT_S), threading.Event(), threading.Event()
    first = pool.submit(held.wait)
    pool.submit(began.set)
    assert began.wait(BOUND_S) and first.ended
    held.set()
    pool.close()


@pytest.mark.parametrize(
    ("leave", "message"),
    [(sys.exit, "SystemExit: 0"), (lambda code: os._exit(code), r"SystemExit: os\._exit\(0\) was called")],
)
def test_a_step_that_exits_is_an_error_of_its_call(leave, message) -> None:
    pool = StepPool(1, BOUND_S)
    with pytest.raises(RuntimeError, match=f"a step of an environment ended with {message}"):
        pool.wait(pool.submit(lambda: leave(0))).result()
    assert pool.wait(pool.submit(lambda: 5)).result() == 5
    pool.close()


def test_no_more_threads_than_allowed_and_all_of_them_used() -> None:
    pool, most, now, lock = StepPool(4, BOUND_S), [0], [0], threading.Lock()
    all_here = threading.Barrier(4)  # met by four calls at the same time, again and again

    def work() -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        all_here.wait(BOUND_S)
        with lock:
            now[0] -= 1

    for ticket in [pool.submit(work) for _ in range(16)]:
        pool.wait(ticket).result()
    assert most[0] == 4
    pool.close()


def test_calls_that_hang_cost_their_deadline_and_nothing_else() -> None:
    pool, held = StepPool(2, SHORT_S), threading.Event()

    def hang_here() -> None:
        held.wait()

    tickets = [pool.submit(hang_here if k % 2 else (lambda k=k: k)) for k in range(8)]
    for k in reversed(range(8)):  # whoever is asked for first
        if k % 2:
            with pytest.raises(Overdue, match=r"(?s)environment\.deadline_s=0\.5 s.*hang_here"):
                pool.wait(tickets[k]).result()
        else:
            assert pool.wait(tickets[k]).result() == k
    held.set()  # a thread that was given up ends, and takes no work with it
    assert [pool.wait(pool.submit(lambda k=k: k)).result() for k in range(4)] == [0, 1, 2, 3]
    pool.close()


def test_an_environment_that_is_down_costs_a_few_deadlines_and_not_one_per_sample() -> None:
    """Of forty calls that hang, on two threads, four are waited for, or five, where the fourth began later.

    None of the rest has begun. A sample that comes back later is tried again.
    """
    pool, held, begun = StepPool(2, SHORT_S), threading.Event(), []
    tickets = [pool.submit(lambda k=k: begun.append(k) or held.wait()) for k in range(40)]
    for number, ticket in enumerate(tickets):
        with pytest.raises(Overdue) as overdue:
            pool.wait(ticket).result()
        why = "environment.deadline_s" if number in begun else "4 steps in a row took longer than 0.5 s"
        assert why in str(overdue.value)
    assert begun in ([0, 1, 2, 3], [0, 1, 2, 3, 4])
    held.set()
    assert pool.wait(pool.submit(lambda: 5)).result() == 5
    pool.close()


def test_what_was_forgotten_never_begins() -> None:
    pool, begun, held, began = StepPool(1, BOUND_S), threading.Event(), threading.Event(), []
    first = pool.submit(lambda: begun.set() or held.wait(BOUND_S))
    assert begun.wait(BOUND_S)
    second = pool.submit(lambda: began.append(1))
    pool.forget()
    with pytest.raises(RuntimeError, match="before it began"):
        pool.wait(second).result()
    held.set()
    assert pool.wait(first).result()
    assert pool.wait(pool.submit(lambda: 5)).result() == 5 and not began
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(lambda: 5)


def test_a_failure_that_ends_the_run_and_a_call_that_raises_wait_for_no_other() -> None:
    """The first overdue call ends the wait for one that waits for its thread, and that one never begins."""
    pool, held, began = StepPool(1, SHORT_S, stops=True), threading.Event(), []
    first, second = pool.submit(held.wait, "first"), pool.submit(lambda: began.append(1), "second")
    assert pool.wait(second).subject == "first"
    with pytest.raises(Overdue):
        pool.failed.result()
    with pytest.raises(RuntimeError, match="not tried, since another had failed"):
        second.result()
    held.set()
    assert not began and pool.wait(first) is first
    pool.close()
    pool, held = StepPool(2, BOUND_S, stops=True), threading.Event()
    slow, raising = pool.submit(lambda: held.wait(BOUND_S)), pool.submit(lambda: 1 // 0)
    assert pool.wait(slow) is raising and not slow.ended
    pool.forget()  # whoever asks again, after an engine was lost, does not meet the old failures
    late = pool.submit(lambda: held.wait(BOUND_S) and 1 // 0)
    assert until(lambda: late.thread)
    pool.forget()
    held.set()
    assert until(lambda: late.ended) and pool.wait(pool.submit(lambda: 5)).result() == 5
    pool.close()
