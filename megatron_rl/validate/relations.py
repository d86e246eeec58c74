"""Checks of the settings that only make sense together, before any weight is read. Not a collective."""

from __future__ import annotations

import dataclasses
import os

from megatron_rl.algorithm import own_estimator
from megatron_rl.algorithm.sharing import token_coupling
from megatron_rl.algorithm.signal import signal_rule
from megatron_rl.config import Config, CriticConfig, TeacherConfig
from megatron_rl.config.checks import choose
from megatron_rl.errors import ConfigError, quoted, shortened
from megatron_rl.planning.pipeline_layout import stated_layers
from megatron_rl.users_code import is_own
from megatron_rl.validate.agents import check_agents
from megatron_rl.validate.bitwise import check_bitwise
from megatron_rl.validate.critic import critic_config
from megatron_rl.validate.partial_sync import check_adapters_alone, check_delta
from megatron_rl.validate.stragglers import check_stragglers
from megatron_rl.validate.vllm_arguments import check_vllm_arguments

MOST_SAMPLES = 10**7  # of a rollout


def validate_config(config: Config) -> None:
    """Check the sections of a configuration against one another.

    Raises ConfigError, naming the keys, their values and the way out.
    """
    check_own_parts(config)
    stated_layers(config.parallel)
    signal_rule(config)
    check_reference(config)
    check_preference(config)
    check_teacher(config)
    check_provider(config)
    _check_routing_replay(config)
    if not config.model.hf_path:
        raise ConfigError(
            "model.hf_path='' names no model; give a Hugging Face directory with config.json and safetensors"
        )
    if not os.path.isfile(os.path.join(config.model.hf_path, "config.json")):
        raise ConfigError(
            f"model.hf_path={quoted(config.model.hf_path, 300)} holds no config.json; give a local Hugging Face "
            "directory, or owner/name of the hub"
        )
    if config.train.num_rollouts != 0 and not config.reward.functions and not config.has_teacher:
        raise ConfigError(
            "reward.functions is empty and train.num_rollouts > 0; name one, as in reward.functions=[math_verify]"
        )
    baseline = config.has_critic or config.has_teacher or config.advantage.moves_equal_rewards
    if config.train.num_rollouts != 0 and config.rollout.samples_per_prompt < 2 and not baseline:
        raise ConfigError(
            f"rollout.samples_per_prompt={config.rollout.samples_per_prompt} gives "
            f"advantage.estimator={config.advantage.estimator} no baseline: every advantage would be 0; use at least 2"
        )
    for name in ("start_s", "request_s"):
        value = dataclasses.asdict(config.rollout)[name]
        if config.rollout.engine == "vllm" and value >= config.run.deadline_s:
            raise ConfigError(
                f"rollout.{name}={value:g} must be below run.deadline_s={config.run.deadline_s:g}, which other ranks "
                "wait for; raise that"
            )
    _check_sizes(config)
    _check_asynchronous(config)
    check_bitwise(config)
    check_vllm_arguments(config)
    check_adapters_alone(config)
    check_delta(config)
    _check_critic(config)
    _check_dead_groups(config)
    check_overlong(config)
    check_environment(config)
    check_agents(config)
    evaluation = config.eval
    if evaluation.every_rollouts and not evaluation.named_sets:
        raise ConfigError(
            f"eval.every_rollouts={evaluation.every_rollouts} and eval.path is null, eval.sets empty; name a data "
            "set, or set eval.every_rollouts=null"
        )


def check_own_parts(config: Config) -> None:
    """Raise ConfigError where a policy loss or an estimator of the user's own breaks its contract (docs/your-own.md).

    Each is called on random numbers. A loss that trains at a zero advantage is for ``skip.mode`` to refuse.
    """
    if is_own(config.advantage.estimator):
        own_estimator.require(config.advantage)
    if is_own(config.loss.policy):
        from megatron_rl.algorithm import own_policy_check  # brings torch along

        own_policy_check.require(config.loss)


def check_provider(config: Config) -> None:
    """Raise ConfigError for what was not shown on models of Megatron-Bridge's."""
    if config.model.provider == "native":
        return
    unshown = {
        f"lora.rank={config.lora.rank}": config.lora.rank is not None,
        f"advantage.estimator={config.advantage.estimator} (a critic)": config.has_critic,
        f"teacher.hf_path={quoted(config.teacher.hf_path)}": bool(config.has_teacher and config.teacher.hf_path),
        "rollout.bitwise=true": config.rollout.bitwise,
    }
    if found := [name for name, is_set in unshown.items() if is_set]:
        raise ConfigError(
            f"model.provider=bridge beside {found[0]} was not shown, and is refused; remove that, or take a family "
            "that is built here (model.provider=native, docs/models.md)"
        )


