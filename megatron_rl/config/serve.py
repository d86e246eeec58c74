"""The section of the server that speaks Tinker's API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.checks import Range, choose


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serves Tinker's API by `python -m megatron_rl.serve` (docs/tinker.md); a training run reads none of it.

    The first rank holds the HTTP server. Every other wait than these is bounded by
    `run.deadline_s`.
    """

    host: str = "127.0.0.1"
    """Address that the server listens at; any other than this host's own loopback needs `serve.api_key_env`."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """Port of the server; 0: any free one, which the log names."""
    api_key_env: str | None = None
    """Environment variable that holds the keys clients may present, between commas; null: any key is taken."""
    base_model: str | None = None
    """Name under which clients ask for the model; null: the last part of `model.hf_path`."""
    tokenizer_id: str | None = None
    """Name or folder by which clients load the tokenizer; null: `model.tokenizer_path` or `model.hf_path`."""
    logprobs: str = "all"
    """`all`: answers hold every target's log-prob; `trained`: 0 where a target trains nothing, and is not run."""
    least_advantage: Annotated[float, Range(0, 1)] = 0.0
    """Advantages of at most this size count as 0; 1e-6: what rounding leaves of equal rewards. 0.0: as sent."""
    max_models: Annotated[int, Range(1, 10**5)] = 16
    """Models in training whose states are kept in host memory."""
    max_samplers: Annotated[int, Range(1, 10**5)] = 32
    """Unnamed sampler weights that are kept in host memory; older ones are forgotten."""
    max_body_mb: Annotated[float, Range(0, 10**6, open_low=True)] = 64.0
    """Largest body of a training request, in MiB; the SDK cuts its own at 5 MB."""
    max_queue_mb: Annotated[float, Range(0, 10**7, open_low=True)] = 4096.0
    """Bodies of waiting requests in all, in MiB; beyond it clients are asked to wait (HTTP 429)."""
    max_batch_samples: Annotated[int, Range(1, 10**6)] = 512
    """Samples of waiting sampling requests that are generated together."""
    save_every_steps: Annotated[int, Range(0)] = 0
    """Optimizer steps of a model after which its state is saved, to go on from after a crash; 0: only where asked."""
    gap_s: Annotated[float, Range(1, 10**6)] = 120.0
    """Seconds that requests wait for one that comes before them and has not arrived."""
    queue_s: Annotated[float, Range(1, 10**7)] = 7200.0
    """Seconds that a request may wait for its turn."""
    poll_s: Annotated[float, Range(0, 40)] = 20.0
    """Seconds that a question for a result is held before the client is told to ask again."""
    keep_results_s: Annotated[float, Range(1, 10**7)] = 900.0
    """Seconds that a result is kept, from when it was last asked for."""
    session_s: Annotated[float, Range(1, 10**7)] = 150.0
    """Seconds without a heartbeat after which a session's models may be saved and make room for others."""

    def __post_init__(self) -> None:
        choose("serve.logprobs", self.logprobs, ("all", "trained"))
