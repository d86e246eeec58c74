"""Engine (see rollout/engines/engine.py) over vLLM: this rank's prompts are spread over its replicas.

A replica is a process of the run's own or a server. A request is a prompt with all its samples, so
that they share the prompt's keys and values; its seed is that of sample 0. Greedy log-probs are
vLLM's, at temperature 1, while the Transformers engine's are at the sampling temperature; nothing
trains on greedy samples.
"""

from __future__ import annotations

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

from megatron_rl.config import RolloutConfig
from megatron_rl.errors import ConfigError, EngineError
from megatron_rl.rollout.engines.engine import NO_WEIGHTS, EngineLost, OnFinished, SyncReport, sample_seed, token_bounds
from megatron_rl.rollout.engines.replica import (
    UPDATING,
    Completion,
    GenerateRequest,
    Replica,
    ReplicaLost,
    RequestRefused,
    check_facts,
)
from megatron_rl.rollout.engines.sampling import SEED_BITS, SampleRequest, SampleResult
from megatron_rl.rollout.vllm.answers import Answers, generate_request
from megatron_rl.rollout.vllm.dispatch import dispatch
from megatron_rl.rollout.weight_sync.sender import WeightSender
from megatron_rl.types import Prompt, Rollout

if TYPE_CHECKING:
    from megatron_rl.observability.prometheus.live import EngineReading

