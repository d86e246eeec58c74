"""Settings that contradict others are refused before anything is read, by name."""

import pathlib

import pytest

from megatron_rl.config import EndpointConfig, load_config
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.endpoint.agents import agent_of
from megatron_rl.validate import rollouts, validate_config

AGENT = "rollout.endpoint.agent=tests.unit.config.test_validate:play"


def play(base_url, row, patience):
    return patience


def test_agents_are_refused_beside() -> None:
    for given, message in (
        (["environment.name=calculator"], "would both make the episodes"),
        (["rollout.endpoint.deadline_s=99", "run.deadline_s=99"], "must be below run.deadline_s=99"),
        (["rollout.routing_replay=rollout"], "which the endpoint does not record"),
    ):
        validate_config(load_config(None, given), rollouts.agents)  # without an agent nothing is refused
        with pytest.raises(ConfigError, match=message):
            validate_config(load_config(None, [AGENT, *given]), rollouts.agents)


def test_the_sessions_reward_needs_an_agent_or_an_environment() -> None:
    reward = ["reward.functions=[environment]"]
    validate_config(load_config(None, [AGENT, *reward]), rollouts.environment)
    with pytest.raises(ConfigError, match=r"or an agent by rollout\.endpoint\.agent"):
        validate_config(load_config(None, reward), rollouts.environment)


def test_an_agent_is_called_with_its_arguments() -> None:
    name = AGENT.partition("=")[2]
    assert agent_of(EndpointConfig(agent=name, arguments={"patience": 2.0}))("http://127.0.0.1", {}) == 2.0
    with pytest.raises(ConfigError, match="missing a required argument: 'patience'; it takes"):
        agent_of(EndpointConfig(agent=name))
    with pytest.raises(ConfigError, match="is a str; name a function"):
        agent_of(EndpointConfig(agent="tests.unit.config.test_validate:AGENT"))


# Settings under which rollout.bitwise cannot be had.
NOT_BITWISE = (*("parallel.context=2", "parallel.expert=2", "lora.rank=4", "model.layer_spec=transformer_engine"),
               *("model.logprob_kernel=triton", "rollout.engine=vllm", "rollout.producer.mode=prefetch"),
               *("weight_sync.interval_steps=2", "correction.old_logprobs=rollout", "replay.capacity_groups=8"),
               *("megatron.transformer.hidden_dropout=0.1", "megatron.transformer.attention_dropout=0.1"))


@pytest.mark.parametrize("setting", NOT_BITWISE)
def test_a_setting_that_bitwise_cannot_have_is_refused_by_name(arithmetic: pathlib.Path, setting: str) -> None:
    given = [f"model.hf_path={arithmetic}/model", "reward.functions=arithmetic", "skip.mode=off"]
    validate_config(load_config(None, [*given, "rollout.bitwise=true"]))
    validate_config(load_config(None, [*given, setting]))
    with pytest.raises(ConfigError, match=f"rollout.bitwise=true does not hold with {setting}: .*rollout.bitwise=f"):
        validate_config(load_config(None, [*given, setting, "rollout.bitwise=true"]))


def test_sequence_parallelism_and_a_run_without_rollouts_are_refused(arithmetic: pathlib.Path) -> None:
    given = [f"model.hf_path={arithmetic}/model", "rollout.bitwise=true"]
    parallel = ["reward.functions=arithmetic", "parallel.tensor=2", "parallel.sequence_parallel=true"]
    with pytest.raises(ConfigError, match="does not hold with parallel.sequence_parallel=true: .*=false, or rollout"):
        validate_config(load_config(None, [*given, *parallel]))
    with pytest.raises(ConfigError, match="train.num_rollouts=0 has none"):
        validate_config(load_config(None, [*given, "train.num_rollouts=0", "sft.steps=3"]))


def test_sizes_at_odds_are_refused(arithmetic: pathlib.Path) -> None:
    for overrides, words in (
        (["train.prompts_per_rollout=1000000", "rollout.samples_per_prompt=100"], "= 100000000 samples is more than"),
        (["optimizer.schedule=cosine", "optimizer.lr=1e-6", "optimizer.min_lr=1e-5"], "is above optimizer.lr=1e-06"),
        (["optimizer.warmup_steps=5", "optimizer.decay_steps=5"], "ends the decay before optimizer.warmup_steps=5 end"),
        (["eval.temperature=0.001"], r"must be 0 \(greedy\) or at least 0.01"),
    ):
        given = [f"model.hf_path={arithmetic}/model", "reward.functions=arithmetic"]
        validate_config(load_config(None, given))
        with pytest.raises(ConfigError, match=words):
            validate_config(load_config(None, [*given, *overrides]))
