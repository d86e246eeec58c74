"""The section of environments, which answer the policy between its turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.checks import at_least, choose


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Answers the policy between its turns (docs/multi-turn.md)."""

    name: str | None = None
    """`calculator` or `module:Class`, which answers between the policy's turns; null: none, a response is one turn."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor, by name."""
    max_turns: int = 8
    """Policy's turns in one sample; `rollout.max_response_tokens` bounds all of them and the observations together."""
    role: str = "tool"
    """Role of an observation that is a text, under `data.template=chat`: `tool`, `user` or `system`."""
    num_threads: int = 16
    """Steps at a time, per rank."""
    deadline_s: float = 30.0
    """Seconds that each step may take."""
    on_error: str = "fail"
    """For a step that raises or takes longer: `fail` ends the run; `drop` takes its sample out of its group."""

    def __post_init__(self) -> None:
        at_least("environment.max_turns", self.max_turns, 1)
        choose("environment.role", self.role, ("tool", "user", "system"))
        at_least("environment.num_threads", self.num_threads, 1)
        at_least("environment.deadline_s", self.deadline_s, 0.0, exclusive=True)
        choose("environment.on_error", self.on_error, ("fail", "drop"))
