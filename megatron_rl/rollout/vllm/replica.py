"""What one running vLLM engine offers, whether a process of our own or a server: requests in, completions out, and
weights.

Nothing here imports vLLM; ``rollout/vllm/process_replica.py`` and ``rollout/vllm/server_replica.py`` are the two kinds,
``rollout/vllm/dispatch.py`` spreads requests over them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

UPDATING = -2  # a replica's weight_version while weights reach it in flight: what is asked of it meanwhile waits there
OLDEST_VLLM = (0, 32)  # weight transfer in four calls, weight versions on tokens; older ones were not run


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt, sampled ``n`` times in one request, so that its samples share the prompt's keys and values.

    request_id:     unique among the requests that are under way.
    temperature:    0 for greedy (then n must be 1).
    seed:           of sample 0, below 2^62; sample k draws with seed + k (vLLM, v1/engine/parallel_sampling.py,
    0.32.0).
    stop_token_ids: the only tokens that end a completion before ``max_tokens``; the engine's own end of sequence is
    switched off.
    """

    request_id: str
    token_ids: tuple[int, ...]
    n: int
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One sample as the engine gave it, not checked yet.

    token_ids:       [T] int64, the stop token included.
    logprobs:        [T'] float32 of the sampled tokens at the sampling temperature (at 1 for greedy); T' = T unless the
                     engine erred.
    finish_reason:   "stop", "length", or what the engine says of one that it broke off ("abort", "error").
    weight_versions: (version, tokens) in order: the weights that produced so many tokens; () where the engine does not
    say.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    weight_versions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """What an engine says of itself when it is connected. None: it does not say."""

    vllm_version: str
    vocab_size: int
    max_model_tokens: int
    logprobs_mode: str
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReceipt:
    """What every worker of an engine says it holds after a sync."""

    version: int
    checksum: str
    num_tensors: int


class ReplicaLost(RuntimeError):
    """The engine is gone, does not answer in time, or broke a request off: what it owed is issued again, there or
    elsewhere."""


class RequestRefused(RuntimeError):
    """The engine will never serve this request or update (a prompt too long, a token outside its vocabulary, a wrong
    key)."""


class Replica(Protocol):
    """One engine. Thread-safe; every wait has a deadline. Errors: ReplicaLost, RequestRefused."""

    ours: bool  # whether restart() ends it
    name: str  # for messages: the URL, or the process id
    # what this side knows it to hold; NO_WEIGHTS before, during and after a failed sync, UPDATING during one in flight
    weight_version: int

    def start(self) -> None:
        """Begins to start or to connect; returns at once."""
        ...

    def wait_ready(self, timeout_s: float) -> ReplicaFacts:
        """Waits until it serves. Raises ReplicaLost, saying what to do, where it does not come up in time."""
        ...

    def check_tokenizer(self, encode: Callable[[str], list[int]], texts: Sequence[str]) -> None:
        """Raises RequestRefused where it would encode a text otherwise than the trainer; nothing for an engine without
        a tokenizer."""
        ...

    def submit(self, request: GenerateRequest) -> Future[list[Completion]]:
        """Under way at once; the future holds ``n`` completions by sample index, or the error."""
        ...

    def abort(self, request_id: str) -> None:
        """Gives a request up; its future may still end either way and is not looked at."""
        ...

    def control(self, method: str, arguments: Mapping[str, object], timeout_s: float) -> object:
        """One of: init_weight_transfer, start_weight_update, update_weights, finish_weight_update, reset_prefix_cache,
        weights_received, sleep, wake, pause, resume. JSON in, JSON out.

        ``pause`` keeps what is under way, and nothing is sampled until ``resume``; reset_prefix_cache with ``running``
        set makes what is under way compute its keys and values again.
        """
        ...

    def give_up(self, cause: str) -> None:
        """After an update in flight that failed: what is under way ends, ReplicaLost here, and a server goes on
        serving; one of ours is restarted anyway. Raises nothing."""
        ...

    def restart(self) -> None:
        """Ends it where it is ours to end, and starts it again; its weights are those of its files then
        (``weight_version`` says so)."""
        ...

    def close(self) -> None:
        """Ends what is ours. Closing twice is harmless."""
        ...
