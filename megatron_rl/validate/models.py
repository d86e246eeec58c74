"""Reasons against combinations of settings of a run's models: policy, critic and teacher."""

from __future__ import annotations

import dataclasses
import os

from megatron_rl.config import (
    Config,
    CriticConfig,
    DataConfig,
    ParallelConfig,
    ProfileConfig,
    RolloutConfig,
    TeacherConfig,
)
from megatron_rl.errors import ConfigError, quoted, shortened
from megatron_rl.planning.pipeline_layout import stated_layers


def layout(parallel: ParallelConfig) -> None:
    """Raise ConfigError for a text that is no pipeline layout, or a layout of a wrong number of stages."""
    stated_layers(parallel)


def policy_path(hf_path: str) -> str | None:
    """Refuse a policy without a directory."""
    if not hf_path:
        return "model.hf_path='' names no model; give a Hugging Face directory with config.json and safetensors"
    if _lacks_config(hf_path):
        return (
            f"model.hf_path={quoted(hf_path, 300)} holds no config.json; give a local Hugging Face directory, or "
            "owner/name of the hub"
        )
    return None


def _lacks_config(hf_path: str) -> bool:
    return not os.path.isfile(os.path.join(hf_path, "config.json"))


def provider(
    provider: str,
    lora_rank: int | None,
    has_critic: bool,
    estimator: str,
    has_teacher: bool,
    teacher_path: str | None,
    bitwise: bool,
) -> str | None:
    """Refuse settings that were not tested with models of Megatron-Bridge."""
    if provider == "native":
        return None
    unshown = {
        f"lora.rank={lora_rank}": lora_rank is not None,
        f"advantage.estimator={estimator} (a critic)": has_critic,
        f"teacher.hf_path={quoted(teacher_path)}": bool(has_teacher and teacher_path),
        "rollout.bitwise=true": bitwise,
    }
    setting = next((name for name, is_set in unshown.items() if is_set), None)
    if setting is None:
        return None
    return (
        f"model.provider=bridge was not tested with {setting} and is refused; remove that setting, or use a family "
        "that is built here (model.provider=native, docs/models.md)"
    )


def teacher(
    teacher: TeacherConfig,
    estimator: str,
    has_teacher: bool,
    kl_in_reward: bool,
    off_policy_delta: float | None,
    temperature: float,
) -> str | None:
    """Refuse a teacher's settings without a teacher, and settings that a teacher rules out."""
    if not has_teacher:
        return _unread("teacher", teacher, TeacherConfig(), estimator, "distillation")
    if teacher.hf_path is None and not teacher.servers:
        return (
            "advantage.estimator=distillation has no teacher: name its directory by teacher.hf_path, or servers that "
            "hold it by teacher.servers"
        )
    if teacher.hf_path is not None and _lacks_config(teacher.hf_path):
        return (
            f"teacher.hf_path={quoted(teacher.hf_path, 300)} holds no config.json; give a local Hugging Face directory"
        )
    if kl_in_reward:
        return (
            "reference.kl_in=reward subtracts the KL from a reward, and advantage.estimator=distillation has none; set "
            "reference.kl_in=loss, or loss.kl_coefficient=0"
        )
    if off_policy_delta is not None:
        return _of_one_advantage(off_policy_delta, "distillation")
    if teacher.servers and temperature != 1.0:
        return (
            f"teacher.servers give log-probs at temperature 1, and rollout.temperature={temperature:g}; set "
            "rollout.temperature=1, or name the teacher by teacher.hf_path"
        )
    return None


def critic(config: Config) -> str | None:
    """Refuse a critic's settings without a critic, and settings that a critic rules out."""
    critic, delta = config.critic, config.correction.off_policy_delta
    if not config.has_critic:
        return _unread("critic", critic, CriticConfig(), config.advantage.estimator, "gae")
    from megatron_rl.validate.critic import critic_config

    critic_config(config)
    if critic.hf_path is not None and _lacks_config(critic.hf_path):
        return (
            f"critic.hf_path={quoted(critic.hf_path, 300)} holds no config.json; give a local Hugging Face "
            "directory, or null"
        )
    return None if delta is None else _of_one_advantage(delta, "gae")