def _check_routing_replay(config: Config) -> None:
    """Raise ConfigError where experts of the old log-probs' pass are replayed and no pass gives those log-probs."""
    if config.rollout.routing_replay != "old_logprobs":
        return
    setting, replay = (
        "rollout.routing_replay=old_logprobs replays the experts of the pass that gives π_old",
        config.replay,
    )
    if config.correction.old_logprobs == "rollout":
        raise ConfigError(
            f"{setting}, and under correction.old_logprobs=rollout there is none; set that to auto, or "
            "rollout.routing_replay=rollout"
        )
    if replay.capacity_groups and not replay.recompute_logprobs:
        raise ConfigError(
            f"{setting}, and under replay.recompute_logprobs=false there is none for groups that are replayed; set "
            "that to true, or rollout.routing_replay=rollout"
        )


def _check_sizes(config: Config) -> None:
    """Raise ConfigError for numbers that each are within their range and together make no sense."""
    optimizer, prompts, samples = config.optimizer, config.train.prompts_per_rollout, config.rollout.samples_per_prompt
    if prompts * samples > MOST_SAMPLES:
        raise ConfigError(
            f"train.prompts_per_rollout={prompts} times rollout.samples_per_prompt={samples} = {prompts * samples} "
            f"samples is more than a rollout may have, {MOST_SAMPLES}; lower one of them"
        )
    if optimizer.min_lr > optimizer.lr > 0 and optimizer.schedule != "constant":
        raise ConfigError(
            f"optimizer.min_lr={optimizer.min_lr} is above optimizer.lr={optimizer.lr}, from which the schedule decays "
            "to it; lower it"
        )
    if optimizer.decay_steps is not None and optimizer.decay_steps <= optimizer.warmup_steps:
        raise ConfigError(
            f"optimizer.decay_steps={optimizer.decay_steps} ends the decay before optimizer.warmup_steps="
            f"{optimizer.warmup_steps} end; raise it, or null for the steps of the run"
        )
    if 0 < config.eval.temperature < 0.01:
        raise ConfigError(
            f"eval.temperature={config.eval.temperature} must be 0 (greedy) or at least 0.01; engines divide by it"
        )


def check_overlong(config: Config) -> None:
    """Raise ConfigError where the overlong buffer is longer than a response may be."""
    buffer, limit = config.reward.overlong_buffer_tokens, config.rollout.max_response_tokens
    if buffer > limit:
        raise ConfigError(
            f"reward.overlong_buffer_tokens={buffer} tokens must fit in rollout.max_response_tokens={limit}; lower it"
        )


def check_environment(config: Config) -> None:
    """Raise ConfigError for a reward without its environment, or a step that may outlast the other ranks' wait."""
    environment = config.environment
    if "environment" in config.reward.functions and not config.plays_episodes:
        raise ConfigError(
            "reward.functions names 'environment', what the samples' environment gives, and environment.name is null; "
            "name one, as in environment.name=calculator, or an agent by rollout.endpoint.agent"
        )
    if environment.name is not None and environment.deadline_s >= config.run.deadline_s:
        raise ConfigError(
            f"environment.deadline_s={environment.deadline_s:g} must be below "
            f"run.deadline_s={config.run.deadline_s:g}, for which the other ranks wait; raise that"
        )


def _check_asynchronous(config: Config) -> None:
    """Raise ConfigError for settings of the rollouts made beside training that contradict one another."""
    producer, rounds = config.rollout.producer, config.rollout.dynamic_sampling.max_rounds
    if (metric := config.rollout.dynamic_sampling.metric) is not None:
        choose("rollout.dynamic_sampling.metric", metric, (*config.reward.functions, "reward", "shaped"))
    if config.replay.capacity_groups and rounds:
        raise ConfigError(
            f"replay.capacity_groups={config.replay.capacity_groups} and rollout.dynamic_sampling.max_rounds={rounds} "
            "both fill the places of groups without signal; set one of them to 0"
        )
    if config.weight_sync.in_flight and (config.rollout.engine != "vllm" or producer.ahead == 0):
        raise ConfigError(
            "weight_sync.in_flight=true sends weights to vLLM engines that generate ahead, and "
            f"rollout.engine={config.rollout.engine}, rollout.producer.mode={producer.mode}, "
            f"prefetch_rollouts={producer.prefetch_rollouts} have none; set it to false, or take rollout.engine=vllm "
            "and rollout.producer.mode=prefetch"
        )
    check_stragglers(config)
    if config.reward.worker_environment and not config.reward.num_workers:
        raise ConfigError(
            f"reward.worker_environment={quoted(list(config.reward.worker_environment))} is for workers, and "
            "reward.num_workers=0 starts none; start some, or leave it out: the rank's own process has its environment"
        )
    if config.reward.num_workers and config.reward.deadline_s >= config.run.deadline_s:
        raise ConfigError(
            f"reward.deadline_s={config.reward.deadline_s:g} must be below run.deadline_s={config.run.deadline_s:g}, "
            "for which the other ranks wait; raise that"
        )


