"""The section of environments: who answers the policy between its turns, how long, and what happens when that fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.checks import at_least, choose


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """``name``: a built-in (``calculator``) or ``module:Class``; null: none, a response is one turn. ``arguments``:
    what it is made with.

    ``max_turns``: of the policy, in one sample. ``role``: of an observation that is a text, under
        ``data.template=chat``.
    ``num_threads``: steps at a time, per rank; ``deadline_s``: of each. ``on_error``: one that raises or takes longer
    ends the run (``fail``) or takes its sample out of its group (``drop``).
    """

    name: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    max_turns: int = 8
    role: str = "tool"
    num_threads: int = 16
    deadline_s: float = 30.0
    on_error: str = "fail"

    def __post_init__(self) -> None:
        at_least("environment.max_turns", self.max_turns, 1)
        choose("environment.role", self.role, ("tool", "user", "system"))
        at_least("environment.num_threads", self.num_threads, 1)
        at_least("environment.deadline_s", self.deadline_s, 0.0, exclusive=True)
        choose("environment.on_error", self.on_error, ("fail", "drop"))
