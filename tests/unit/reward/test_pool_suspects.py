"""reward/pool.py: the samples of a group that takes long are tried beside it."""

import os
import signal
import time
from collections.abc import Callable, Mapping

import pytest

from megatron_rl.errors import RewardError
from megatron_rl.reward import pool as pool_module
from megatron_rl.reward import worker_handle
from megatron_rl.reward.task_queue import Task
from megatron_rl.reward.worker_handle import WorkerProcess
from tests.patience import HANG_S, patient
from tests.unit.reward.rig import SHORT_S, OnlyEndless, groups_of, reward_of, totals

pytestmark = pytest.mark.process


@pytest.fixture
def tried(monkeypatch) -> list[Task]:
    """Let groups take long from their start on, and note the tasks that begin while their group's may still answer."""
    monkeypatch.setattr(worker_handle, "SUSPECT_S", 0.01)
    return []


def workers_that(act: Callable[[WorkerProcess, Task], None]) -> type[WorkerProcess]:
    class Acting(OnlyEndless):
        def give(self, task: Task, task_id: int, message: Mapping[str, object]) -> None:
            super().give(task, task_id, message)
            act(self, task)

    return Acting


@pytest.mark.parametrize("on_error", ["drop", "fail"])
def test_a_hanging_sample_is_tried_alone_before_its_group_is_overdue(monkeypatch, tried, on_error):
    """The group meets its deadline once a sample of it was tried; its only worker does not keep the sample waiting."""
    groups: list[WorkerProcess] = []

    def act(worker: WorkerProcess, task: Task) -> None:
        if len(task.samples) > 1:
            worker.deadline = time.monotonic() + patient(HANG_S)
            groups.append(worker)
        elif task.is_early:
            tried.append(task)
            groups[0].deadline = time.monotonic()

    monkeypatch.setattr(pool_module, "WorkerProcess", workers_that(act))
    with reward_of("act", on_error=on_error, deadline_s=SHORT_S) as reward:
        if on_error == "fail":
            with pytest.raises(RewardError, match=r"(?s)failed on sample 0@0#0 .1 of 3 .*took over 0\.2 s.*stood at"):
                reward.score(groups_of(["hang", "a", "bc"]))
        else:
            assert totals(reward.score(groups_of(["hang", "a", "bc"]))) == [None, 1.0, 2.0]
        assert tried[0].samples == [0] and len(reward.pool.pids) <= 1
        assert totals(reward.score(groups_of(["a"]))) == [1.0]


def test_a_group_that_takes_long_is_left_to_answer(monkeypatch, tried, tmp_path, caplog):
    """A suspected group answers for itself: its worker lives on, and the one beside it ends with the batch."""
    go = tmp_path / "go"

    def act(worker: WorkerProcess, task: Task) -> None:
        if task.is_early:
            tried.append(task)
            go.touch()  # now the group goes on

    monkeypatch.setattr(pool_module, "WorkerProcess", workers_that(act))
    with reward_of("act", on_error="fail") as reward:
        before = reward.pool.pids
        texts = ["a", f"wait_for {go}"]
        assert totals(reward.score(groups_of(texts))) == [float(len(text)) for text in texts]
        assert tried and reward.pool.pids == before and reward.pool.num_started == 2
        assert not caplog.records and reward.pool.most_samples is None


def test_a_worker_more_that_does_not_start_costs_nothing_else(monkeypatch, tried, tmp_path, caplog):
    """Where memory holds no further worker, the group is left to its own, and no further one is tried."""
    go = tmp_path / "go"

    class OutOfMemory(OnlyEndless):
        first = True

        def __init__(self, *given) -> None:
            super().__init__(*given)
            self.is_first, OutOfMemory.first = OutOfMemory.first, False
            if not self.is_first:
                os.kill(self.pid, signal.SIGKILL)

        def end(self) -> str:
            if not self.is_first:
                go.touch()
            return super().end()

    monkeypatch.setattr(pool_module, "WorkerProcess", OutOfMemory)
    with reward_of("act", on_error="fail") as reward:
        texts = ["a", f"wait_for {go}"]
        for _ in range(2):
            assert totals(reward.score(groups_of(texts))) == [float(len(text)) for text in texts]
        assert reward.pool.num_started == 2
    assert "a reward worker beyond reward.num_workers=1 ended before it was ready (signal SIGKILL" in caplog.text
