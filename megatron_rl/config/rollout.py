"""The sections of rollouts: which engine samples and how, and how it gets the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from megatron_rl.config.checks import at_least, choose
from megatron_rl.errors import ConfigError

OWNED_ARGUMENTS = {
    "model": "model.hf_path",
    "tokenizer": "model.tokenizer_path",
    "skip_tokenizer_init": "token ids travel, never texts",
    "dtype": "model.dtype",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "logprobs_mode": "log-probs are at the sampling temperature",
    "worker_extension_cls": "it takes the weights",
    "weight_transfer_config": "weight_sync.channel",
    "enable_sleep_mode": "rollout.sleep",
    "generation_config": "rollout.temperature",
    "load_format": "weights come by weight_sync",
}


@dataclass(frozen=True, kw_only=True)
class ProducerConfig:
    """When rollouts are generated, next to when they are trained; what is trained does not depend on ``mode`` at
    ``max_staleness_steps: 0``.

    ``mode``: ``sync``, ``prefetch`` (``prefetch_rollouts`` rollouts ahead of the one that is trained, generated
    meanwhile) or ``streaming`` (ahead too, and a rollout is scored, and passed for log-probs, in parts while the rest
    is generated). ``min_groups``: groups of a part (null: the whole rollout is one); log-prob passes are cut there in
    every mode. ``max_staleness_steps``: optimizer steps between the weights of a token and those of its rollout's first
    step; null: what ``prefetch_rollouts`` brings about.
    """

    mode: str = "sync"
    prefetch_rollouts: int = 1
    min_groups: int | None = None
    max_staleness_steps: int | None = None

    def __post_init__(self) -> None:
        choose("rollout.producer.mode", self.mode, ("sync", "prefetch", "streaming"))
        at_least("rollout.producer.prefetch_rollouts", self.prefetch_rollouts, 0)
        at_least("rollout.producer.min_groups", self.min_groups, 1)
        at_least("rollout.producer.max_staleness_steps", self.max_staleness_steps, 0)
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

    @property
    def ahead(self) -> int:
        """Rollouts that may be under way or finished beyond the one that is trained."""
        return 0 if self.mode == "sync" else self.prefetch_rollouts


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Groups without signal are replaced by those of further prompts, before anything is trained (DAPO,
    arXiv:2503.14476, section 3.2).

    ``max_rounds``: of asking again, per rollout; 0: never. ``on_exhausted``: what is still without signal after them is
    skipped as ever (``skip``), or ends the run (``fail``).
    """

    max_rounds: int = 0
    on_exhausted: str = "skip"

    def __post_init__(self) -> None:
        at_least("rollout.dynamic_sampling.max_rounds", self.max_rounds, 0)
        choose("rollout.dynamic_sampling.on_exhausted", self.on_exhausted, ("skip", "fail"))


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Generation. Log-probs are taken at ``temperature``, by the engine and by the trainer.

    ``engine``: ``transformers`` (in the trainer's processes, for small models) or ``vllm``: processes of the run's own,
    or the ``servers`` named. ``max_logprob_gap``: the mean |log π_old − log μ| of a rollout that ends the run (null:
    none); ``warn_logprob_gap``: that warns.
    """

    engine: str = "transformers"
    samples_per_prompt: int = 8
    max_response_tokens: int = 256
    temperature: float = 1.0
    max_batch_samples: int = 256  # transformers: rows of one batch
    allow_large_embedded_model: bool = False
    # vLLM: engines of the run's own
    num_engines: int | None = None  # null: one for every tensor_parallel ranks
    tensor_parallel: int = 1
    gpu_memory_utilization: float = 0.5
    sleep: str = "auto"  # give the GPU back while the trainer works; auto: where both use the same one
    vllm: dict[str, Any] = field(default_factory=dict)  # any other field of vllm.EngineArgs
    # vLLM: servers
    servers: tuple[str, ...] = ()
    api_key_env: str = "VLLM_API_KEY"  # the environment variable that holds the key
    # vLLM: both
    start_s: float = 600.0  # until an engine serves
    request_s: float = 900.0  # until all samples of a prompt are there
    max_requests: int = 256  # under way at one engine, per rank
    max_restarts: int = 3  # in a row, before the run ends
    warn_logprob_gap: float | None = None  # null: 0.05 in bfloat16, 0.001 in float32
    max_logprob_gap: float | None = 0.5
    producer: ProducerConfig = field(default_factory=ProducerConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)

    def __post_init__(self) -> None:
        choose("rollout.engine", self.engine, ("transformers", "vllm"))
        choose("rollout.sleep", self.sleep, ("auto", "always", "never"))
        for name in (
            "samples_per_prompt",
            "max_response_tokens",
            "max_batch_samples",
            "num_engines",
            "tensor_parallel",
            "max_requests",
        ):
            at_least(f"rollout.{name}", self.__getattribute__(name), 1)
        at_least("rollout.temperature", self.temperature, 0.0, exclusive=True)
        for name in ("start_s", "request_s"):
            at_least(f"rollout.{name}", self.__getattribute__(name), 1.0)
        at_least("rollout.max_restarts", self.max_restarts, 0)
        at_least("rollout.warn_logprob_gap", self.warn_logprob_gap, 0.0)
        at_least("rollout.max_logprob_gap", self.max_logprob_gap, 0.0)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"rollout.gpu_memory_utilization={self.gpu_memory_utilization} must be a share of the GPU, above 0 "
                "and at most 1"
            )
        self._check_servers()
        for name in self.vllm:
            if name in OWNED_ARGUMENTS:
                raise ConfigError(
                    f"rollout.vllm.{name}={self.vllm[name]!r} may not be set there: {OWNED_ARGUMENTS[name]} decides it"
                )

    def _check_servers(self) -> None:
        if self.servers and self.engine != "vllm":
            raise ConfigError(
                f"rollout.servers={list(self.servers)} belong to rollout.engine=vllm and the engine is {self.engine}"
            )
        for server in self.servers:
            parts = urlsplit(server)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
                raise ConfigError(f"rollout.servers names {server!r}; a server is http://host:port, without a path")
        if self.servers and self.num_engines is not None:
            raise ConfigError(
                f"rollout.num_engines={self.num_engines} starts engines and rollout.servers={list(self.servers)} are "
                "running ones; drop one"
            )


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig:
    """Weights to the engines. ``channel``: ``shared_memory`` on one host, ``broadcast`` (NCCL or gloo) across hosts;
    ``auto`` chooses one of these. ``cuda_ipc``: an engine of the run's own opens the bucket in the memory of the GPU
    that it shares with its rank.

    ``interval``: optimizer steps that the engines' weights may lag behind before they are sent again. ``in_flight``:
    they are sent while completions are under way, which go on with the new ones. ``bucket_mb``: extra memory of
    gathering and sending. ``deadline_s``: of every answer. ``attempts``: whole syncs, before the run ends.
    """

    channel: str = "auto"
    interval_steps: int = 1
    in_flight: bool = False
    bucket_mb: float = 512.0
    deadline_s: float = 300.0
    attempts: int = 3

    def __post_init__(self) -> None:
        choose("weight_sync.channel", self.channel, ("auto", "shared_memory", "broadcast", "cuda_ipc"))
        at_least("weight_sync.bucket_mb", self.bucket_mb, 0.0, exclusive=True)
        at_least("weight_sync.deadline_s", self.deadline_s, 1.0)
        at_least("weight_sync.attempts", self.attempts, 1)
        at_least("weight_sync.interval_steps", self.interval_steps, 1)

    @property
    def bucket_bytes(self) -> int:
        return max(1, int(self.bucket_mb * 2**20))
