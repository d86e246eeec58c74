"""The ``Engine`` (rollout/engines/engine.py) that spreads this rank's prompts over vLLM replicas.

A replica is a vLLM engine in a process that the run starts, or a vLLM server. A request asks for
all samples of one prompt, so that the samples share the prompt's keys and values. A request's seed
is the seed of its sample 0. Log-probs of greedy samples are at temperature 1, while the
Transformers engine gives them at ``rollout.temperature``. Nothing trains on greedy samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.config.rollout import WEIGHT_DRAFTERS, RolloutConfig
from megatron_rl.errors import ConfigError, EngineError
from megatron_rl.rollout.engines.engine import (
    NO_WEIGHTS,
    EngineLost,
    OnFinished,
    SyncReport,
    group_sizes,
    sample_seed,
    token_bounds,
)
from megatron_rl.rollout.engines.replica import (
    UPDATING,
    Completion,
    GenerateRequest,
    Replica,
    ReplicaLost,
    RequestRefused,
    check_drafters,
    check_facts,
)
from megatron_rl.rollout.engines.sampling import SampleRequest, SampleResult
from megatron_rl.rollout.vllm.answers import Answers, generate_request, rollout_request
from megatron_rl.rollout.vllm.dispatch import dispatch, with_memory_advice
from megatron_rl.rollout.weight_sync.sender import WeightSender
from megatron_rl.types import Prompt, Rollout

if TYPE_CHECKING:
    from megatron_rl.observability.prometheus.live import EngineReading
    from megatron_rl.rollout.engines.early_end import EarlyEnd
    from megatron_rl.rollout.vllm.early_ends import EarlyEnds

log = logging.getLogger(__name__)
PROBE_S = 0.6  # seconds to try a lost server, while other servers do its work


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    """Holds the state of the engine at the beginning of one call of ``generate`` or ``sample``.

    number: the call's number, from 1.
    version: the weight version of the replicas.
    present: the replicas that may be used.
    restarts: how often replicas were restarted since the latest call during which none was.
    lives: a replica's id → how often it was restarted, or, a server, was tried again after a loss.
    """

    number: int
    version: int
    present: Sequence[Replica]
    restarts: int
    lives: Mapping[int, int]


class VllmEngine:
    """Generates with this rank's replicas, sends them weights (if ``drives``), and restarts those that the run started.

    replicas: the replicas that get this rank's prompts. Empty on a rank without an engine.
    drives: whether this rank sends weights to the replicas. A replica that is a vLLM server gets
        prompts from all ranks, but weights from only one.

    With ``in_flight`` one thread may generate while the main thread makes all other calls. A call
    then accepts tokens of the weight version that was complete when the call began, and of newer
    versions. Fields that both threads write are written under a lock.
    """

    is_elsewhere = True
    early_end: EarlyEnd | None = None

    def __init__(
        self,
        replicas: Sequence[Replica],
        sync: WeightSender,
        tokenizer: PreTrainedTokenizerBase,
        rollout: RolloutConfig,
        *,
        seed: int,
        stop_ids: Sequence[int],
        vocab_size: int,
        longest: int,
        drives: bool,
        rank: int = 0,
        in_flight: bool = False,
        start_late: bool = False,
    ):
        """Start the replicas without waiting for them. ``recover`` waits until they serve.

        replicas, drives: as in the class's docstring.
        seed: the run's seed.
        stop_ids: the tokens that end a response.
        longest: the maximum of tokens of a prompt and its response together.
        in_flight: whether ``load_weights`` may be called while ``generate`` is under way.
        start_late: whether the replicas are started only by the first ``recover``. On a GPU that
            the trainer still fills, vLLM would find too little free memory, or count the trainer's
            memory as vLLM's (v1/worker/utils.py, request_memory; 0.32.0).
        """
        self._replicas, self._sync, self._tokenizer, self._rollout = list(replicas), sync, tokenizer, rollout
        self._seed, self._stop_ids, self._vocab_size, self._longest = seed, tuple(stop_ids), vocab_size, longest
        self._answers = Answers(tokenizer, vocab_size, needs_experts=rollout.routing_replay == "rollout")
        self._drives, self._rank, self._in_flight = drives, rank, in_flight
        self._unready = list(self._replicas)
        self._lost: list[Replica] = []  # replaced at every change, so that it may be read without the lock
        self._lock = threading.Lock()
        self._lives: Counter[int] = Counter()  # a replica's id → number of its recoveries
        self._delivered = NO_WEIGHTS  # the latest version that all replicas had
        self._absent: set[str] = set()  # names of servers that are left out until they serve again
        self._restarts = 0  # restarts since the last call without one
        self._why_lost = ""  # error of the latest loss
        self._closed = False
        self._calls = itertools.count(1)
        self._started = False
        self.speculation = None  # counts drafted tokens; None if the run drafts none
        if rollout.speculation != "off":
            from megatron_rl.rollout.vllm.speculation import Speculation

            self.speculation = Speculation(keeps_answers=rollout.speculation == "history")
        if not start_late:
            self._start()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            for replica in self._replicas:
                replica.start()

    @property
    def weight_version(self) -> int:
        """Return the weight version that all serving replicas hold; NO_WEIGHTS if they differ or one is not ready.

        On a rank without replicas, it is the version that all replicas had after the latest sync.
        """
        if not self._replicas:
            return self._delivered
        if self._unready or self._lost:
            return NO_WEIGHTS
        versions = {replica.weight_version for replica in self._present}
        return versions.pop() if len(versions) == 1 and UPDATING not in versions else NO_WEIGHTS

    @property
    def _present(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.name not in self._absent]

    @property
    def lacks_weights(self) -> bool:
        return self._drives and any(self._sync.lacks_weights(x) for x in self._present)

    @property
    def lost(self) -> list[str]:
        return [x.name for x in self._lost]

    @property
    def progressed_at(self) -> float:
        return max((x.progressed_at for x in self._replicas), default=-math.inf)

    def recover(self, lost: Sequence[str]) -> Sequence[str]:
        """Restart the lost replicas that this run started, and wait until they serve.

        The other replicas are vLLM servers, which their supervisor restarts. The call waits for a
        lost server only if this rank has no other replica.

        lost: names of the replicas that any rank has lost.

        Returns the names of the servers that do not serve yet. Raises EngineError after too many
        restarts in a row, or if no server comes back.
        """
        # In flight, a replica that is lost during this call stays lost.
        mended = [x for x in self._lost if x.name in lost or not self._in_flight]
        self._start()
        self._await()
        # Look whether lost or absent servers serve again. Wait for them only if no other replica is left.
        servers = [x for x in self._replicas if not x.ours and (x.name in lost or x.name in self._absent)]
        for server in servers:
            self._lives[id(server)] += 1
            server.restart()
            self._sync.forget(server)
        unreached, ends_at = servers, time.monotonic() + self._rollout.start_s
        while unreached:
            unreached = [x for x in unreached if not self._serves_again(x)]
            if len(unreached) < len(self._replicas):
                break
            if time.monotonic() > ends_at:
                raise EngineError(
                    f"no server is left, and none came back in rollout.start_s={self._rollout.start_s:g} s: "
                    f"{self._why_lost}"
                )
        # Restart our own lost engines, and wait for them.
        self._absent -= {x.name for x in servers if x not in unreached}
        self._restart([x for x in self._replicas if x.ours and x.name in lost])
        with self._lock:
            self._lost = [x for x in self._lost if x not in mended]
        self._await()
        return [x.name for x in unreached]

    def _serves_again(self, server: Replica) -> bool:
        try:
            check_facts(server.name, server.wait_ready(PROBE_S), self._vocab_size, self._longest, self._rollout)
        except ReplicaLost as error:
            self._why_lost = f"{error}"
            return False
        except RequestRefused as error:
            raise ConfigError(f"{error}") from error
        log.warning("%s serves again", server.name)
        return True

    def leave_out(self, names: Collection[str]) -> None:
        for name in sorted(set(names) - self._absent):
            log.warning("%s is left out until it serves again", name)
        self._absent |= set(names)

    def _restart(self, gone: Sequence[Replica]) -> None:
        for replica in gone:
            if self._restarts >= self._rollout.max_restarts:
                message = (
                    f"{replica.name} was lost {self._restarts + 1} times in a row, and "
                    f"rollout.max_restarts={self._rollout.max_restarts}"
                )
                raise EngineError(with_memory_advice(f"{message}. {self._why_lost}"))
            log.warning("%s is started again", replica.name)
            self._sync.forget(replica)
            self._lives[id(replica)] += 1
            replica.restart()
            self._unready.append(replica)
        with self._lock:
            self._restarts += bool(gone)

    def _note_lost(self, gone: Collection[Replica]) -> None:
        with self._lock:
            self._lost = [x for x in self._replicas if x in self._lost or x in gone]

    def _await(self) -> None:
        ends_at = time.monotonic() + self._rollout.start_s
        while self._unready:
            replica = self._unready[0]
            try:
                facts = replica.wait_ready(max(1.0, ends_at - time.monotonic()))
                check_facts(replica.name, facts, self._vocab_size, self._longest, self._rollout)
                replica.check_tokenizer(
                    lambda text: self._tokenizer.encode(text, add_special_tokens=False), self._probes()
                )
                if self.speculation is not None:
                    self.speculation.hand_over(replica, max(1.0, ends_at - time.monotonic()))
            except ReplicaLost as error:
                if not replica.ours or time.monotonic() >= ends_at:
                    raise EngineError(with_memory_advice(f"{error}")) from error
                self._why_lost = f"{error}"
                self._unready.pop(0)
                self._restart([replica])
                continue
            except RequestRefused as error:
                raise ConfigError(f"{error}") from error
            self._unready.pop(0)

    def _probes(self) -> list[str]:
        """Return two texts to which two different tokenizers would hardly give the same token ids."""
        ids = range(0, self._vocab_size, max(1, self._vocab_size // 100))
        return [
            self._tokenizer.decode(list(ids), skip_special_tokens=True),
            "What is 17 * 23? Größe, 東京, ∑x²\n\tdef f(x): return x",
        ]

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Send the weights to the replicas that this rank drives. Failures of engines are in the report, not raised.

        tensors: (Hugging Face name, tensor) pairs.
        """
        behind = [x for x in self._present if x.weight_version != version] if self._drives else []
        report = self._sync.deliver(tensors, version, behind, in_flight=self._in_flight)
        if report.failed:
            self._why_lost = "; ".join(report.failed.values())
        return report

    def take_report(self, version: int, failed: Collection[str], lost: Collection[str]) -> None:
        """Record which replicas hold the new weights after a sync, and which are lost.

        failed: names of the replicas that, by any rank's report, do not hold ``version``.
        lost: names of the replicas that any rank can no longer reach.
        """
        # An engine of our own is restarted after any failure, so that half a sync needs no repair.
        with self._lock:
            # A replica that a call lost during the sync stays lost, unless it is a server or took the weights.
            still_lost = [x for x in self._lost if self._in_flight and x.ours and x.weight_version != version]
            self._lost = [
                x for x in self._replicas if x in still_lost or x.name in lost or (x.ours and x.name in failed)
            ]
        for replica in self._present:
            replica.weight_version = NO_WEIGHTS if replica.name in failed else version
        if not failed:
            self._delivered = version

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int | Sequence[int],
        *,
        temperature: float | None = None,
        max_tokens: Sequence[int] | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Rollout]:
        """Return the rollouts of all prompts (see ``Engine.generate``).

        Raises EngineLost, with the finished groups, if no replica is left for the others.
        """
        sizes = group_sizes(prompts, samples_per_prompt)
        bounds = token_bounds(prompts, max_tokens, self._rollout.max_response_tokens, self._longest)
        call = self._begin(bool(prompts))
        used_temperature = self._rollout.temperature if temperature is None else temperature
        requests = [
            rollout_request(
                f"{self._rank}-{call.number}-{i}",
                prompt,
                sizes[i],
                seed=sample_seed(self._seed, prompt.prompt_id, 0, call.version, prompt.attempt),
                temperature=used_temperature,
                max_tokens=bounds[i],
                stop_ids=self._stop_ids,
            )
            for i, prompt in enumerate(prompts)
        ]
        prompt_indices = {request.request_id: index for index, request in enumerate(requests)}
        rollouts: dict[int, list[Rollout]] = {}
        ends = None if temperature is not None else self._early_ends(requests, prompts)

        def finish(request_id: str, completions: Sequence[Completion]) -> None:
            index = prompt_indices[request_id]
            if ends is not None:
                completions = ends.cut(request_id, completions)
            rollouts[index] = self._answers.rollouts(prompts[index], completions, sizes[index], self._stop_ids)
            if self.speculation is not None:
                self.speculation.note(prompts[index].token_ids, completions)
            if on_finished is not None:
                on_finished(index, rollouts[index])

        if ends is None:
            self._run(call, requests, finish, rollouts)
        else:
            with contextlib.closing(ends):
                self._run(call, [dataclasses.replace(x, watch=ends) for x in requests], finish, rollouts)
        return [rollout for index in range(len(prompts)) for rollout in rollouts[index]]

    def _early_ends(self, requests: Sequence[GenerateRequest], prompts: Sequence[Prompt]) -> EarlyEnds | None:
        """Return the object that ends the samples of a call early; None if they end by themselves."""
        if self.early_end is None or not prompts:
            return None
        from megatron_rl.rollout.vllm.early_ends import EarlyEnds

        return EarlyEnds(self.early_end, {x.request_id: y for x, y in zip(requests, prompts, strict=True)})

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        call = self._begin(bool(requests))
        named = {f"{self._rank}-{call.number}-{i}": request for i, request in enumerate(requests)}
        results: dict[str, SampleResult] = {}

        def finish(request_id: str, completions: Sequence[Completion]) -> None:
            results[request_id] = self._answers.result(named[request_id], completions)
            if self.speculation is not None:
                self.speculation.note(named[request_id].token_ids, completions)

        self._run(call, [generate_request(name, x) for name, x in named.items()], finish, {})
        return [results[name] for name in named]

    def _begin(self, asks: bool) -> _Call:
        """Return the engine's state at the beginning of a call. ``asks``: whether the call has requests to send.

        Without requests no error is raised. Raises EngineLost if no replica is left, or if one is
        lost and ``in_flight`` is off. Raises RuntimeError if the replicas hold no complete set of
        weights.
        """
        version, restarts, lives, lost = self.weight_version, self._restarts, self._lives.copy(), self._lost
        present = [x for x in self._present if x not in lost]
        if version == NO_WEIGHTS and self._in_flight:
            version = self._delivered  # an update is under way, and ``dispatch`` finds the usable replicas
        if asks and (not present or (lost and not self._in_flight)):
            raise EngineLost(with_memory_advice(self._why_lost), finished={})
        if asks and version == NO_WEIGHTS:
            raise RuntimeError(
                "VllmEngine.generate: the engines hold no complete set of weights; call load_weights first"
            )
        return _Call(number=next(self._calls), version=version, present=present, restarts=restarts, lives=lives)

    def _run(
        self,
        call: _Call,
        requests: Sequence[GenerateRequest],
        finish: Callable[[str, Sequence[Completion]], None],
        rollouts: Mapping[int, list[Rollout]],
    ) -> None:
        """Send a call's requests to the replicas, and wait for all answers.

        finish: called with a request's id and its completions as soon as they arrive.
        rollouts: a prompt's position in the call → its finished group, as ``finish`` fills it.

        Raises EngineLost, with ``rollouts``, if requests are left without an answer.
        """
        result = dispatch(
            requests,
            call.present,
            weight_version=call.version,
            deadline_s=self._rollout.request_s,
            max_in_flight=self._rollout.max_requests,
            attempts=self._rollout.max_restarts + 1,
            rotation=self._rank,
            on_finished=finish,
        )
        for name, cause in result.down.items():
            log.warning("%s: %s", name, cause)
        # Replicas that were recovered after this call began are not lost.
        self._note_lost([x for x in call.present if x.name in result.down and self._lives[id(x)] == call.lives[id(x)]])
        why = "; ".join(dict.fromkeys(result.down.values()))
        if result.down:
            self._why_lost = why
        if result.lost:
            raise EngineLost(with_memory_advice(why), finished=rollouts)
        with self._lock:
            if self._restarts == call.restarts:  # no restart after this call began
                self._restarts = 0

    def readings(self) -> Sequence[EngineReading]:
        """Return the current state of each engine of this rank, for the metrics. A server's load is not included.

        The server's own /metrics shows its load.
        """
        from megatron_rl.rollout.vllm.readings import reading_of

        away = {id(x) for x in (*self._lost, *self._unready)}
        return [
            reading_of(
                replica,
                number,
                is_up=id(replica) not in away and replica.name not in self._absent,
                restarts=self._lives[id(replica)],
            )
            for number, replica in enumerate(self._replicas)
        ]

    def sleep(self) -> None:
        """Free the engines' GPU memory by dropping weights, keys and values. The next sync sends the weights again.

        Sleep level 2 keeps the model's buffers and a drafter's weights alone (vLLM 0.32.0, gpu_worker.py).
        """
        self._everywhere("sleep", {"level": 2})
        for replica in self._replicas:
            replica.weight_version = NO_WEIGHTS
        self._delivered = NO_WEIGHTS

    def wake(self, *, tags: Sequence[str]) -> None:
        """Give sleeping engines GPU memory again. ``tags``: "weights" before a sync, "kv_cache" before generating."""
        self._everywhere("wake", {"tags": list(tags)})
        if "weights" in tags and self._rollout.speculation in WEIGHT_DRAFTERS:
            self._everywhere("weights_received", {})

    def _everywhere(self, method: str, arguments: Mapping[str, object]) -> None:
        """Call a control method of every replica that this rank drives, except replicas that still start or are lost.

        One that fails, does not answer, or whose drafter was spoiled is lost and ended, and started by ``recover``.
        """
        for replica in [x for x in self._replicas if self._drives and x not in self._unready and x not in self._lost]:
            try:
                answer = replica.control(method, arguments, self._sync.deadline_s)
                if method == "weights_received":
                    check_drafters(replica.name, answer)
            except (ReplicaLost, RequestRefused) as error:
                self._why_lost = f"{error}"
                log.warning("%s is ended: %s", replica.name, error)
                self._note_lost([replica])
                replica.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for replica in self._replicas:
            self._sync.forget(replica)
            replica.close()
        self._sync.free()
