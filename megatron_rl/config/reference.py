"""The sections ``reference`` (the policy of the KL term) and ``teacher`` (of on-policy distillation)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.checks import Range, choose
from megatron_rl.errors import ConfigError, quoted


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """Sets the reference policy, to which the KL is measured (docs/ppo.md#the-reference-policy)."""

    kl_in: str = "loss"
    """`loss`: β · KL is added to the loss; `reward`: β · KL of each token is subtracted from the reward."""
    placement: str = "host"
    """`host`: weights in host memory, swapped in for the reference's passes; `device`: a second model on the device."""
    refresh_every_rollouts: Annotated[int, Range(1)] | None = None
    """Number of rollouts after which the current policy becomes the reference; null: never."""
    controller: str = "fixed"
    """β: `fixed` at `loss.kl_coefficient`, or `adaptive`: starts there, steered so that the KL meets the target."""
    kl_target: Annotated[float, Range(0, 1000, open_low=True)] = 0.1
    """KL that an adaptive β is steered to, in nats per token."""
    kl_horizon: Annotated[int, Range(1, 10**12)] = 10_000
    """Pace of an adaptive β: in so many samples it grows or shrinks by a factor of at most about e^0.2."""

    def __post_init__(self) -> None:
        choose("reference.kl_in", self.kl_in, ("loss", "reward"))
        choose("reference.placement", self.placement, ("host", "device"))
        choose("reference.controller", self.controller, ("fixed", "adaptive"))


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Names the teacher of `advantage.estimator=distillation` (docs/supervised.md#on-policy-distillation).

    The teacher must have the policy's tokenizer.
    """

    hf_path: str | None = None
    """Directory of the teacher's weights, loaded on the policy's ranks and frozen; null: `teacher.servers`."""
    servers: tuple[str, ...] = ()
    """Running vLLM servers that hold the teacher, each `http://host:port`, in place of `teacher.hf_path`."""
    api_key_env: str = "VLLM_API_KEY"
    """Environment variable that holds the servers' key."""
    request_s: Annotated[float, Range(0.1, 10**6)] = 300.0
    """Seconds that a request to a server may take; then another server is asked once."""
    requests_at_once: Annotated[int, Range(1, 1000)] = 16
    """Largest number of requests that a rank has under way at once."""
    discount: Annotated[float, Range(0, 1)] = 0.0
    """γ: a token's advantage is Σ_k γ^k · (teacher's − policy's log-prob k loss tokens later); 0: its own alone."""

    def __post_init__(self) -> None:
        if self.hf_path is not None and self.servers:
            raise ConfigError(
                f"teacher.hf_path={quoted(self.hf_path, 300)} and teacher.servers={quoted(list(self.servers))} both "
                "name the teacher; give one"
            )
