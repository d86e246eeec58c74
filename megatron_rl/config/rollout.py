"""The sections of rollouts: the engine that samples, when it does so, and how it gets the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

from megatron_rl.config.checks import Range, choose
from megatron_rl.config.environment import EndpointConfig
from megatron_rl.errors import ConfigError, quoted


@dataclass(frozen=True, kw_only=True)
class ProducerConfig:
    """Says when rollouts are generated, next to when they are trained (docs/async.md).

    `streaming` scores a rollout, and passes it for log-probs, in parts while the rest is generated. Log-prob passes are
    cut at these parts in every mode, so that no mode changes a result at `max_staleness_steps: 0`. A rollout that would
    be staler than the bound is not started; groups that are older all the same are dropped and asked again.
    """

    mode: str = "sync"
    """`sync`: no rollout ahead; `prefetch`: generated ahead, during training; `streaming`: ahead, scored in parts."""
    prefetch_rollouts: Annotated[int, Range(0, 1000)] = 1
    """Rollouts that are generated ahead of the one that is trained."""
    min_groups: Annotated[int, Range(1, 10**6)] | None = None
    """Groups of a part, which is scored and passed for log-probs by itself; null: the whole rollout is one."""
    max_staleness_steps: Annotated[int, Range(0)] | None = None
    """Optimizer steps between a token's weights and its rollout's first step; null: set by `prefetch_rollouts`."""
    straggler_share: Annotated[float, Range(0, 0.5)] = 0.0
    """Share of a rollout's groups that may still be under way when it is trained, and join the next; 0: none."""

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
        """Return the groups that a rollout leaves under way: the share of its groups, rounded down."""
        return int(self.straggler_share * prompts_per_rollout + 1e-9)

    @property
    def ahead(self) -> int:
        """Return the number of rollouts that may be under way or finished beyond the one that is trained."""
        return 0 if self.mode == "sync" else self.prefetch_rollouts


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Replaces groups without signal by those of further prompts, before anything is trained.

    The method is DAPO's (arXiv:2503.14476, section 3.2).
    """

    max_rounds: Annotated[int, Range(0, 1000)] = 0
    """Rounds of asking further prompts, per rollout; 0: never."""
    on_exhausted: str = "skip"
    """For groups without signal after the last round: `skip` drops them as ever; `fail` ends the run."""
    metric: str | None = None
    """Of `reward.functions`, or `reward`, `shaped`: groups equal by it give way too; null: docs/async.md says which."""

    def __post_init__(self) -> None:
        choose("rollout.dynamic_sampling.on_exhausted", self.on_exhausted, ("skip", "fail"))


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Generates the samples, by a model in the trainer's own processes or by vLLM.

    A log-prob gap is the mean |log π_old − log μ| of a rollout, read where engine and trainer have
    the same weights.
    """

    engine: str = "transformers"
    """`transformers`: in the trainer's own processes, for small models; `vllm`: see docs/vllm.md."""
    samples_per_prompt: Annotated[int, Range(1, 10**5)] = 8
    """Samples of each prompt, which are its group."""
    max_response_tokens: Annotated[int, Range(1, 10**8)] = 256
    """Tokens of a response at most, over all turns, observations included."""
    start_order: str = "drawn"
    """`drawn`; `longest_first`: the groups that came longest when their prompts were last sampled are started first."""
    temperature: Annotated[float, Range(0.01, 100)] = 1.0
    """Sampling temperature; engine and trainer take log-probs at it everywhere."""
    bitwise: bool = False
    """`transformers`: sample by the trainer's own layers, for log-probs equal to the bit (docs/bitwise.md)."""
    max_batch_samples: Annotated[int, Range(1, 10**6)] = 256
    """`transformers`: rows decoded at once."""
    allow_large_embedded_model: bool = False
    """`transformers`: whether a model of more than 1B parameters is allowed."""
    num_engines: Annotated[int, Range(1, 10**5)] | None = None
    """`vllm`: engines of the run's own; null: one for every `rollout.tensor_parallel` ranks."""
    tensor_parallel: Annotated[int, Range(1, 10**4)] = 1
    """`vllm`: GPUs of the ranks that each engine takes."""
    gpu_memory_utilization: Annotated[float, Range(0, 1, open_low=True)] = 0.5
    """`vllm`: share of each GPU's memory that an engine takes."""
    sleep: str = "auto"
    """`vllm`: `auto`: engine and trainer's optimizer state take turns on a GPU they share; or `always`, `never`."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """`vllm`: any other fields of vllm.EngineArgs, by name."""
    servers: tuple[str, ...] = ()
    """`vllm`: running servers in place of engines of the run's own, each `http://host:port`."""
    api_key_env: str = "VLLM_API_KEY"
    """`vllm`: environment variable that holds the servers' key."""
    start_s: Annotated[float, Range(1, 10**6)] = 600.0
    """`vllm`: seconds until an engine serves; below `run.deadline_s`."""
    request_s: Annotated[float, Range(1, 10**6)] = 300.0
    """`vllm`: seconds that an engine may owe samples without progress; below `run.deadline_s`."""
    max_requests: Annotated[int, Range(1, 10**6)] = 256
    """`vllm`: prompts under way at one engine, per rank."""
    max_restarts: Annotated[int, Range(0, 10**6)] = 3
    """`vllm`: losses of an engine in a row before the run ends."""
    warn_logprob_gap: Annotated[float, Range(0, 10**6)] | None = None
    """Log-prob gap, in nats, above which a rollout warns; null: 0.05 in bfloat16, 0.001 in float32."""
    max_logprob_gap: Annotated[float, Range(0, 10**6, open_low=True)] | None = 0.5
    """Log-prob gap, in nats, above which a rollout ends the run; null: never."""
    routing_replay: str = "off"
    """Experts of trained tokens: `off`: the router's own; `old_logprobs`: that pass's; `rollout`: the engine's."""
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
                f"rollout.servers={quoted(list(self.servers))} belong to rollout.engine=vllm and the engine is "
                f"{self.engine}"
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

    Under `cuda_ipc` an engine of the run's own opens the bucket in the memory of the GPU that it
    shares with its rank, and the trainer then does without expandable segments.
    """

    channel: str = "auto"
    """`auto`: `cuda_ipc` on a shared GPU, else `shared_memory` on one host, `broadcast` (NCCL, gloo) across hosts."""
    interval_steps: Annotated[int, Range(1)] = 1
    """Optimizer steps that the engines' weights may lag behind before they are sent again."""
    in_flight: bool = False
    """Whether weights are sent while completions are under way, which go on with the new ones."""
    bucket_mb: Annotated[float, Range(0, 10**6, open_low=True)] = 512.0
    """Extra memory of gathering and sending weights, in MiB."""
    deadline_s: Annotated[float, Range(1, 10**6)] = 300.0
    """Seconds that each answer of an engine may take during a sync."""
    attempts: Annotated[int, Range(1, 1000)] = 3
    """Whole syncs that are tried before the run ends."""
    adapters: str = "merged"
    """`lora`: `merged` sends every weight, adapters in it; `alone` the weights once, then A and B (docs/lora.md)."""
    delta: bool = False
    """`vllm`: whether engines get only what changed since the last sync (docs/vllm.md#only-what-changed-travels)."""
    full_every: Annotated[int, Range(1, 10**6)] = 50
    """With `weight_sync.delta`: one of so many syncs brings all weights; 1: every one does."""

    def __post_init__(self) -> None:
        choose("weight_sync.channel", self.channel, ("auto", "shared_memory", "broadcast", "cuda_ipc"))
        choose("weight_sync.adapters", self.adapters, ("merged", "alone"))

    @property
    def bucket_bytes(self) -> int:
        return max(1, int(self.bucket_mb * 2**20))
