"""The sections of rollouts: the engine that samples, the time at which it does so, and the sync of its weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

from megatron_rl.config.checks import Range, choose
from megatron_rl.config.environment import EndpointConfig
from megatron_rl.errors import ConfigError, quoted


@dataclass(frozen=True, kw_only=True)
class ProducerConfig:
    """Sets how far rollouts are generated ahead of training (docs/async.md).

    `streaming` handles a rollout in parts: a part is scored and passed for log-probs while the rest is generated. In
    every mode log-prob passes are cut at these parts, so no mode changes a result at `max_staleness_steps: 0`. A
    rollout that would be staler than the bound is not started. Groups that are too old all the same are dropped, and
    their prompts asked again.
    """

    mode: str = "sync"
    """`sync`: no rollout ahead; `prefetch`: ahead, while others train; `streaming`: ahead too, scored in parts."""
    prefetch_rollouts: Annotated[int, Range(0, 1000)] = 1
    """Rollouts that are generated ahead of the rollout in training."""
    min_groups: Annotated[int, Range(1, 10**6)] | None = None
    """Groups in a part of a rollout: a part is scored and passed for log-probs by itself; null: one part."""
    max_staleness_steps: Annotated[int, Range(0)] | None = None
    """Most optimizer steps from a token's weights to its rollout's first step; null: set by `prefetch_rollouts`."""
    straggler_share: Annotated[float, Range(0, 0.5)] = 0.0
    """Share of a rollout's groups that may be unfinished when it is trained, and join the next rollout; 0: none."""

    def __post_init__(self) -> None:
        choose("rollout.producer.mode", self.mode, ("sync", "prefetch", "streaming"))
        if self.mode == "prefetch" and self.prefetch_rollouts == 0:
            raise ConfigError(
                "rollout.producer.prefetch_rollouts=0 fetches nothing ahead; set it to 1 or more, or "
                "rollout.producer.mode=sync"
            )
        if self.mode == "streaming" and self.min_groups is None:
            raise ConfigError(
                "rollout.producer.mode=streaming scores a rollout in parts, and rollout.producer.min_groups=null is "
                "one part; set it, say to an eighth of train.prompts_per_rollout"
            )

    def num_stragglers(self, prompts_per_rollout: int) -> int:
        """Return the number of groups that a rollout may leave unfinished: the share of its groups, rounded down."""
        return int(self.straggler_share * prompts_per_rollout + 1e-9)

    @property
    def ahead(self) -> int:
        """Return the number of rollouts, under way or finished, that may be ahead of the rollout in training."""
        return 0 if self.mode == "sync" else self.prefetch_rollouts


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Replaces groups without signal by groups of further prompts, before anything is trained.

    The method is DAPO's (arXiv:2503.14476, section 3.2).
    """

    max_rounds: Annotated[int, Range(0, 1000)] = 0
    """Rounds in which further prompts are asked, per rollout; 0: none."""
    on_exhausted: str = "skip"
    """For groups without signal after the last round: `skip` drops them as usual; `fail` ends the run."""
    metric: str | None = None
    """One of `reward.functions`, `reward` or `shaped`: groups equal in it are replaced too; null: see docs/async.md."""

    def __post_init__(self) -> None:
        choose("rollout.dynamic_sampling.on_exhausted", self.on_exhausted, ("skip", "fail"))


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Generates the samples, by a model in the trainer's own processes or by vLLM.

    A rollout's log-prob gap is its mean |log π_old − log μ|, over tokens for which engine and
    trainer have the same weights.
    """

    engine: str = "transformers"
    """`transformers`: in the trainer's own processes, for small models; `vllm`: see docs/vllm.md."""
    samples_per_prompt: Annotated[int, Range(1, 10**5)] = 8
    """Samples of each prompt; together they are the prompt's group."""
    max_response_tokens: Annotated[int, Range(1, 10**8)] = 256
    """Most tokens of a response, over all turns, observations included."""
    start_order: str = "drawn"
    """Order of groups: `drawn`, or `longest_first`: first the prompts whose last responses were longest."""
    temperature: Annotated[float, Range(0.01, 100)] = 1.0
    """Sampling temperature; all log-probs, of engine and trainer, are at it."""
    bitwise: bool = False
    """`transformers`: whether the trainer's layers sample, so that log-probs are equal to the bit (docs/bitwise.md)."""
    max_batch_samples: Annotated[int, Range(1, 10**6)] = 256
    """`transformers`: most samples that are decoded at once."""
    allow_large_embedded_model: bool = False
    """`transformers`: whether a model of more than 1B parameters is allowed."""
    num_engines: Annotated[int, Range(1, 10**5)] | None = None
    """`vllm`: engines that the run starts; null: one for every `rollout.tensor_parallel` ranks."""
    tensor_parallel: Annotated[int, Range(1, 10**4)] = 1
    """`vllm`: GPUs of each engine, which are its ranks' GPUs."""
    gpu_memory_utilization: Annotated[float, Range(0, 1, open_low=True)] = 0.5
    """`vllm`: share of each GPU's memory that an engine takes."""
    sleep: str = "auto"
    """`vllm`: engine and optimizer state take turns on a GPU: `auto`: if they share one; `always`; `never`."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """`vllm`: any other fields of vllm.EngineArgs, by name."""
    servers: tuple[str, ...] = ()
    """`vllm`: running servers, each `http://host:port`, in place of engines that the run starts."""
    api_key_env: str = "VLLM_API_KEY"
    """`vllm`: environment variable that holds the servers' key."""
    start_s: Annotated[float, Range(1, 10**6)] = 600.0
    """`vllm`: seconds that an engine's start may take; below `run.deadline_s`."""
    request_s: Annotated[float, Range(1, 10**6)] = 300.0
    """`vllm`: seconds that an engine with requests may go without progress; below `run.deadline_s`."""
    max_requests: Annotated[int, Range(1, 10**6)] = 256
    """`vllm`: most prompts that a rank has under way at one engine."""
    max_restarts: Annotated[int, Range(0, 10**6)] = 3
    """`vllm`: times in a row that an engine may be lost before the run ends."""
    warn_logprob_gap: Annotated[float, Range(0, 10**6)] | None = None
    """Log-prob gap of a rollout, in nats, above which the log warns; null: 0.05 in bfloat16, 0.001 in float32."""
    max_logprob_gap: Annotated[float, Range(0, 10**6, open_low=True)] | None = 0.5
    """Log-prob gap of a rollout, in nats, above which the run ends; null: never."""
    routing_replay: str = "off"
    """Experts in training: `off`: the router's; `old_logprobs`: the old log-prob pass's; `rollout`: the engine's."""
    producer: ProducerConfig = field(default_factory=ProducerConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)

    def __post_init__(self) -> None:
        choose("rollout.engine", self.engine, ("transformers", "vllm"))
        choose("rollout.sleep", self.sleep, ("auto", "always", "never"))
        choose("rollout.routing_replay", self.routing_replay, ("off", "old_logprobs", "rollout"))
        choose("rollout.start_order", self.start_order, ("drawn", "longest_first"))
        self._check_servers()

    def _check_servers(self) -> None:
        if self.servers and self.engine != "vllm":
            raise ConfigError(
                f"rollout.servers={quoted(list(self.servers))} need rollout.engine=vllm, and the engine is "
                f"{self.engine}; set rollout.engine=vllm, or remove rollout.servers"
            )
        for server in self.servers:
            parts = urlsplit(server)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
                raise ConfigError(
                    f"rollout.servers names {quoted(server)}; a server is http://host:port, without a path"
                )
        if self.servers and self.num_engines is not None:
            raise ConfigError(
                f"rollout.num_engines={self.num_engines} starts engines and "
                f"rollout.servers={quoted(list(self.servers))} are running ones; drop one"
            )


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """Sends the policy's weights to the engines.

    Under `cuda_ipc` an engine that the run started opens the bucket in the memory of the GPU that
    it shares with its rank. The trainer then uses no expandable segments.
    """

    channel: str = "auto"
    """`auto`: `cuda_ipc` on a shared GPU, else `shared_memory` on one host, `broadcast` (NCCL, gloo) across hosts."""
    interval_steps: Annotated[int, Range(1)] = 1
    """Optimizer steps that the engines' weights may lag behind before the next sync."""
    in_flight: bool = False
    """Whether weights are sent while completions are under way; they go on with the new weights."""
    bucket_mb: Annotated[float, Range(0, 10**6, open_low=True)] = 512.0
    """Extra memory for gathering and sending weights, in MiB."""
    deadline_s: Annotated[float, Range(1, 10**6)] = 300.0
    """Seconds that each answer of an engine may take during a sync."""
    attempts: Annotated[int, Range(1, 1000)] = 3
    """Times that a whole sync is tried before the run ends."""
    adapters: str = "merged"
    """With LoRA: `merged`: all weights, adapters merged in; `alone`: all weights once, then adapters (docs/lora.md)."""
    delta: bool = False
    """`vllm`: whether a sync sends only weights changed since the last one (docs/vllm.md#only-what-changed-travels)."""
    full_every: Annotated[int, Range(1, 10**6)] = 50
    """With `weight_sync.delta`: one in so many syncs sends all weights; 1: every sync does."""

    def __post_init__(self) -> None:
        choose("weight_sync.channel", self.channel, ("auto", "shared_memory", "broadcast", "cuda_ipc"))
        choose("weight_sync.adapters", self.adapters, ("merged", "alone"))

    @property
    def bucket_bytes(self) -> int:
        return max(1, int(self.bucket_mb * 2**20))
