"""Settings of agents that contradict others, and agents that cannot be called."""

from __future__ import annotations

import pytest

from megatron_rl.config import EndpointConfig, load_config
from megatron_rl.config.agents import check_agents
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.endpoint.agents import agent_of
from megatron_rl.validate import check_environment

AGENT = "rollout.endpoint.agent=tests.unit.config.test_agents:play"


def play(base_url, row, patience):
    return patience


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["environment.name=calculator"], "would both make the episodes"),
        (["rollout.endpoint.deadline_s=99", "run.deadline_s=99"], "must be below run.deadline_s=99"),
        (["rollout.routing_replay=rollout"], "which the endpoint does not record"),
    ],
)
def test_agents_are_refused_beside(given, message) -> None:
    check_agents(load_config(None, given))  # without an agent nothing is refused
    with pytest.raises(ConfigError, match=message):
        check_agents(load_config(None, [AGENT, *given]))


def test_the_sessions_reward_needs_an_agent_or_an_environment() -> None:
    reward = ["reward.functions=[environment]"]
    check_environment(load_config(None, [AGENT, *reward]))
    with pytest.raises(ConfigError, match=r"or an agent by rollout\.endpoint\.agent"):
        check_environment(load_config(None, reward))


def test_an_agent_is_called_with_its_arguments() -> None:
    name = AGENT.partition("=")[2]
    assert agent_of(EndpointConfig(agent=name, arguments={"patience": 2.0}))("http://127.0.0.1", {}) == 2.0
    with pytest.raises(ConfigError, match="missing a required argument: 'patience'; it takes"):
        agent_of(EndpointConfig(agent=name))
    with pytest.raises(ConfigError, match="is a str; name a function"):
        agent_of(EndpointConfig(agent="tests.unit.config.test_agents:AGENT"))
