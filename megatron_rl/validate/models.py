"""Functions that return an error message if settings of policy, critic or teacher cannot go together, else None."""

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
    """Raise ConfigError if ``parallel.pipeline_layout`` cannot be parsed, or has a wrong number of stages."""
    stated_layers(parallel)


def policy_path(hf_path: str) -> str | None:
    """Return an error message if ``model.hf_path`` is empty or holds no config.json, else None."""
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
    """Return an error message if Megatron-Bridge builds the model and a setting was not tested with that, else None.

    provider: ``model.provider``: "bridge", or "native" for models that are built here.
    """
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


def muon(algorithm: str, lora_rank: int | None, provider: str) -> str | None:
    """Return an error message if ``optimizer.algorithm=muon`` is set for a model whose matrices it does not step.

    lora_rank: ``lora.rank``; None: no adapters.
    provider: ``model.provider``.
    """
    if algorithm != "muon":
        return None
    if lora_rank is not None:
        return (
            f"optimizer.algorithm=muon steps whole weight matrices, and lora.rank={lora_rank} trains adapters alone, "
            "which are factors of matrices; set optimizer.algorithm=adam, or lora.rank=null"
        )
    if provider != "native":
        return (
            f"optimizer.algorithm=muon knows the matrices of families that are built here, and model.provider="
            f"{provider} builds others; set optimizer.algorithm=adam, or model.provider=native"
        )
    return None


def spread_masters(spread: bool, lora_rank: int | None, dtype: str) -> str | None:
    """Return an error message if ``optimizer.spread_masters`` is set for weights whose masters no bfloat16 file holds.

    lora_rank: ``lora.rank``; None: no adapters.
    dtype: ``model.dtype``; float32 weights have no masters.
    """
    if not spread:
        return None
    if lora_rank is not None:
        return (
            "optimizer.spread_masters=true spreads the masters of weights in bfloat16 files, and "
            f"lora.rank={lora_rank} trains adapters alone, which begin at drawn values; "
            "set optimizer.spread_masters=false, or lora.rank=null"
        )
    if dtype == "float32":
        return (
            "optimizer.spread_masters=true spreads the float32 masters of bfloat16 weights, and weights of "
            "model.dtype=float32 have none; set optimizer.spread_masters=false, or model.dtype=bfloat16"
        )
    return None


def teacher(
    teacher: TeacherConfig,
    estimator: str,
    has_teacher: bool,
    kl_in_reward: bool,
    off_policy_delta: float | None,
    temperature: float,
) -> str | None:
    """Return an error message if the teacher's settings cannot work, else None.

    They cannot work if they are changed in a run without a teacher, if the teacher has neither weights
    nor servers, or if another setting rules out a teacher.
    """
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
    """Return an error message if the critic's settings cannot work, else None.

    They cannot work if they are changed in a run without a critic, if ``critic.hf_path`` has no
    config.json, or if another setting rules out a critic. Raises ConfigError for an unknown field of
    ``critic.parallel`` or ``critic.optimizer``.
    """
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
    """Return an error message if a section that the advantage estimator does not read has a changed setting, else None.

    settings: the section, an instance of its dataclass.
    neutral: the same section with its defaults.
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
    """Raise ConfigError for a profile of ranks that hold no policy, or a profile by nsys on a host without a GPU.

    num_ranks: the number of ranks that hold the policy; they come first.
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
    """Return a warning if ``profile.steps`` goes beyond the run's ``num_steps`` optimizer steps, else None."""
    if profile.steps is None or profile.steps[1] <= num_steps:
        return None
    return (
        f"profile.steps={list(profile.steps)} goes beyond the run's {num_steps} optimizer steps; those beyond are not "
        "recorded"
    )


def check_lengths(data: DataConfig, rollout: RolloutConfig, context_tokens: int, of: str = "the model") -> None:
    """Raise ConfigError if the longest prompt and the longest response together exceed a model's context.

    context_tokens: the number of tokens of the context.
    of: the model's name in the message.
    """
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
    """Raise ConfigError if ``critic.hf_path`` has too small a context, or a smaller vocabulary than the policy.

    critic: None in a run without a critic. A critic without ``hf_path`` is not checked.
    policy: the policy's Hugging Face config.
    policy_path: ``model.hf_path``, for the message.
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