def _of_one_advantage(delta: float, estimator: str) -> str:
    return (
        f"correction.off_policy_delta={delta} needs one advantage per sample, and advantage.estimator={estimator} "
        "gives one per token; set correction.off_policy_delta=null"
    )


def _unread(section: str, settings: object, neutral: object, estimator: str, reader: str) -> str | None:
    """Refuse a changed setting of a section that the estimator does not read.

    neutral: the section with its defaults.
    reader: an estimator that reads the section, for the message.
    """
    left_alone = dataclasses.asdict(neutral)
    for name, value in dataclasses.asdict(settings).items():
        if value != left_alone[name]:
            return (
                f"{section}.{name}={shortened(str(value))} and advantage.estimator={shortened(estimator)} has no "
                f"{section}; set advantage.estimator={reader}, or leave it at {left_alone[name]}"
            )
    return None


def check_profile(profile: ProfileConfig, num_ranks: int, *, on_gpu: bool) -> None:
    """Raise ConfigError for a profile of ranks without a policy, or by a tool that this device does not have.

    num_ranks: the number of the policy's ranks.
    on_gpu: whether the run is on a GPU.
    """
    if profile.steps is None:
        return
    outside = [rank for rank in profile.ranks if rank >= num_ranks]
    if outside:
        raise ConfigError(
            f"profile.ranks={list(profile.ranks)} names rank {outside[0]}, and the policy has {num_ranks} ranks, which "
            f"count from 0; give ranks up to {num_ranks - 1}"
        )
    if profile.tool == "nsys" and not on_gpu:
        raise ConfigError(
            "profile.tool=nsys marks ranges on a GPU, and this host has none; take profile.tool=torch, which records "
            "a CPU too"
        )


def beyond_the_end(profile: ProfileConfig, num_steps: int) -> str | None:
    """Return a warning if steps to profile are beyond the run's ``num_steps`` optimizer steps; None if none are."""
    if profile.steps is None or profile.steps[1] <= num_steps:
        return None
    return (
        f"profile.steps={list(profile.steps)} goes beyond the run's {num_steps} optimizer steps; those beyond are not "
        "recorded"
    )


def check_lengths(data: DataConfig, rollout: RolloutConfig, context_tokens: int, of: str = "the model") -> None:
    """Raise ConfigError if the longest prompt and response together do not fit in a model's context."""
    longest = data.max_prompt_tokens + rollout.max_response_tokens
    if longest > context_tokens:
        raise ConfigError(
            f"data.max_prompt_tokens={data.max_prompt_tokens} + "
            f"rollout.max_response_tokens={rollout.max_response_tokens} = {longest} is more than the context "
            f"of {of}: {context_tokens} tokens; lower one of the two"
        )


def check_critic_model(
    critic: CriticConfig | None, data: DataConfig, rollout: RolloutConfig, policy, policy_path: str
) -> None:
    """Raise ConfigError for a critic of other weights whose context or vocabulary is too small for the policy's.

    critic: None in a run without a critic.
    policy, policy_path: the policy's Hugging Face config, and ``model.hf_path``.
    """
    if critic is None or critic.hf_path is None:
        return
    from megatron_rl.weights.config_json import read_hf_config

    model, named = read_hf_config(critic.hf_path, "critic.hf_path"), f"critic.hf_path={quoted(critic.hf_path, 300)}"
    check_lengths(data, rollout, model.max_position_embeddings, of=named)
    if model.vocab_size < policy.vocab_size:
        raise ConfigError(
            f"{named} has a vocabulary of {model.vocab_size} tokens and "
            f"model.hf_path={quoted(policy_path, 300)} has {policy.vocab_size}, so it cannot read the "
            "policy's tokens; give a model with the policy's tokenizer"
        )
