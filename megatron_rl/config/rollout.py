"""The sections ``rollout`` (the engine, and when it generates) and ``weight_sync`` (how it gets the weights)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

from megatron_rl.config.checks import Range, choose
from megatron_rl.config.environment import EndpointConfig
from megatron_rl.errors import ConfigError, quoted

TOKEN_DRAFTERS = ("history", "ngram", "ngram_gpu", "suffix")  # draft from tokens alone
WEIGHT_DRAFTERS = ("draft_model", "eagle", "eagle3", "mtp")  # draft with weights of their own


@dataclass(frozen=True, kw_only=True)
class ProducerConfig:
    """Sets how far rollouts are generated ahead of training (docs/async.md).

    `streaming` divides a rollout into parts of `min_groups` groups. A finished part gets its rewards and
    its log-prob passes while later parts are generated. Every mode runs log-prob passes part by part, so
    at `max_staleness_steps: 0` all modes give the same results. A rollout waits to start if it would be
    trained more than `max_staleness_steps` steps after the weights that sample it. Older groups (if a
    resumed run lowers the number) are dropped, and their prompts are sampled again.
    """

    mode: str = "sync"
    """`sync`: generate, then train; `prefetch`: generate ahead while training; `streaming`: also score part by part."""
    prefetch_rollouts: Annotated[int, Range(0, 1000)] = 1
    """Number of rollouts that are generated ahead of the rollout in training."""
    min_groups: Annotated[int, Range(1, 10**6)] | None = None
    """Number of groups in a part of a rollout (fewer in the last); parts are scored one by one; null: a single part."""
    max_staleness_steps: Annotated[int, Range(0)] | None = None
    """Most steps from the weights that sample a token to its first training; null: bounded by `prefetch_rollouts`."""
    straggler_share: Annotated[float, Range(0, 0.5)] = 0.0
    """Fraction of a rollout's groups that may be unfinished when it trains; they join the next rollout; 0: none."""

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
        """Return the number of groups that a rollout may leave unfinished, ``straggler_share`` of all, rounded down.

        A group is the samples of one prompt.
        """
        return int(self.straggler_share * prompts_per_rollout + 1e-9)

    @property
    def ahead(self) -> int:
        """Return the number of rollouts, under way or finished, that may be ahead of the rollout in training."""
        return 0 if self.mode == "sync" else self.prefetch_rollouts


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Replaces groups without signal by groups of further prompts, before a rollout is trained.

    A group without signal has no sample with a gradient. The method is DAPO's (arXiv:2503.14476,
    section 3.2).
    """

    max_rounds: Annotated[int, Range(0, 1000)] = 0
    """Largest number of rounds in a rollout; each replaces all groups still without signal; 0: no replacement."""
    on_exhausted: str = "skip"
    """If groups without signal are left after the last round: `skip`: drop them as usual; `fail`: end the run."""
    metric: str | None = None
    """Reward that must differ in a group: a function's; `reward`: the sum; `shaped`: none must; null: docs/async.md."""

    def __post_init__(self) -> None:
        choose("rollout.dynamic_sampling.on_exhausted", self.on_exhausted, ("skip", "fail"))


