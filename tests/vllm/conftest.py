"""An embedded vLLM engine for the session, and a bound in time for every test that uses it."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import signal
from collections.abc import Iterator

import pytest

from tests.patience import patient
from tests.workers.inputs import prepare_inputs

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
    """Give each lane cores of its own.

    Threads of two engines that spin on the same cores take ten times as long as either alone.
    """
    lane, lanes = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[int(lane.removeprefix("gw")) % len(cores) :: lanes])


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> pathlib.Path:
    """Make data, tokenizer and a tied qwen2 of the quickstart's kind.

    Its heads are of 32, which vLLM's CPU build can do.
    """
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here; make test-vllm installs it and runs these tests")
    return prepare_inputs(tmp_path_factory.mktemp("vllm"), hidden=64, layers=2, heads=2, intermediate=96)


@pytest.fixture(scope="session")
def bench(inputs, tmp_path_factory):
    """Return a running engine of a tied qwen2, with weights; a test that restarts it leaves it able to recover."""
    from tests.vllm.rig import model_folder, start_bench

    root = tmp_path_factory.mktemp("bench")
    started = start_bench(model_folder(inputs / "model", root / "model", "qwen2", tied=True), root / "run")
    try:
        started.engine.recover(())
        started.load(0)
        yield started
    finally:
        started.engine.close()
