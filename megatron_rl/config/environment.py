"""The sections ``environment``, which answers the policy, and ``rollout.endpoint``, which agents call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_rl.config.checks import Range, choose


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Sets the environment that answers the policy between its turns (docs/agents.md)."""

    name: str | None = None
    """`calculator`, `gymnasium` or your own `module:Class`; null: none, a response is one turn."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor, by name."""
    max_turns: Annotated[int, Range(1, 10**6)] = 8
    """Largest number of the policy's turns in a sample; `rollout.max_response_tokens` bounds the sample's tokens."""
    role: str = "tool"
    """With `data.template=chat`, the role of an observation that is a text: `tool`, `user` or `system`."""
    num_threads: Annotated[int, Range(1, 10**4)] = 16
    """Largest number of environment steps that run at a time on a rank."""
    deadline_s: Annotated[float, Range(0.1, 10**6)] = 30.0
    """Seconds that each environment step may take."""
    on_error: str = "fail"
    """If a step or an agent's session fails: `fail`: end the run; `drop`: drop its sample; `retry_sample`."""
    max_retries: Annotated[int, Range(1, 100)] = 2
    """With `on_error: retry_sample`: how often a failed sample begins again, before it is dropped."""

    def __post_init__(self) -> None:
        choose("environment.role", self.role, ("tool", "user", "system"))
        choose("environment.on_error", self.on_error, ("fail", "drop", "retry_sample"))

    @property
    def num_retries(self) -> int:
        """Return how often a sample begins again whose environment or agent failed; 0: never."""
        return self.max_retries if self.on_error == "retry_sample" else 0


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Serves OpenAI's API on 127.0.0.1 to agents that make the rollouts (docs/agents.md#agents-behind-openais-api).

    `environment.on_error` applies to a session that fails, or that has no reward by its deadline.
    """

    agent: str | None = None
    """`module:function` that plays a session, called with the endpoint's base_url and the data row; null: no agents."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the agent, by name."""
    port: Annotated[int, Range(0, 65535)] = 0
    """Port of the first rank; the other ranks take the ports after it; 0: any free ports."""
    api_key_env: str | None = None
    """Environment variable with the keys that agents may present, separated by commas; null: any key is accepted."""
    num_agents: Annotated[int, Range(1, 10**4)] = 64
    """Largest number of agents that run at a time on a rank, each in a thread."""
    deadline_s: Annotated[float, Range(0.1, 10**6)] = 300.0
    """Seconds that a session may take from its agent's start to its reward; below `run.deadline_s`."""
    max_turns: Annotated[int, Range(1, 10**6)] = 64
    """Largest number of requests that an agent may make in one session."""
    max_body_mb: Annotated[float, Range(0, 10**6, open_low=True)] = 16.0
    """Largest body of a request, in MiB."""
