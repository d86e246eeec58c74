"""Persistent reward workers that score whole groups. A sample that hangs or kills its worker costs only itself.

A task is one call of one reward function on the samples of one prompt, or on some of them.

1. Every task has an id of its own, and a killed worker's socket is closed. So a late answer is
   never used.
2. A task has the deadline of one sample, however many samples it has. A task that fails is scored
   again one sample at a time (reward/task_queue.py). If samples are slow only together, later tasks
   are smaller.
3. If a task takes longer than SUSPECT_S seconds, its samples are also tried alone while the task
   goes on. So a sample that hangs is found SUSPECT_S seconds after the task's deadline, not a whole
   deadline later. Up to ``num_workers`` extra workers are started for these trials. If one does not
   start, the pool starts no other extra worker.
4. Every wait is one `select` on the workers' sockets, until a message or the nearest deadline.
   Nothing polls.
5. Workers live as long as their pool, and a worker that ends is replaced. The number of starts is
   bounded: a task is given up after a few workers died on it, and after STARTS failed starts in a
   row the pool gives up.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import selectors
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from megatron_rl.distributed.frames import is_json
from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.reward.forms import Form
from megatron_rl.reward.function import MATH, Outcome, columns_of
from megatron_rl.reward.task_queue import Failure, Task, TaskQueue
from megatron_rl.reward.worker_handle import CLOSE_S, START_S, Gone, WorkerProcess
from megatron_rl.types import Rollout

log = logging.getLogger(__name__)

STARTS = 3  # failed starts in a row after which RewardError is raised


class Pool:
    """Scores samples in worker processes that live as long as the pool.

    functions: the names of the F reward functions. The workers import the functions, this process
        does not.
    num_workers: the number of worker processes. While tasks take long, there are up to twice as
        many.
    deadline_s: the maximum of seconds for one sample, and also for a task of several samples.
    variables: names of environment variables that workers get in addition to those that ALLOWED
        (worker_handle.py) lists as holding no secret.
    completions: ``reward.completions``.

    Raises ConfigError for a function that a worker cannot import, or a variable that is not set.
    Only one thread at a time may use a pool.
    """

    def __init__(
        self,
        functions: Sequence[str],
        num_workers: int,
        deadline_s: float,
        variables: Sequence[str] = (),
        completions: str = "text",
    ) -> None:
        self.functions, self.variables, self.completions = tuple(functions), tuple(variables), completions
        unset = [name for name in self.variables if name not in os.environ]
        if unset:
            raise ConfigError(
                f"reward.worker_environment names {unset[0]!r}, which is not set in the rank's environment; export it "
                "before the start, or take it out of the list"
            )
        self.num_workers = num_workers
        self._most_workers = 2 * num_workers
        self.deadline_s = deadline_s
        self.most_samples: int | None = None
        self.num_started = 0
        # Facts of each function, as the worker that started last reported them.
        self.needed_parameters: dict[str, list[str]] = {}
        self.forms: dict[str, Form | None] = {}
        self._workers: list[WorkerProcess] = []
        self._failed_starts = 0
        self._ids = itertools.count()
        self._in_use = threading.Lock()
        self._selector = selectors.DefaultSelector()
        # A worker ends with the thread that started it (distributed/child_process.py), so the pool has a thread
        # of its own for starts.
        self._starter: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="reward-workers")
        try:
            while sum(worker.ready for worker in self._workers) < num_workers:
                self._fill()
                self._wait(None)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def score(self, rollouts: Sequence[Rollout], *, stop_at_failure: bool = False) -> TaskQueue:
        """Call every function on every sample; return the ``TaskQueue`` that holds the outcomes.

        rollouts: the samples. Neighbours with the same prompt form a group.
        stop_at_failure: whether the other samples are given up once one has failed.

        Raises ConfigError if a function cannot take the columns, or if a column is not JSON. Raises
        RewardError if no worker starts.
        """
        columns = columns_of(rollouts)
        _check_columns(rollouts)
        with self._used_here():
            lenient = [number for number, name in enumerate(self.functions) if name == MATH]
            work = TaskQueue(rollouts, len(self.functions), self.most_samples, lenient)
            try:
                self._wait(None, until=time.monotonic())  # notice workers that ended since the last batch
                while not (work.done or (stop_at_failure and work.has_failed)):
                    self._fill()
                    self._hand_out(work, columns)
                    self._wait(work)
            finally:
                for worker in [worker for worker in self._workers if worker.task is not None]:
                    self._end(worker)  # no one waits for its task any more
                for worker in self._workers[self.num_workers :]:
                    self._end(worker)
            work.give_up_rest()
        # Later batches get tasks that a worker can finish in time.
        slow = work.slow_samples()
        if slow is not None:
            self.most_samples = max(1, slow // 2)
            log.warning(
                "a task of %d samples took longer than reward.deadline_s=%g, though no sample alone did. Tasks now "
                "hold at most %d samples; raise the deadline to keep groups whole",
                slow,
                self.deadline_s,
                self.most_samples,
            )
        return work

    def close(self) -> None:
        """End the workers; unfinished tasks are lost. A second call does nothing."""
        workers, self._workers = self._workers, []
        for worker in workers:
            if worker.idle:
                worker.leave()
        until = time.monotonic() + CLOSE_S
        for worker in workers:
            if worker.idle:
                worker.wait(until)
            worker.end()
        self._selector.close()
        if self._starter is not None:
            self._starter.shutdown()
            self._starter = None

    @contextlib.contextmanager
    def _used_here(self) -> Iterator[None]:
        if self._starter is None:
            raise RuntimeError("the reward workers are closed")
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError("two threads score with the same reward workers; one at a time may")
        try:
            yield
        finally:
            self._in_use.release()

    # ---- workers ---------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        while len(self._workers) < self.num_workers:
            self._start()

    def _start(self) -> None:
        try:
            worker = self._start_one().result(START_S)
        except OSError as error:  # TimeoutError is one: no memory, no process, or a file system that hangs
            if len(self._workers) >= self.num_workers:
                self._do_without_more(f"cannot be started: {type(error).__name__}: {error}")
                return
            raise RewardError(f"no reward worker can be started: {type(error).__name__}: {error}") from error
        self.num_started += 1
        self._workers.append(worker)
        self._selector.register(worker.socket, worker.events, worker)

    def _start_one(self) -> Future[WorkerProcess]:
        return self._starter.submit(WorkerProcess, self.functions, self.deadline_s, self.variables, self.completions)

    def _hand_out(self, work: TaskQueue, columns: Sequence[str]) -> None:
        """Give idle workers the tasks that may begin, and start a worker if none is idle.

        At most ``num_workers`` tasks run. If a task has taken longer than SUSPECT_S, its samples are
        also tried one by one, to find the one that hangs. One worker beyond ``num_workers`` may do so
        for each such task, and so may workers that have no task.

        columns: the names of the dataset's columns.
        """
        while True:
            tasks = [worker.task for worker in self._workers if worker.task is not None and not worker.task.is_moot]
            num_early = sum(task.is_early for task in tasks)
            most = self.num_workers
            if work.num_waiting and len(tasks) - num_early < most:
                take = work.next
            elif work.num_early and num_early < most and len(tasks) < most + work.num_suspected:
                take = work.next_early
            else:
                return
            worker = next((worker for worker in self._workers if worker.idle), None)
            if worker is None:
                self._see_to_a_worker(work)
                return
            task = take()
            worker.give(task, next(self._ids), _message(task, self.functions[task.function], work.rollouts, columns))
            self._selector.modify(worker.socket, worker.events, worker)

    def _see_to_a_worker(self, work: TaskQueue) -> None:
        """Start workers, up to the pool's maximum, unless enough workers are starting already.

        If the pool has its maximum of workers, first end a worker whose task's result is no longer
        needed (``Task.is_moot``).
        """
        moot = [worker for worker in self._workers if worker.task is not None and worker.task.is_moot]
        coming = sum(not worker.ready for worker in self._workers)
        while coming < max(1, work.num_suspected) and (len(self._workers) < self._most_workers or moot):
            if len(self._workers) >= self._most_workers:
                self._end(moot.pop())
            self._start()
            coming += 1

    def _wait(self, work: TaskQueue | None, until: float | None = None) -> None:
        """Wait for a worker's message or a deadline. A message sent in time counts, even if it is read late.

        work: the queue that gets results and failures; None if no task runs.
        until: when the wait ends, on time.monotonic; None: at the nearest deadline.
        """
        times = [time_s for worker in self._workers for time_s in (worker.deadline, worker.suspect_at)]
        nearest = min(time_s for time_s in times if time_s is not None) if until is None else until
        for key, events in self._selector.select(max(0.0, nearest - time.monotonic())):
            self._attend(key.data, events, work)
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline is not None and worker.deadline <= now]:
            self._overdue(worker, work)
        for worker in [
            worker for worker in self._workers if worker.suspect_at is not None and worker.suspect_at <= now
        ]:
            worker.suspect_at = None
            work.suspect(worker.task)

    def _attend(self, worker: WorkerProcess, events: int, work: TaskQueue | None) -> None:
        if events & selectors.EVENT_WRITE:
            worker.flush()
            self._selector.modify(worker.socket, worker.events, worker)
        if not events & selectors.EVENT_READ:
            return
        try:
            for message in worker.read():
                self._hear(worker, message, work)
        except Gone as error:
            self._gone(worker, str(error), work)

    def _hear(self, worker: WorkerProcess, message: dict, work: TaskQueue | None) -> None:
        if "refused" in message or message["kind"] == "refused":
            raise ConfigError(message.get("refused") or message["error"])
        if message["kind"] == "ready":
            worker.ready, worker.deadline, worker.pid = True, None, message["pid"]
            self._failed_starts, self.needed_parameters = 0, message["needed"]
            self.forms = {name: Form[form] if form else None for name, form in message["forms"].items()}
        elif worker.task is None or message["id"] != worker.task_id:
            log.warning("reward worker %d answered %s, which is no longer awaited", worker.pid, message["id"])
        else:
            task = worker.take_back()
            if "error" in message:
                work.failed(task, Failure.RAISED, message["error"])
            else:
                pairs = zip(message["values"], message["errors"], strict=True)
                work.answered(task, [Outcome(value=value, error=error) for value, error in pairs])

    def _gone(self, worker: WorkerProcess, why: str, work: TaskQueue | None) -> None:
        task, was_ready = worker.take_back(), worker.ready
        how = self._end(worker)
        log.warning("reward worker %d is gone (%s, %s) and is replaced", worker.pid, why, how)
        if task is not None:
            work.failed(task, Failure.DIED, f"it killed its worker twice ({how})")
        elif not was_ready:
            self._not_started(f"ended before it was ready ({how})")

    def _overdue(self, worker: WorkerProcess, work: TaskQueue | None) -> None:
        task, stacks = worker.take_back(), worker.stacks()
        self._end(worker)
        if task is None:
            self._not_started(f"was not ready after {START_S:g} s")
            return
        log.warning(
            "reward worker %d did not answer in %g s; it was killed and is replaced", worker.pid, self.deadline_s
        )
        message = f"it took over {self.deadline_s:g} s (reward.deadline_s) and its worker was killed"
        work.failed(task, Failure.OVERDUE, f"{message}; it stood at:\n{stacks}" if stacks else message)

    def _not_started(self, what: str) -> None:
        if len(self._workers) >= self.num_workers:
            self._do_without_more(what)
            return
        self._failed_starts += 1
        if self._failed_starts >= STARTS:
            raise RewardError(
                f"a reward worker {what}, {STARTS} times in a row; read its output, or set reward.num_workers=0"
            )

    def _do_without_more(self, what: str) -> None:
        self._most_workers = self.num_workers
        log.warning(
            "a reward worker beyond reward.num_workers=%d %s, and no other is started: a sample that hangs now takes "
            "up to twice reward.deadline_s",
            self.num_workers,
            what,
        )

    def _end(self, worker: WorkerProcess) -> str:
        self._workers.remove(worker)
        self._selector.unregister(worker.socket)
        return worker.end()


def _check_columns(rollouts: Sequence[Rollout]) -> None:
    for prompt in {id(rollout.prompt): rollout.prompt for rollout in rollouts}.values():
        for key, value in prompt.columns.items():
            if not (type(key) is str and is_json(value)):
                raise ConfigError(
                    f"column {key!r} of prompt {prompt.prompt_id} is {value!r:.80}, which would reach a reward worker "
                    "as something else: JSON travels; name the function that takes it in reward.in_process"
                )


def _message(task: Task, function: str, rollouts: Sequence[Rollout], columns: Sequence[str]) -> dict:
    """Return the message that gives a task to a worker. The task's samples have one prompt, which is sent once."""
    samples = [rollouts[i] for i in task.samples]
    prompt = samples[0].prompt
    return {
        "function": function,
        "prompt": prompt.text,
        "messages": prompt.messages,
        "columns": {key: prompt.columns.get(key) for key in columns},
        "completions": [sample.text for sample in samples],
        "completion_ids": [list(sample.response_ids) for sample in samples],
    }
