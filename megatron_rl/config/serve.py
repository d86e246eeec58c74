"""The section ``serve``, of the server that speaks Tinker's API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.checks import Range, choose


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Sets the server of Tinker's API, `python -m megatron_rl.serve` (docs/tinker.md). A training run ignores it.

    The first rank holds the HTTP server. `run.deadline_s` bounds every wait that has no setting
    here.
    """

    host: str = "127.0.0.1"
    """Address of the server; an address other than this host's loopback needs `serve.api_key_env`."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """Port of the server; 0: any free port, which the log names."""
    api_key_env: str | None = None
    """Environment variable with the keys that clients may present, separated by commas; null: any key is accepted."""
    base_model: str | None = None
    """Name under which clients ask for the model; null: the last part of `model.hf_path`."""
    tokenizer_id: str | None = None
    """Name or folder by which clients load the tokenizer; null: `model.tokenizer_path` or `model.hf_path`."""
    logprobs: str = "all"
    """Answers' log-probs: `all`: every target's; `trained`: 0 for targets without gradient, to save forward passes."""
    least_advantage: Annotated[float, Range(0, 1)] = 0.0
    """Advantages whose absolute value is at most this count as 0; 1e-6 covers rounding errors; 0.0: only 0 itself."""
    max_models: Annotated[int, Range(1, 10**5)] = 16
    """Largest number of models in training whose states are kept in host memory."""
    max_samplers: Annotated[int, Range(1, 10**5)] = 32
    """Largest number of unnamed samplers whose weights are kept in host memory; beyond it the oldest are removed."""
    max_body_mb: Annotated[float, Range(0, 10**6, open_low=True)] = 64.0
    """Largest body of a training request, in MiB; the SDK splits its requests at 5 MB."""
    max_queue_mb: Annotated[float, Range(0, 10**7, open_low=True)] = 4096.0
    """Largest total size of waiting requests' bodies, in MiB; beyond it clients are asked to wait (HTTP 429)."""
    max_batch_samples: Annotated[int, Range(1, 10**6)] = 512
    """Largest number of samples, of several sampling requests, that are generated together."""
    save_every_steps: Annotated[int, Range(0)] = 0
    """Number of optimizer steps of a model between saves of its state, against a crash; 0: only when a client asks."""
    gap_s: Annotated[float, Range(1, 10**6)] = 120.0
    """Seconds that a model's requests wait for one with a lower sequence number to arrive; then they fail."""
    queue_s: Annotated[float, Range(1, 10**7)] = 7200.0
    """Seconds that a request may wait for its turn."""
    poll_s: Annotated[float, Range(0, 40)] = 20.0
    """Seconds that a client's request for a result is held before it is told to ask again."""
    keep_results_s: Annotated[float, Range(1, 10**7)] = 900.0
    """Seconds that a result is kept after it was last asked for."""
    session_s: Annotated[float, Range(1, 10**7)] = 150.0
    """Seconds without a heartbeat after which a session's models may be saved and removed from memory."""

    def __post_init__(self) -> None:
        choose("serve.logprobs", self.logprobs, ("all", "trained"))
