"""Replica: the interface of one running vLLM engine, whether a process of our own or a server.

Nothing here imports vLLM; ``rollout/vllm/process_replica.py`` and
``rollout/vllm/server_replica.py`` are the two kinds, ``rollout/vllm/dispatch.py`` spreads requests
over them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_rl.config import RolloutConfig
from megatron_rl.errors import ConfigError

UPDATING = -2  # a replica's weight_version while weights reach it in flight; requests to it wait there meanwhile
OLDEST_VLLM = (0, 32)  # weight transfer in four calls, weight versions on tokens; older ones were not run


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Asks for ``n`` samples of one prompt in one request, so that they share the prompt's keys and values.

    request_id: unique among the requests that are under way.
    temperature: 0 for greedy (then n must be 1).
    seed: of sample 0, below 2^62; sample k draws with seed + k (vLLM,
        v1/engine/parallel_sampling.py, 0.32.0).
    stop_token_ids: the only tokens that end a completion before ``max_tokens``; the engine's own
        end of sequence is switched off.
    top_k: the most likely tokens that are drawn from; 0: all. top_p: their share of probability; 1:
        all.
    prompt_logprobs: whether the first completion brings the log-probs of the prompt's tokens.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """Holds one sample as the engine gave it, not checked yet.

    token_ids: [T] int64, the stop token included.
    logprobs: [T'] float32 of the sampled tokens at the sampling temperature (at 1 for greedy); T' =
        T unless the engine erred.
    finish_reason: "stop", "length", or the engine's word for a sample that it broke off ("abort",
        "error").
    weight_versions: (version, tokens) in order: the weights that produced so many tokens; () if the
        engine names none.
    prompt_logprobs: float32 [prompt], NaN at its first token; None where they were not asked for.
    routed_experts: [tokens, layers, top_k], see rollout/vllm/routed_experts.py; None where the
        engine returns none.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    weight_versions: tuple[tuple[int, int], ...]
    prompt_logprobs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """Holds the facts that an engine states when it is connected; None for one that it does not state.

    routed_experts: whether it returns the experts of each token.
    """

    vllm_version: str
    vocab_size: int
    max_model_tokens: int
    logprobs_mode: str
    dtype: str | None = None
    routed_experts: bool = False


def check_facts(name: str, facts: ReplicaFacts, vocab_size: int, longest: int, rollout: RolloutConfig) -> None:
    """Raise ConfigError for an engine that cannot serve this run.

    name: the engine's, for messages. vocab_size: the trainer's. longest: the most tokens of a
        prompt and its response.
    """
    release = tuple(int(part) for part in facts.vllm_version.split(".")[:2])
    if release < OLDEST_VLLM:
        raise ConfigError(
            f"{name} is vLLM {facts.vllm_version}; megatron_rl needs {'.'.join(map(str, OLDEST_VLLM))} or newer"
        )
    if facts.logprobs_mode != "processed_logprobs":
        raise ConfigError(
            f"{name} runs with --logprobs-mode {facts.logprobs_mode}, whose log-probs are not those it samples by; "
            "start it with --logprobs-mode processed_logprobs"
        )
    if facts.vocab_size != vocab_size:
        raise ConfigError(
            f"{name} serves a model of {facts.vocab_size} tokens and the trainer's has {vocab_size}; start it on the "
            "folder that model.hf_path names"
        )
    if facts.max_model_tokens < longest:
        raise ConfigError(
            f"{name} takes {facts.max_model_tokens} tokens (--max-model-len) and a prompt and its response may have "
            f"{longest} (data.max_prompt_tokens + rollout.max_response_tokens); raise the one or lower the others"
        )
    if rollout.routing_replay == "rollout" and not facts.routed_experts:
        raise ConfigError(
            f"{name} is vLLM {facts.vllm_version} without --enable-return-routed-experts, and "
            "rollout.routing_replay=rollout replays the experts that it returns; start it with that, or set "
            "rollout.routing_replay=old_logprobs or off"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReceipt:
    """Describes the weights that each worker of an engine says it holds after a sync, or why it holds none."""

    version: int
    checksum: str
    num_tensors: int
    failure: str = ""


class ReplicaLost(RuntimeError):
    """Raised where the engine is gone, late, or broke a request off; the request is issued again, to any engine."""


class RequestRefused(RuntimeError):
    """Raised where the engine will never serve a request or update.

    Causes: a prompt too long, a token outside its vocabulary, a wrong key.
    """


class Replica(Protocol):
    """Drives one engine. Thread-safe; every wait has a deadline. Errors: ReplicaLost, RequestRefused."""

    ours: bool  # whether restart() ends it
    name: str  # for messages: the URL, or the process id
    # the version that it holds, as known here; NO_WEIGHTS before, during and after a failed sync,
    # UPDATING in flight
    weight_version: int
    # time.monotonic() when it was last known to compute for its requests; −inf where it has never said so
    progressed_at: float

    def start(self) -> None:
        """Begin to start or to connect, and return at once."""
        ...

    def wait_ready(self, timeout_s: float) -> ReplicaFacts:
        """Wait until it serves; raise ReplicaLost, with the way out, where it does not come up in time."""
        ...

    def check_tokenizer(self, encode: Callable[[str], list[int]], texts: Sequence[str]) -> None:
        """Raise RequestRefused where the engine's tokenizer, if it has one, differs from the trainer's on a text."""
        ...

    def submit(self, request: GenerateRequest) -> Future[list[Completion]]:
        """Start a request at once; the future will hold ``n`` completions by sample index, or the error."""
        ...

    def abort(self, request_id: str) -> None:
        """Give a request up; its future may still end either way and is ignored."""
        ...

    def control(self, method: str, arguments: Mapping[str, object], timeout_s: float) -> object:
        """Call a control method by name, JSON in and JSON out, and return its answer.

        The methods: init_weight_transfer, start_weight_update, update_weights,
        finish_weight_update, weights_received, use_adapter, reset_prefix_cache, sleep, wake, pause,
        resume. ``pause`` keeps the requests under way, and nothing is sampled until ``resume``;
        reset_prefix_cache with ``running`` set makes them compute their keys and values again.
        """
        ...

    def give_up(self, cause: str) -> None:
        """End all requests under way with ReplicaLost, after an update in flight that failed. Raises nothing.

        A server goes on serving; an engine of ours is restarted anyway.
        """
        ...

    def restart(self) -> None:
        """End the engine if it is ours, and start it again, with the weights of its files (see ``weight_version``)."""
        ...

    def close(self) -> None:
        """End the engine if it is ours. Closing twice is harmless."""
        ...