log = logging.getLogger(__name__)
PROBE_S = 0.6  # for a lost server, while other servers do its work
MEMORY_WORDS = ("out of memory", "allocate memory", "exit code -9", "bad_alloc", "MemoryError") + (
    "could not create a primitive",  # oneDNN's on a CPU, for a kernel that found no memory for itself
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    """Holds what one call goes by: the state of the engine when it began."""

    number: int
    version: int
    present: Sequence[Replica]
    restarts: int
    lives: Mapping[int, int]


class VllmEngine:
    """Generates with this rank's replicas; a driver also sends them weights and restarts them.

    replicas: those that get its prompts, none on a rank without an engine of its own.
    drives: whether it sends them weights and restarts them (a server has many clients and one
        driver).

    With ``in_flight`` one thread may generate while another one (the main thread) does all the
    rest. A call then takes tokens of the version that was whole when it began, and of newer ones;
    both threads write under a lock.
    """

    is_elsewhere = True

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
        """Start or connect the replicas; ``recover`` waits for them.

        longest: the most tokens of a prompt and its response together.
        in_flight: whether ``load_weights`` may come while ``generate`` is under way.
        start_late: whether the first ``recover`` starts them: on a GPU that the trainer still
            fills, vLLM finds too little free memory, or takes another's for its own
            (v1/worker/utils.py, request_memory; 0.32.0).
        """
        self._replicas, self._sync, self._tokenizer, self._rollout = list(replicas), sync, tokenizer, rollout
        self._seed, self._stop_ids, self._vocab_size, self._longest = seed, tuple(stop_ids), vocab_size, longest
        self._answers = Answers(tokenizer, vocab_size, needs_experts=rollout.routing_replay == "rollout")
        self._drives, self._rank, self._in_flight = drives, rank, in_flight
        self._unready = list(self._replicas)
        self._lost: list[Replica] = []  # a new list at every change, so that one may be read without the lock
        self._lock = threading.Lock()
        self._lives: Counter[int] = Counter()  # number of recoveries by a replica's id
        self._delivered = NO_WEIGHTS  # the latest version that all replicas had
        self._absent: set[str] = set()  # servers that the run does without for now
        self._restarts = 0
        self._why_lost = ""  # the latest loss, in an engine's words
        self._closed = False
        self._calls = itertools.count(1)
        self._started = False
        if not start_late:
            self._start()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            for replica in self._replicas:
                replica.start()

    @property
    def weight_version(self) -> int:
        """Return the version that all serving replicas hold; NO_WEIGHTS where they differ or one is not ready.

        A rank without a replica gives the version that all replicas had after the latest sync.
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
        """Wait for engines that start, restart our lost ones, and return the names of the servers left out.

        A lost server is somebody else's to restart, and left out for as long as others serve.
        Raises EngineError after too many restarts in a row.
        """
        mended = [x for x in self._lost if x.name in lost or not self._in_flight]  # none lost meanwhile
        self._start()
        self._await()
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
        """Return texts that two tokenizers hardly encode alike by chance: words of this vocabulary, and a mixture."""
        ids = range(0, self._vocab_size, max(1, self._vocab_size // 100))
        return [
            self._tokenizer.decode(list(ids), skip_special_tokens=True),
            "What is 17 * 23? Größe, 東京, ∑x²\n\tdef f(x): return x",
        ]

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Send the weights to the replicas that this rank drives; an engine's failure is reported, never raised."""
        behind = [x for x in self._present if x.weight_version != version] if self._drives else []
        report = self._sync.deliver(tensors, version, behind, in_flight=self._in_flight)
        if report.failed:
            self._why_lost = "; ".join(report.failed.values())
        return report

    def take_report(self, version: int, failed: Collection[str], lost: Collection[str]) -> None:
        """Record the joint report of all ranks' drivers, by the replicas' names."""
        # an engine of ours is started anew after any failure: simpler than to reason about half a sync
        with self._lock:
            # replicas that a call lost during the sync stay lost; a server that took the weights lives
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
        samples_per_prompt: int,
        *,
        temperature: float | None = None,
        max_tokens: Sequence[int] | None = None,
        on_finished: OnFinished | None = None,
    ) -> list[Rollout]:
        """Do as ``Engine.generate``; raise EngineLost, with the finished rollouts, where no replica is left."""
        bounds = token_bounds(prompts, samples_per_prompt, max_tokens, self._rollout.max_response_tokens, self._longest)
        call = self._begin(bool(prompts))
        used_temperature = self._rollout.temperature if temperature is None else temperature
        requests = [
            self._request(f"{call.number}-{i}", prompt, samples_per_prompt, call.version, used_temperature, bounds[i])
            for i, prompt in enumerate(prompts)
        ]
        prompt_indices = {request.request_id: index for index, request in enumerate(requests)}
        rollouts: dict[int, list[Rollout]] = {}

        def finish(request_id: str, completions: Sequence[Completion]) -> None:
            index = prompt_indices[request_id]
            rollouts[index] = self._answers.rollouts(prompts[index], completions, samples_per_prompt, self._stop_ids)
            if on_finished is not None:
                on_finished(index, rollouts[index])

        self._run(call, requests, finish, rollouts)
        return [rollout for index in range(len(prompts)) for rollout in rollouts[index]]

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        call = self._begin(bool(requests))
        named = {f"{self._rank}-{call.number}-{i}": request for i, request in enumerate(requests)}
        results: dict[str, SampleResult] = {}

        def finish(request_id: str, completions: Sequence[Completion]) -> None:
            results[request_id] = self._answers.result(named[request_id], completions)

        self._run(call, [generate_request(name, x) for name, x in named.items()], finish, {})
        return [results[name] for name in named]

    def _begin(self, asks: bool) -> _Call:
        """Return what a call goes by; raise EngineLost or RuntimeError where it asks for something and cannot run."""
        version, restarts, lives, lost = self.weight_version, self._restarts, self._lives.copy(), self._lost
        present = [x for x in self._present if x not in lost]
        if version == NO_WEIGHTS and self._in_flight:
            version = self._delivered  # an update is under way; dispatch finds the replicas that can be used
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
        """Have the replicas answer requests; raise EngineLost, with ``rollouts``, where no replica is left."""
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
        # a replica that was recovered since this call began lives again
        self._note_lost([x for x in call.present if x.name in result.down and self._lives[id(x)] == call.lives[id(x)]])
        why = "; ".join(dict.fromkeys(result.down.values()))
        if result.down:
            self._why_lost = why
        if result.lost:
            raise EngineLost(with_memory_advice(why), finished=rollouts)
        with self._lock:
            if self._restarts == call.restarts:  # none since this call began
                self._restarts = 0

    def _request(
        self, number: str, prompt: Prompt, samples: int, version: int, temperature: float, max_tokens: int
    ) -> GenerateRequest:
        seed = sample_seed(self._seed, prompt.prompt_id, 0, version, prompt.attempt) & ((1 << SEED_BITS) - 1)
        return GenerateRequest(
            request_id=f"{self._rank}-{number}",
            token_ids=prompt.token_ids,
            n=samples if temperature else 1,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=self._stop_ids,
        )

    def readings(self) -> Sequence[EngineReading]:
        """Return what is known of this rank's engines; of a server, whose /metrics says the rest, whether it serves."""
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
        """Give the GPU back: weights, keys and values are dropped, and the next sync brings the weights again.

        Level 1 would copy them to the host and back; level 2 keeps the model's buffers (vLLM
        0.32.0, gpu_worker.py).
        """
        self._everywhere("sleep", {"level": 2})
        for replica in self._replicas:
            replica.weight_version = NO_WEIGHTS
        self._delivered = NO_WEIGHTS

    def wake(self, *, tags: Sequence[str]) -> None:
        """Wake the engines: tag ``weights`` before a sync, ``kv_cache`` before generating."""
        self._everywhere("wake", {"tags": list(tags)})

    def _everywhere(self, method: str, arguments: Mapping[str, object]) -> None:
        """Call a control method of every replica driven here; one that still starts is awake when it serves.

        A replica that does not answer, or fails at it, is lost: it is ended, so that its memory is
        free, and the next sync starts it again on all ranks.
        """
        for replica in [x for x in self._replicas if self._drives and x not in self._unready and x not in self._lost]:
            try:
                replica.control(method, arguments, self._sync.deadline_s)
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


def with_memory_advice(why: str) -> str:
    """Return an engine's words, with the settings that lower its memory added where they speak of memory."""
    if any(word in why for word in MEMORY_WORDS):
        return (
            f"{why}\nThis looks like too little memory: lower rollout.gpu_memory_utilization, "
            "rollout.max_requests or rollout.vllm.max_num_seqs"
        )
    return why
