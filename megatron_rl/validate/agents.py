"""The settings with which agents make the rollouts (rollout.endpoint)."""

from __future__ import annotations

from megatron_rl.config import Config
from megatron_rl.errors import ConfigError


def check_agents(config: Config) -> None:
    """Raise ConfigError for agents beside an environment, or whose sessions other parts of the run cannot take."""
    endpoint = config.rollout.endpoint
    if endpoint.agent is None:
        return
    if config.environment.name is not None:
        raise ConfigError(
            f"rollout.endpoint.agent={endpoint.agent} and environment.name={config.environment.name} would both make "
            "the episodes; set one of them to null"
        )
    if endpoint.deadline_s >= config.run.deadline_s:
        raise ConfigError(
            f"rollout.endpoint.deadline_s={endpoint.deadline_s:g} must be below "
            f"run.deadline_s={config.run.deadline_s:g}, for which the other ranks wait; raise that"
        )
    if config.rollout.routing_replay == "rollout":
        raise ConfigError(
            "rollout.routing_replay=rollout replays the engine's experts, which the endpoint does not record; set it "
            "to old_logprobs or off"
        )
