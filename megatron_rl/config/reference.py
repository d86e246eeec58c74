"""The sections of the models beside the policy: the KL's reference, and on-policy distillation's teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.checks import Range, choose
from megatron_rl.errors import ConfigError, quoted


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """Describes the policy that the KL is measured against (docs/ppo.md#the-reference-policy)."""

    kl_in: str = "loss"
    """`loss`: the coefficient times the KL is added to it; `reward`: that of each token is taken off it."""
    placement: str = "host"
    """`host`: weights copied to host memory, swapped in for its passes; `device`: a second model in device memory."""
    refresh_every_rollouts: Annotated[int, Range(1)] | None = None
    """Rollouts after which the current policy becomes the reference; null: never."""
    controller: str = "fixed"
    """`fixed`; `adaptive`: starts at `loss.kl_coefficient`, and moves so that the KL comes to `reference.kl_target`."""
    kl_target: Annotated[float, Range(0, 1000, open_low=True)] = 0.1
    """KL that an adaptive coefficient leads to, in nats per token."""
    kl_horizon: Annotated[int, Range(1, 10**12)] = 10_000
    """Samples over which a KL far above the target multiplies an adaptive coefficient by about e^0.2."""

    def __post_init__(self) -> None:
        choose("reference.kl_in", self.kl_in, ("loss", "reward"))
        choose("reference.placement", self.placement, ("host", "device"))
        choose("reference.controller", self.controller, ("fixed", "adaptive"))


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Names the teacher of `distillation`, of the policy's tokenizer (docs/supervised.md#on-policy-distillation)."""

    hf_path: str | None = None
    """Directory of the teacher's weights, which lie frozen beside the policy's under its degrees; null: `servers`."""
    servers: tuple[str, ...] = ()
    """Running vLLM servers that hold the teacher, each `http://host:port`, in place of weights here."""
    api_key_env: str = "VLLM_API_KEY"
    """Environment variable that holds the servers' key."""
    request_s: Annotated[float, Range(0.1, 10**6)] = 300.0
    """Seconds of a request to a server, after which another server is asked once."""
    requests_at_once: Annotated[int, Range(1, 1000)] = 16
    """Requests of a rank under way at once."""
    discount: Annotated[float, Range(0, 1)] = 0.0
    """γ: a token answers for γ^k of the gap k loss tokens later; 0: for its own alone."""

    def __post_init__(self) -> None:
        if self.hf_path is not None and self.servers:
            raise ConfigError(
                f"teacher.hf_path={quoted(self.hf_path, 300)} and teacher.servers={quoted(list(self.servers))} both "
                "name the teacher; give one"
            )
