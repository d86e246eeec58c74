"""The dispatcher: sends each generation request to one of several engine replicas, and again after a failure.

The replicas send the requests; this module only waits for their futures. Invariants
(tests/unit/rollout/test_dispatch.py checks them under Hypothesis):

1. Every request ends in exactly one of ``finished`` and ``lost``, fields of the returned
   ``Dispatched``.
2. An entry of ``finished`` is one attempt's whole answer, and that attempt was not given up before
   the answer arrived.
3. A request is sent at most ``attempts`` times, and never while an earlier attempt is still waited
   for.
4. A replica has at most ``max_in_flight`` requests under way. It gets no request once it is down or
   holds weights older than ``weight_version``. While its weights are updated in flight, a replica
   still gets requests. It may hold newer weights afterwards.
5. The call ends, since every attempt ends by its answer, its error or its deadline.
6. ``on_finished`` is called once for every finished request, with its entry of ``finished``. The
   calls are made in the caller's thread and in the order of finishing. If a call raises, every
   attempt under way is given up.
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

import numpy as np

from megatron_rl.errors import EngineError
from megatron_rl.rollout.engines.replica import UPDATING, Completion, GenerateRequest, Replica, ReplicaLost

FINISHED = ("stop", "length", "decided")  # with any other finish_reason the engine aborted the sample
DEFECTS_ALLOWED = 1  # wrong answers to a request: one may be chance, but two end the run
MEMORY_WORDS = ("out of memory", "allocate memory", "exit code -9", "bad_alloc", "MemoryError") + (
    "could not create a primitive",  # from oneDNN on a CPU, if a kernel gets no memory
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dispatched:
    """Holds the result of one call of ``dispatch``.

    finished: request id → its ``n`` completions, by sample index.
    lost: the requests without an answer. The caller restarts engines and sends these requests
        again.
    causes: request id → the cause of each failed attempt, in order, also for requests that finished
        later.
    down: replica name → the reason why the replica got no more requests in this call.
    """

    finished: Mapping[str, list[Completion]]
    lost: tuple[GenerateRequest, ...]
    causes: Mapping[str, tuple[str, ...]]
    down: Mapping[str, str]


@dataclass(slots=True, kw_only=True, eq=False)
class _Attempt:
    request: GenerateRequest
    replica: int
    issued_at: float
    future: Future | None = None


def dispatch(
    requests: Sequence[GenerateRequest],
    replicas: Sequence[Replica],
    *,
    weight_version: int,
    deadline_s: float,
    max_in_flight: int,
    attempts: int,
    rotation: int = 0,
    on_finished: Callable[[str, list[Completion]], None] | None = None,
) -> Dispatched:
    """Send each request to the replica with the fewest samples under way, until every request is finished or lost.

    A request that fails is sent again, to another replica if possible. It is lost after
    ``attempts`` failures, or if no replica is left.

    weight_version: the version of the oldest weights that may sample a token.
    deadline_s: an attempt is given up after these seconds without progress. Progress means that a
        request on its replica ended, or that the replica reported that it computes. So long
        responses may take longer.
    max_in_flight: the maximum of requests under way on one replica.
    attempts: the maximum of attempts at one request.
    rotation: the index of the replica that is preferred if several have equally few samples.
        Each rank passes its own number, so that not all ranks choose the first replica.
    on_finished: called with a request's id and completions as soon as they arrive.

    Raises RequestRefused as soon as a request is refused. Raises EngineError if a request gets two
    invalid answers, as ``defect_of`` judges. In both cases the other requests are aborted.
    """
    ids = Counter(request.request_id for request in requests)
    doubled = sorted(name for name, count in ids.items() if count > 1)
    if doubled:
        raise ValueError(
            f"{len(doubled)} request ids are not unique, {doubled[0]!r} is there {ids[doubled[0]]} times; give each "
            "its own"
        )
    if min(max_in_flight, attempts) < 1 or deadline_s <= 0:
        raise ValueError(
            f"max_in_flight={max_in_flight}, attempts={attempts}, deadline_s={deadline_s}: each must be above 0"
        )
    call = _Call(requests, replicas, weight_version, deadline_s, max_in_flight, attempts, rotation, on_finished)
    return call.run()


class _Call:
    """Runs one call of ``dispatch`` in the caller's thread.

    Other threads may complete an attempt's future. The future's callback only puts the attempt in
    the queue ``done``.
    """

    def __init__(
        self, requests, replicas, weight_version, deadline_s, max_in_flight, attempts, rotation, on_finished
    ) -> None:
        self.replicas = list(replicas)
        self.names = [replica.name for replica in self.replicas]  # a copy, since a restart changes a replica's name
        self.weight_version, self.deadline_s = weight_version, deadline_s
        self.max_in_flight, self.attempts, self.on_finished = max_in_flight, attempts, on_finished
        first = rotation % max(1, len(self.replicas))
        self.order = [*range(first, len(self.replicas)), *range(first)]
        self.waiting: deque[GenerateRequest] = deque(requests)
        self.under_way: set[_Attempt] = set()  # answers to attempts that are not in this set are ignored
        self.done: queue.SimpleQueue[_Attempt] = queue.SimpleQueue()
        self.requests_on = Counter()
        self.samples_on = Counter()
        self.ended_at: dict[int, float] = {}  # replica index → when one of this call's requests last ended there
        self.issued = Counter()
        self.causes: dict[str, list[str]] = defaultdict(list)
        self.defects: dict[str, list[int]] = defaultdict(list)  # request id → indices of replicas that answered wrongly
        self.down: dict[int, str] = {}
        self.finished: dict[str, list[Completion]] = {}
        self.lost: list[GenerateRequest] = []

    def run(self) -> Dispatched:
        try:
            while self.waiting or self.under_way:
                self._issue()
                if not self.under_way:
                    break  # no replica is left for the waiting requests
                self._take_one()
        except BaseException:
            for attempt in list(self.under_way):
                self._give_up(attempt)
            raise
        return Dispatched(
            finished=self.finished,
            lost=(*self.lost, *self.waiting),
            causes={name: tuple(causes) for name, causes in self.causes.items()},
            down={self.names[index]: cause for index, cause in self.down.items()},
        )

    def _issue(self) -> None:
        while self.waiting:
            index = self._choose(self.waiting[0])
            if index is None:
                return
            request = self.waiting.popleft()
            self.issued[request.request_id] += 1
            attempt = _Attempt(request=request, replica=index, issued_at=time.monotonic())
            try:
                attempt.future = self.replicas[index].submit(request)
            except ReplicaLost as error:
                self._lose(attempt, str(error))
                continue
            self.under_way.add(attempt)
            self.requests_on[index] += 1
            self.samples_on[index] += request.n
            attempt.future.add_done_callback(lambda _, attempt=attempt: self.done.put(attempt))

    def _choose(self, request: GenerateRequest) -> int | None:
        """Return the index of the replica with the fewest samples under way; None if every replica is full or down.

        A replica is full at ``max_in_flight`` requests. A replica that gave this request an invalid
        answer is avoided if another replica can be used.
        """
        usable = [index for index in self.order if self._usable(index)]
        wrong = self.defects[request.request_id]
        usable = [index for index in usable if index not in wrong] or usable
        free = [index for index in usable if self.requests_on[index] < self.max_in_flight]
        return min(free, key=lambda index: self.samples_on[index], default=None)  # min returns the first of equals

    def _usable(self, index: int) -> bool:
        version = self.replicas[index].weight_version
        if index not in self.down and version != UPDATING and version < self.weight_version:
            self.down[index] = f"it holds weight version {version}, this call asks for {self.weight_version}"
        return index not in self.down

    def _take_one(self) -> None:
        """Wait until one attempt is answered, fails or reaches its deadline, and record its result."""
        ends_at = min(self._ends_at(attempt) for attempt in self.under_way)
        try:
            attempt = self.done.get(timeout=max(0.0, ends_at - time.monotonic()))
        except queue.Empty:
            self._expire()
            return
        if attempt in self.under_way:
            self._settle(attempt)

    def _ends_at(self, attempt: _Attempt) -> float:
        """Return the deadline of an attempt, as a value of time.monotonic().

        It is ``deadline_s`` after the attempt was sent or its replica last made progress, whichever
        is later.
        """
        progressed_at = self.replicas[attempt.replica].progressed_at
        ended_at = self.ended_at.get(attempt.replica, -math.inf)
        return max(attempt.issued_at, progressed_at, ended_at) + self.deadline_s

    def _expire(self) -> None:
        now = time.monotonic()
        for attempt in [x for x in self.under_way if self._ends_at(x) <= now]:
            self._give_up(attempt)
            request_id, waited_s = attempt.request.request_id, now - attempt.issued_at
            cause = f"did not answer request {request_id} in {waited_s:.1f} s, without progress in the last"
            self._lose(attempt, f"{cause} {self.deadline_s:g} s")

    def _give_up(self, attempt: _Attempt) -> None:
        """Abort an attempt, and ignore its future from now on. The future may still get completions or an error."""
        self._forget(attempt)
        with contextlib.suppress(ReplicaLost):  # the attempt is given up anyway
            self.replicas[attempt.replica].abort(attempt.request.request_id)

    def _forget(self, attempt: _Attempt) -> None:
        self.under_way.remove(attempt)
        self.requests_on[attempt.replica] -= 1
        self.samples_on[attempt.replica] -= attempt.request.n

    def _settle(self, attempt: _Attempt) -> None:
        self._forget(attempt)
        self.ended_at[attempt.replica] = time.monotonic()
        try:
            completions = attempt.future.result()
        except (ReplicaLost, CancelledError) as error:
            self._lose(attempt, str(error) or "the request was cancelled")
            return
        broken_off = [x.finish_reason for x in completions if x.finish_reason not in FINISHED]
        defect = defect_of(attempt.request, completions)
        older = sorted({v for x in completions for v, _ in x.weight_versions if v < self.weight_version})
        if older:  # someone else restarted the server, and it samples with the weights of its files
            self._lose(attempt, f"sampled with weights of version {older[0]}, not {self.weight_version}")
        elif broken_off:
            self._lose(attempt, f"broke off {len(broken_off)} of {attempt.request.n} samples, reason {broken_off[0]!r}")
        elif defect is not None:
            self._reject(attempt, defect)
        else:
            self.finished[attempt.request.request_id] = completions
            if self.on_finished is not None:
                self.on_finished(attempt.request.request_id, completions)

    def _lose(self, attempt: _Attempt, cause: str) -> None:
        """Mark an attempt's replica as down for the rest of the call, and queue the request again.

        After the request's last attempt, count the request as lost instead. ``cause``: why the
        attempt failed.
        """
        self.down.setdefault(attempt.replica, cause)
        self._again(attempt, cause)

    def _reject(self, attempt: _Attempt, defect: str) -> None:
        request_id = attempt.request.request_id
        self._again(attempt, defect)
        self.defects[request_id].append(attempt.replica)
        if len(self.defects[request_id]) > DEFECTS_ALLOWED:
            causes = "; ".join(self.causes[request_id])
            raise EngineError(
                f"request {request_id} was answered wrongly {len(self.defects[request_id])} times: {causes}. The "
                "engine's answers cannot be trusted: leave that server out of rollout.servers, or run another vLLM "
                "release there"
            )

    def _again(self, attempt: _Attempt, cause: str) -> None:
        request = attempt.request
        self.causes[request.request_id].append(f"{self.names[attempt.replica]}: {cause}")
        if self.issued[request.request_id] < self.attempts:
            self.waiting.appendleft(request)
        else:
            self.lost.append(request)


def defect_of(request: GenerateRequest, completions: Sequence[Completion]) -> str | None:
    """Return why the answer to a request is invalid, such as a wrong number of tokens; None if it is valid."""
    if len(completions) != request.n:
        return f"gave {len(completions)} completions where {request.n} were asked for"
    for index, completion in enumerate(completions):
        tokens, logprobs = len(completion.token_ids), len(completion.logprobs)
        if tokens != logprobs:
            return f"sample {index} has {tokens} tokens and {logprobs} log-probs"
        if not 1 <= tokens <= request.max_tokens:
            return f"sample {index} has {tokens} tokens, between 1 and {request.max_tokens} were asked for"
        finite = int(np.isfinite(completion.logprobs).sum())
        if finite != logprobs:
            return f"sample {index}: {logprobs - finite} of {logprobs} log-probs are not finite"
    return None


def with_memory_advice(why: str) -> str:
    """Return the error text ``why``. If it is about memory, advice on settings that need less memory is added."""
    if any(word in why for word in MEMORY_WORDS):
        return (
            f"{why}\nThis looks like too little memory: lower rollout.gpu_memory_utilization, "
            "rollout.max_requests or rollout.vllm.max_num_seqs"
        )
    return why