def _refuse_unread(section: str, given: object, neutral: object, estimator: str, reader: str) -> None:
    """Raise ConfigError for a setting of a section that the estimator does not read; ``reader`` is one that does."""
    left_alone = dataclasses.asdict(neutral)
    for name, value in dataclasses.asdict(given).items():
        if value != left_alone[name]:
            raise ConfigError(
                f"{section}.{name}={shortened(str(value))} and advantage.estimator={shortened(estimator)} has no "
                f"{section}; set advantage.estimator={reader}, or leave it at {left_alone[name]}"
            )


def _check_critic(config: Config) -> None:
    """Raise ConfigError for a critic's settings without a critic, or for settings that a critic rules out."""
    critic, estimator = config.critic, config.advantage.estimator
    if not config.has_critic:
        _refuse_unread("critic", critic, CriticConfig(), estimator, "gae")
        return
    critic_config(config)
    if critic.hf_path is not None and not os.path.isfile(os.path.join(critic.hf_path, "config.json")):
        raise ConfigError(
            f"critic.hf_path={quoted(critic.hf_path, 300)} holds no config.json; give a local Hugging Face "
            "directory, or null"
        )
    if config.correction.off_policy_delta is not None:
        raise ConfigError(
            f"correction.off_policy_delta={config.correction.off_policy_delta} drops samples by their one advantage, "
            "and under advantage.estimator=gae each token has its own; set it to null"
        )


def _check_dead_groups(config: Config) -> None:
    """Raise ConfigError for settings about groups without signal where no such groups exist."""
    causes = {
        "advantage.estimator=gae": config.has_critic,
        "advantage.estimator=distillation": config.has_teacher,
        "reference.kl_in=reward": config.kl_in_reward,
        "advantage.moves_equal_rewards=true": config.advantage.moves_equal_rewards,
    }
    cause = next((name for name, holds in causes.items() if holds), None)
    if cause is None:
        return
    settings = {
        "replay.capacity_groups": config.replay.capacity_groups,
        "rollout.dynamic_sampling.max_rounds": config.rollout.dynamic_sampling.max_rounds,
        "advantage.noise_std": config.advantage.noise_std,
    }
    for name, value in settings.items():
        if value:
            raise ConfigError(
                f"{name}={value} is about groups without signal, and under {cause} there are none; set it to 0"
            )


def check_lengths(config: Config, context_tokens: int, of: str = "the model") -> None:
    """Raise ConfigError where prompt and response together do not fit in a model's context."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > context_tokens:
        raise ConfigError(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + "
            f"rollout.max_response_tokens={config.rollout.max_response_tokens} = {longest} is more than the context "
            f"of {of}: {context_tokens} tokens; lower one of the two"
        )


def check_critic_model(config: Config, policy) -> None:
    """Raise ConfigError for a critic of other weights that cannot read the policy's prompts, responses or tokens.

    policy: the policy's Hugging Face config.
    """
    from megatron_rl.weights.config_json import read_hf_config

    if not config.has_critic or config.critic.hf_path is None:
        return
    critic = read_hf_config(config.critic.hf_path, "critic.hf_path")
    check_lengths(config, critic.max_position_embeddings, of=f"critic.hf_path={quoted(config.critic.hf_path, 300)}")
    if critic.vocab_size < policy.vocab_size:
        raise ConfigError(
            f"critic.hf_path={quoted(config.critic.hf_path, 300)} has a vocabulary of {critic.vocab_size} and "
            f"model.hf_path={quoted(config.model.hf_path, 300)} one of {policy.vocab_size}: it could not read the "
            "policy's tokens; give a model of the same tokenizer"
        )


def check_preference(config: Config) -> None:
    """Raise ConfigError where pairs cannot be trained, or their linear loss would not have the pairs' gradient."""
    pairs = config.preference
    if not pairs.is_on:
        return
    if not config.sft.is_on:
        raise ConfigError(
            f"preference.loss={pairs.loss} is trained by the steps of sft, and there are none; set sft.steps"
        )
    if config.rollout.temperature != 1.0:
        raise ConfigError(
            f"rollout.temperature={config.rollout.temperature:g} divides the logits of every log-prob, and "
            f"preference.loss={pairs.loss} is defined at 1; set it to 1"
        )
    if setting := token_coupling(config):
        raise ConfigError(
            f"{setting} gives a sample other log-probs in each pass, and preference.loss={pairs.loss} takes its "
            "coefficients from one pass and its gradient from another; set it to its neutral value"
        )
    if config.trains_reward_model:
        for setting, value, neutral in (
            ("train.num_rollouts", config.train.num_rollouts, 0),
            ("lora.rank", config.lora.rank, None),
            ("eval.path", config.eval.path, None),
            ("eval.sets", config.eval.sets or None, None),
        ):
            if value != neutral:
                raise ConfigError(
                    f"preference.loss=bradley_terry trains a reward model, which has no policy, and {setting}={value}; "
                    f"set it to {'null' if neutral is None else neutral}"
                )


