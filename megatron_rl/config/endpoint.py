"""The section of the endpoint by which agents make rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_rl.config.ranges import Range


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Serves OpenAI's API on 127.0.0.1 in front of the engines, for agents that make the rollouts (docs/agents.md).

    For a session that fails, or has no reward by its deadline, `environment.on_error` says what follows.
    """

    agent: str | None = None
    """`module:function` that plays a session, called with base_url and the row; null: no agents and no endpoint."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the agent, by name."""
    port: Annotated[int, Range(0, 65535)] = 0
    """Port of the first rank, and the next ones of the others; 0: any free ones."""
    api_key_env: str | None = None
    """Environment variable that holds the keys agents may present, between commas; null: any key is taken."""
    num_agents: Annotated[int, Range(1, 10**4)] = 64
    """Agents at a time, per rank, each in a thread."""
    deadline_s: Annotated[float, Range(0.1, 10**6)] = 300.0
    """Seconds that a session may take from its agent's start to its reward; below `run.deadline_s`."""
    max_turns: Annotated[int, Range(1, 10**6)] = 64
    """Requests of one session."""
    max_body_mb: Annotated[float, Range(0, 10**6, open_low=True)] = 16.0
    """Largest body of a request, in MiB."""
