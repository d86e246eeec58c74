"""An embedded vLLM engine for the session, and a bound in time for every test that uses it."""

import importlib.util
import os
import pathlib
import signal
from collections.abc import Iterator

import pytest

from tests.patience import patient

BOUND_S = patient(240.0)


@pytest.fixture
def bounded() -> Iterator[None]:
    """Raise in the test when its time is over; fixtures of a longer life have deadlines of their own."""

    def ring(*_: object) -> None:
        raise AssertionError(f"the test did not end in {BOUND_S:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, BOUND_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session", autouse=True)
def own_cores() -> None:
    """Give each lane cores of its own: engines that spin on the same cores take ten times as long as either alone."""
    lane, lanes = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[int(lane.removeprefix("gw")) % len(cores) :: lanes])


@pytest.fixture(scope="session")
def inputs(arithmetic) -> pathlib.Path:
    """Return data, tokenizer and a tied qwen2 with heads of 32, which vLLM's CPU build can do."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here; make test-vllm installs it and runs these tests")
    return arithmetic


@pytest.fixture(scope="session")
def bench(inputs, tmp_path_factory):
    """Return a running engine of a tied qwen2, with weights; a test that restarts it leaves it able to recover."""
    from tests.vllm.rig import running

    with running(inputs, tmp_path_factory.mktemp("bench"), "qwen2") as started:
        started.load(0)
        yield started


@pytest.fixture
def run(pool, arithmetic, tmp_path):
    """Return a call that runs the command line, or ``function``, on a real engine; it returns what each rank said."""
    from tests.runs.command import arguments, command_line
    from tests.vllm.served import VLLM

    def call(*given, world=1, base=VLLM, folder=arithmetic, out=tmp_path, function=command_line, more=(), ends_with=0):
        given = arguments(folder, out, *base, *given)
        results = pool.run(world, function, given, *more, timeout_s=300)
        assert [code for code, *_ in results] == [ends_with] * world, results
        return [rest for _, *rest in results]

    return call