def check_teacher(config: Config) -> None:
    """Raise ConfigError for a teacher's settings without a teacher, or for settings that a teacher rules out."""
    teacher = config.teacher
    if not config.has_teacher:
        _refuse_unread("teacher", teacher, TeacherConfig(), config.advantage.estimator, "distillation")
        return
    if teacher.hf_path is None and not teacher.servers:
        raise ConfigError(
            "advantage.estimator=distillation has no teacher: name its directory by teacher.hf_path, or servers that "
            "hold it by teacher.servers"
        )
    if teacher.hf_path is not None and not os.path.isfile(os.path.join(teacher.hf_path, "config.json")):
        raise ConfigError(
            f"teacher.hf_path={quoted(teacher.hf_path, 300)} holds no config.json; give a local Hugging Face directory"
        )
    if config.kl_in_reward:
        raise ConfigError(
            "reference.kl_in=reward takes the KL off a reward, and advantage.estimator=distillation reads none; set "
            "reference.kl_in=loss, or loss.kl_coefficient=0"
        )
    if config.correction.off_policy_delta is not None:
        raise ConfigError(
            f"correction.off_policy_delta={config.correction.off_policy_delta} drops samples by their one advantage, "
            "and under advantage.estimator=distillation each token has its own; set it to null"
        )
    if teacher.servers and config.rollout.temperature != 1.0:
        raise ConfigError(
            f"rollout.temperature={config.rollout.temperature:g} and teacher.servers, which give log-probs at 1; set "
            "it to 1, or name the teacher by teacher.hf_path"
        )
    if teacher.servers and teacher.request_s >= config.run.deadline_s:
        raise ConfigError(
            f"teacher.request_s={teacher.request_s:g} must be below run.deadline_s={config.run.deadline_s:g}, for "
            "which the other ranks wait; raise that"
        )


def check_reference(config: Config) -> None:
    """Raise ConfigError where ``reference`` contradicts ``loss``, ``advantage`` or the size of a rollout."""
    reference, loss = config.reference, config.loss
    if reference.kl_in == "reward" and loss.kl_estimator == "unbiased":
        raise ConfigError(
            "reference.kl_in=reward with loss.kl_estimator=unbiased: its ratio π_θ/π_old is there for the gradient it "
            "carries, and a reward carries none; take loss.kl_estimator=k3, or reference.kl_in=loss"
        )
    if reference.kl_in == "reward" and config.advantage.estimator == "gdpo":
        raise ConfigError(
            "reference.kl_in=reward with advantage.estimator=gdpo: it standardises every reward function by itself, "
            "and the KL is none of them; take another advantage.estimator, or reference.kl_in=loss"
        )
    if loss.kl_coefficient == 0 and reference.controller == "adaptive":
        raise ConfigError(
            "reference.controller=adaptive moves the KL's coefficient by factors, and loss.kl_coefficient=0 would "
            "stay 0; start above it (0.1, say), or set reference.controller=fixed"
        )
    if loss.kl_coefficient == 0 and reference.refresh_every_rollouts is not None:
        raise ConfigError(
            f"reference.refresh_every_rollouts={reference.refresh_every_rollouts} renews a reference policy that "
            "loss.kl_coefficient=0 never asks; set that above 0, or reference.refresh_every_rollouts=null"
        )
    samples = config.train.prompts_per_rollout * config.rollout.samples_per_prompt
    if reference.controller == "adaptive" and samples >= 5 * reference.kl_horizon:
        raise ConfigError(
            f"reference.kl_horizon={reference.kl_horizon} is too short for rollouts of "
            f"train.prompts_per_rollout={config.train.prompts_per_rollout} times "
            f"rollout.samples_per_prompt={config.rollout.samples_per_prompt} = {samples} samples: one of them could "
            f"take the KL's coefficient to 0; give more than {samples // 5}"
        )
