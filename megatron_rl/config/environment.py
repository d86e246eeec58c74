"""The section of environments, which answer the policy between its turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_rl.config.checks import choose
from megatron_rl.config.ranges import Range


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Answers the policy between its turns (docs/multi-turn.md)."""

    name: str | None = None
    """`calculator`, `gymnasium` or `module:Class`: answers between the policy's turns; null: a response is one turn."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor, by name."""
    max_turns: Annotated[int, Range(1, 10**6)] = 8
    """Policy's turns in one sample; `rollout.max_response_tokens` bounds all of them and the observations together."""
    role: str = "tool"
    """Role of an observation that is a text, under `data.template=chat`: `tool`, `user` or `system`."""
    num_threads: Annotated[int, Range(1, 10**4)] = 16
    """Steps at a time, per rank."""
    deadline_s: Annotated[float, Range(0.1, 10**6)] = 30.0
    """Seconds that each step may take."""
    on_error: str = "fail"
    """For a step, or an agent's session, that fails or takes longer: `fail` ends the run; `drop` drops its sample."""

    def __post_init__(self) -> None:
        choose("environment.role", self.role, ("tool", "user", "system"))
        choose("environment.on_error", self.on_error, ("fail", "drop"))
