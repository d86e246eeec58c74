"""The section of on-policy distillation's teacher: a second model, or servers that hold one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.ranges import Range
from megatron_rl.errors import ConfigError, quoted


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Names the teacher of `advantage.estimator=distillation`, of the policy's tokenizer (docs/distillation.md)."""

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
