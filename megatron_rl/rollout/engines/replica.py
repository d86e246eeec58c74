"""The interface ``Replica`` of one running vLLM engine, either a process that this run starts or a server.

This module does not import vLLM. The two kinds of replicas are in
``rollout/vllm/process_replica.py`` and ``rollout/vllm/server_replica.py``.
``rollout/vllm/dispatch.py`` spreads requests over replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megatron_rl.config import RolloutConfig
from megatron_rl.errors import ConfigError

UPDATING = -2  # a replica's weight_version during an update in flight, while requests wait in the engine
OLDEST_VLLM = (0, 32)  # has weight transfer in four calls and weight versions on tokens; older releases were not run


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Requests ``n`` samples of one prompt at once, so that they share the prompt's keys and values.

    request_id: unique among the requests that are under way.
    temperature: 0 for greedy (then n must be 1).
    seed: the seed of sample 0, below 2^62; sample k draws with seed + k (vLLM,
        v1/engine/parallel_sampling.py, 0.32.0).
    stop_token_ids: the only tokens that end a completion before ``max_tokens``. The engine's own
        end of sequence is switched off.
    top_k: only the top_k most likely tokens are drawn; 0: all.
    top_p: only the most likely tokens with this total probability are drawn; 1: all.
    prompt_logprobs: whether the first completion carries the log-probs of the prompt's tokens.
    watch: takes the tokens of the running samples; None: only whole samples are answered. An engine
        in a process of this rank can tell them, a server cannot.
    """

    request_id: str
    token_ids: tuple[int, ...]
    n: int
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: tuple[int, ...]
    top_k: int = 0
    top_p: float = 1.0
    prompt_logprobs: bool = False
    watch: Watch | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """Holds one sample as the engine returned it, not checked yet.

    token_ids: int64 [T], with the stop token.
    logprobs: float32, of the sampled tokens at the sampling temperature (at 1 for greedy). Its
        length is T unless the engine made an error.
    finish_reason: "stop", "length", "decided" (ended early), or the engine's word for an aborted
        sample ("abort", "error").
    weight_versions: (version, number of tokens) pairs in the order of the tokens. () if the engine
        reports no versions.
    prompt_logprobs: float32 [prompt tokens], NaN at the first. None if not requested.
    routed_experts: [tokens, layers, top_k] (see rollout/vllm/routed_experts.py). None if the engine
        returns none.
    drafts: (drafted tokens, accepted ones). A vLLM server reports none.
    cached_tokens: the prompt's tokens whose keys and values the engine had, as the request's last
        sample found them. A vLLM server reports none.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    weight_versions: tuple[tuple[int, int], ...]
    prompt_logprobs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    drafts: tuple[int, int] = (0, 0)
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """Holds the facts that an engine reports when it is connected. An optional fact is None if it is not reported.

    max_model_tokens: the maximum of tokens of a prompt and its response together.
    logprobs_mode: vLLM's setting of this name.
    routed_experts: whether the engine returns the experts of each token.
    """

    vllm_version: str
    vocab_size: int
    max_model_tokens: int
    logprobs_mode: str
    dtype: str | None = None
    routed_experts: bool = False


def check_facts(name: str, facts: ReplicaFacts, vocab_size: int, longest: int, rollout: RolloutConfig) -> None:
    """Raise ConfigError for an engine that cannot serve this run.

    name: the engine's name, for messages.
    vocab_size: the vocabulary size of the trainer's model.
    longest: the maximum of tokens of a prompt and its response together.
    """
    release = tuple(int(part) for part in facts.vllm_version.split(".")[:2])
    if release < OLDEST_VLLM:
        raise ConfigError(
            f"{name} is vLLM {facts.vllm_version}; megatron_rl needs {'.'.join(map(str, OLDEST_VLLM))} or newer"
        )
    if facts.logprobs_mode != "processed_logprobs":
        raise ConfigError(
            f"{name} runs with --logprobs-mode {facts.logprobs_mode}, whose log-probs are not of the distribution "
            "that it samples from; start it with --logprobs-mode processed_logprobs"
        )
    if facts.vocab_size != vocab_size:
        raise ConfigError(
            f"{name} serves a model of {facts.vocab_size} tokens and the trainer's has {vocab_size}; start it on the "
            "folder that model.hf_path names"
        )
    if facts.max_model_tokens < longest:
        raise ConfigError(
            f"{name} takes {facts.max_model_tokens} tokens (--max-model-len) and a prompt and its response may have "
            f"{longest} (data.max_prompt_tokens + rollout.max_response_tokens); raise --max-model-len, or lower "
            "data.max_prompt_tokens or rollout.max_response_tokens"
        )
    if rollout.routing_replay == "rollout" and not facts.routed_experts:
        raise ConfigError(
            f"{name} is vLLM {facts.vllm_version} without --enable-return-routed-experts, and "
            "rollout.routing_replay=rollout replays the experts that it returns; start it with that, or set "
            "rollout.routing_replay=old_logprobs or off"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReceipt:
    """Holds what weights an engine's worker has after a sync: version, checksum and number of tensors.

    failure: why the worker has no whole set of weights; empty if it has one.
    drafter: of a drafter with weights of its own, its folder (``model``) and the checksums of these
        weights at the engine's start (``loaded``) and now (``held``); else {}.
    """

    version: int
    checksum: str
    num_tensors: int
    failure: str = ""
    drafter: Mapping[str, str] = field(default_factory=dict, compare=False)


class ReplicaLost(RuntimeError):
    """Raised if the engine is gone, missed a deadline, or aborted a request. Any engine may get the request again."""


def check_drafters(name: str, receipts: Sequence[Mapping[str, object]]) -> None:
    """Raise ReplicaLost if a worker's drafter has other weights than at the engine's start: no sync may write them.

    name: the engine's name, for messages.
    receipts: each worker's fields of a ``WeightReceipt``.
    """
    for worker, receipt in enumerate(receipts):
        drafter = WeightReceipt(**receipt).drafter
        if drafter and drafter["held"] != drafter["loaded"]:
            raise ReplicaLost(
                f"worker {worker} of {name} has other weights of the drafter {drafter['model']} than it loaded: their "
                f"checksum was {drafter['loaded']} and is {drafter['held']}; a sync or a sleep spoiled them"
            )


class RequestRefused(RuntimeError):
    """Raised if the engine will never serve a request or update.

    Causes are a prompt that is too long, a token outside the vocabulary, or a wrong key.
    """


class Watched(Protocol):
    """An engine as a ``Watch`` sees it. Raises ReplicaLost if the engine is gone."""

    def end_sample(self, request_id: str, sample: int) -> None:
        """Have the engine end a sample of a request under way. Its finish_reason becomes "decided"."""
        ...

    def fail(self, request_id: str, error: BaseException) -> None:
        """End a request under way with an error, which its future raises."""
        ...


class Watch(Protocol):
    """Takes the tokens of a request's running samples while the engine computes.

    every_tokens: the engine tells a sample's tokens whenever it has this many more, or a multiple.
    """

    every_tokens: int

    def told(self, engine: Watched, request_id: str, sample: int, start: int, token_ids: np.ndarray) -> None:
        """Take a sample's tokens from place ``start`` of its response on, without waiting.

        After a restart of the request the tokens begin at ``start`` = 0 again.
        """
        ...


class Replica(Protocol):
    """Drives one engine. Thread-safe; every wait has a deadline. Raises ReplicaLost and RequestRefused.

    ours: whether this run started the engine, so that ``restart`` and ``close`` end it.
    name: the engine's URL or process id, for messages.
    weight_version: the last known version of the engine's weights. NO_WEIGHTS before the first sync
        and after a failed one. During a sync: UPDATING if ``weight_sync.in_flight`` lets generation
        go on, else NO_WEIGHTS.
    progressed_at: time.monotonic() when the engine last reported that it computes; −inf: never
        reported.
    """

    ours: bool
    name: str
    weight_version: int
    progressed_at: float

    def start(self) -> None:
        """Begin to start the engine's process, or to connect to the server. Return at once."""
        ...

    def wait_ready(self, timeout_s: float) -> ReplicaFacts:
        """Wait until the engine serves, and return its facts. Raises ReplicaLost if that takes over ``timeout_s``."""
        ...

    def check_tokenizer(self, encode: Callable[[str], list[int]], texts: Sequence[str]) -> None:
        """Raise RequestRefused if the engine's tokenizer encodes one of the texts differently from the trainer's.

        An engine without a tokenizer passes. ``encode``: a callable from a text to the trainer's
        token ids.
        """
        ...

    def submit(self, request: GenerateRequest) -> Future[list[Completion]]:
        """Send a request without waiting. The future gets ``n`` completions in the order of samples, or the error."""
        ...

    def abort(self, request_id: str) -> None:
        """Give up a request. Its future is ignored: it may still end with completions or an error."""
        ...

    def control(self, method: str, arguments: Mapping[str, object], timeout_s: float) -> object:
        """Call a control method by name and return its answer. Arguments and answer are JSON values.

        The methods are init_weight_transfer, start_weight_update, update_weights,
        finish_weight_update, weights_received, use_adapter, reset_prefix_cache, sleep, wake, pause
        and resume. ``pause`` keeps the requests under way, and nothing is sampled until ``resume``.
        If reset_prefix_cache gets the argument ``running`` as True, the requests under way compute
        their keys and values again.
        """
        ...

    def give_up(self, cause: str) -> None:
        """End all requests under way with ReplicaLost, after an update in flight has failed. Raises nothing.

        A server, which was paused for the update, is resumed. An engine that this run started is
        not, since the caller restarts it.

        cause: the failure, for the error.
        """
        ...

    def restart(self) -> None:
        """If this run started the engine (``ours``), end it and start it again. All weights must then be sent again."""
        ...

    def close(self) -> None:
        """End the engine if this run started it (``ours``). Closing twice is harmless."""
        ...