@dataclass(frozen=True, kw_only=True)
class AdaptiveGroupsConfig:
    """Sets how samples are dealt to prompts under `rollout.group_sizes=adaptive` (docs/rollout-time.md).

    A prompt gets many samples if its earlier rewards differed, and few if they were equal. The
    expected gradient stays that of equal groups of `rollout.samples_per_prompt` samples.
    """

    min_samples: Annotated[int, Range(2, 10**5)] = 2
    """Smallest number of samples of a prompt; at most `rollout.samples_per_prompt`."""
    max_samples: Annotated[int, Range(2, 10**5)] | None = None
    """Largest number of samples of a prompt; null: four times `rollout.samples_per_prompt`."""
    budget: str = "same_variance"
    """Samples of a rollout: `same_variance`: as many as keep the gradient's expected variance; `full`: all of them."""
    memory_discount: Annotated[float, Range(0, 1)] = 0.5
    """Weight of a prompt's earlier groups beside its latest one; 0: only the latest group counts."""

    def __post_init__(self) -> None:
        choose("rollout.adaptive_groups.budget", self.budget, ("same_variance", "full"))


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Sets how samples are generated, by a model in the trainer's own processes or by vLLM.

    A rollout's log-prob gap is its mean of |log π_old − log μ|, trainer against engine, over tokens
    for which both have the same weights.
    """

    engine: str = "transformers"
    """`transformers`: in the trainer's own processes, for small models; `vllm`: see docs/vllm.md."""
    samples_per_prompt: Annotated[int, Range(1, 10**5)] = 8
    """Number of samples of each prompt; together they are the prompt's group."""
    group_sizes: str = "fixed"
    """`fixed`: every group has `rollout.samples_per_prompt` samples; `adaptive`: see docs/rollout-time.md."""
    max_response_tokens: Annotated[int, Range(1, 10**8)] = 256
    """Largest number of tokens of a response, over all turns, observations included."""
    start_order: str = "drawn"
    """Order of prompts' start: `drawn`: the data's; `longest_first`: new ones, then by longest earlier response."""
    temperature: Annotated[float, Range(0.01, 100)] = 1.0
    """Sampling temperature; all log-probs, of engine and trainer, are taken at it."""
    bitwise: bool = False
    """With `transformers`: whether the trainer's own layers generate, for bitwise equal log-probs (docs/bitwise.md)."""
    max_batch_samples: Annotated[int, Range(1, 10**6)] = 256
    """With `transformers`: largest number of samples that are decoded at once."""
    allow_large_embedded_model: bool = False
    """With `transformers`: whether a model of more than 1B parameters is allowed."""
    num_engines: Annotated[int, Range(1, 10**5)] | None = None
    """With `vllm`: number of engines that the run starts; null: one for every `rollout.tensor_parallel` ranks."""
    tensor_parallel: Annotated[int, Range(1, 10**4)] = 1
    """With `vllm`: number of GPUs of each engine; ranks of the trainer use the same GPUs."""
    gpu_memory_utilization: Annotated[float, Range(0, 1, open_low=True)] = 0.5
    """With `vllm`: share of each GPU's memory that an engine takes."""
    sleep: str = "auto"
    """With `vllm`: whether engine and optimizer state take turns on a GPU: `auto`: if shared; `always`; `never`."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """With `vllm`: any other fields of vllm.EngineArgs, by name."""
    servers: tuple[str, ...] = ()
    """With `vllm`: running servers, each `http://host:port`, in place of engines that the run starts."""
    api_key_env: str = "VLLM_API_KEY"
    """With `vllm`: environment variable that holds the servers' key."""
    start_s: Annotated[float, Range(1, 10**6)] = 600.0
    """With `vllm`: seconds that an engine's start may take; below `run.deadline_s`."""
    request_s: Annotated[float, Range(1, 10**6)] = 300.0
    """With `vllm`: seconds that an engine with requests may go without progress; below `run.deadline_s`."""
    max_requests: Annotated[int, Range(1, 10**6)] = 256
    """With `vllm`: largest number of prompts that a rank has under way at one engine."""
    max_restarts: Annotated[int, Range(0, 10**6)] = 3
    """With `vllm`: number of times in a row that a lost engine is started again; then the run ends."""
    warn_logprob_gap: Annotated[float, Range(0, 10**6)] | None = None
    """Mean |trainer's − engine's log-prob| above which the log warns; null: 0.05 nats in bfloat16, 0.001 in float32."""
    max_logprob_gap: Annotated[float, Range(0, 10**6, open_low=True)] | None = 0.5
    """Mean |trainer's − engine's log-prob| of a rollout, in nats, above which the run ends; null: never."""
    routing_replay: str = "off"
    """Source of training's experts: `off`: the router; `old_logprobs`: the pass of π_old; `rollout`: the engine."""
    speculation: str = "off"
    """Drafter: `off`, `history` (docs/tuning.md); vLLM's `ngram`, `suffix`, `draft_model`, `eagle`, `eagle3`, `mtp`."""
    adaptive_groups: AdaptiveGroupsConfig = field(default_factory=AdaptiveGroupsConfig)
    producer: ProducerConfig = field(default_factory=ProducerConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)

    def __post_init__(self) -> None:
        choose("rollout.engine", self.engine, ("transformers", "vllm"))
        choose("rollout.sleep", self.sleep, ("auto", "always", "never"))
        choose("rollout.routing_replay", self.routing_replay, ("off", "old_logprobs", "rollout"))
        choose("rollout.group_sizes", self.group_sizes, ("fixed", "adaptive"))
        choose("rollout.speculation", self.speculation, ("off", *TOKEN_DRAFTERS, *WEIGHT_DRAFTERS))
        choose("rollout.start_order", self.start_order, ("drawn", "longest_first"))
        self._check_servers()

    @property
    def unequal_group_size(self) -> int | None:
        """Return the mean number of samples of a group if groups may be unequal, else None."""
        return self.samples_per_prompt if self.group_sizes == "adaptive" else None

    @property
    def largest_group(self) -> int:
        """Return the most samples that a group may have."""
        if self.group_sizes == "fixed":
            return self.samples_per_prompt
        return self.adaptive_groups.max_samples or 4 * self.samples_per_prompt

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
    """Sets how the policy's weights are sent to the engines, one bucket (some tensors) after another.

    Under `cuda_ipc` an engine reads each bucket from the memory of the GPU that it shares with a
    trainer's rank. This works for engines that the run started. It turns PyTorch's expandable
    segments off in the trainer.
    """

    channel: str = "auto"
    """`auto`: `cuda_ipc` on a shared GPU, else `shared_memory` on one host, `broadcast` (NCCL, gloo) across hosts."""
    interval_steps: Annotated[int, Range(1)] = 1
    """A starting rollout sends weights to the engines if theirs are at least so many optimizer steps old."""
    in_flight: bool = False
    """Whether weights are sent while completions are under way, which then go on with the new weights."""
    bucket_mb: Annotated[float, Range(0, 10**6, open_low=True)] = 512.0
    """Extra memory for gathering and sending weights, in MiB."""
    deadline_s: Annotated[float, Range(1, 10**6)] = 300.0
    """Seconds that each answer of an engine may take during a sync."""
    attempts: Annotated[int, Range(1, 1000)] = 3
    """Number of times that a whole sync is tried before the run ends."""
    adapters: str = "merged"
    """With LoRA: `merged`: all weights, adapters merged in; `alone`: all weights once, then adapters (docs/lora.md)."""
    delta: bool = False
    """With `vllm`: whether a sync sends only what changed since the last (docs/vllm.md#only-what-changed-travels)."""
    full_every: Annotated[int, Range(1, 10**6)] = 50
    """With `weight_sync.delta`: one in so many syncs sends all weights; 1: every sync does."""

    def __post_init__(self) -> None:
        choose("weight_sync.channel", self.channel, ("auto", "shared_memory", "broadcast", "cuda_ipc"))
        choose("weight_sync.adapters", self.adapters, ("merged", "alone"))

    @property
    def bucket_bytes(self) -> int:
        return max(1, int(self.bucket_mb * 2**20))
