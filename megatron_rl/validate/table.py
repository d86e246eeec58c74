"""The table of refused combinations of settings, and the function that checks a configuration against it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.errors import ConfigError
from megatron_rl.validate import models, objective, rollouts

WHOLE = ("",)  # a row that reads the whole configuration
Reason = Callable[..., str | None]


@dataclass(frozen=True, slots=True)
class Row:
    """Describes one refused combination of settings.

    refused: the combination, in words.
    reads: the dotted keys of the Config's sections, settings or properties whose values are the
        arguments of ``reason``, in order.
    reason: a function that returns why these values cannot go together, with the way out. It
        returns None if they can, and may raise ConfigError in place of a return.
    """

    refused: str
    reads: tuple[str, ...]
    reason: Reason


# Rows are checked in this order, and a user sees the first fault.
TABLE = (
    Row("a part of the user's own that breaks its contract", ("advantage", "loss"), objective.own_parts),
    Row("a pipeline layout of other stages", ("parallel",), models.layout),
    Row("an exact skip that is not exact, a loss that is no sum of tokens", WHOLE, objective.exact_skip),
    Row(
        "a reference at odds with the loss",
        ("reference", "loss", "advantage.estimator", "train.prompts_per_rollout", "rollout.samples_per_prompt"),
        objective.reference,
    ),
    Row(
        "pairs that cannot be trained",
        ("preference", "sft", "rollout.temperature", "megatron", "train.num_rollouts", "lora.rank", "eval"),
        objective.pairs,
    ),
    Row(
        "a teacher that nothing asks, or beside what it rules out",
        (
            *("teacher", "advantage.estimator", "has_teacher", "kl_in_reward", "correction.off_policy_delta"),
            "rollout.temperature",
        ),
        models.teacher,
    ),
    Row("a teacher's servers that answer too late", ("teacher", "run.deadline_s"), rollouts.teachers_answer),
    Row(
        "parts that were not shown on Megatron-Bridge's models",
        (
            *("model.provider", "lora.rank", "has_critic", "advantage.estimator", "has_teacher", "teacher.hf_path"),
            "rollout.bitwise",
        ),
        models.provider,
    ),
    Row("Muon for what are no whole matrices", ("optimizer.algorithm", "lora.rank", "model.provider"), models.muon),
    Row(
        "spread masters of weights that have none, or none in files",
        ("optimizer.spread_masters", "lora.rank", "model.dtype"),
        models.spread_masters,
    ),
    Row(
        "replayed experts of a pass that is not run",
        ("rollout.routing_replay", "correction", "replay"),
        objective.routing_replay,
    ),
    Row("a policy without a directory", ("model.hf_path",), models.policy_path),
    Row("rollouts without a reward", ("train.num_rollouts", "reward.functions", "has_teacher"), objective.no_reward),
    Row(
        "groups of one sample",
        ("train.num_rollouts", "rollout.samples_per_prompt", "advantage", "has_critic", "has_teacher"),
        objective.no_baseline,
    ),
    Row("engines that answer too late", ("rollout", "run.deadline_s"), rollouts.engines_answer),
    Row(
        "a rollout of too many samples",
        ("train.prompts_per_rollout", "rollout.samples_per_prompt"),
        objective.rollout_size,
    ),
    Row(
        "unequal groups that would change the expected gradient, or that do not fit",
        ("rollout", "train", "advantage.estimator", "loss.denominator"),
        rollouts.group_sizes,
    ),
    Row("a learning rate that decays upwards or too early", ("optimizer",), objective.schedule),
    Row("a temperature near 0", ("eval.temperature",), rollouts.evaluation_temperature),
    Row("a metric that no reward gives", ("rollout.dynamic_sampling.metric", "reward.functions"), rollouts.metric),
    Row(
        "replay beside dynamic sampling",
        ("replay.capacity_groups", "rollout.dynamic_sampling.max_rounds"),
        rollouts.replay_beside_refill,
    ),
    Row(
        "weights in flight with nothing under way",
        ("weight_sync.in_flight", "rollout.engine", "rollout.producer"),
        rollouts.in_flight,
    ),
    Row(
        "stragglers that no rollout can leave",
        ("rollout", "weight_sync", "environment.name", "train", "skip"),
        rollouts.stragglers,
    ),
    Row("reward workers that are not started or too slow", ("reward", "run.deadline_s"), rollouts.reward_workers),
    Row(
        "what is not equal to the bit",
        (
            *("rollout", "parallel", "megatron.transformer", "lora.rank", "model", "weight_sync.interval_steps"),
            *("correction.old_logprobs", "replay.capacity_groups"),
        ),
        rollouts.bitwise,
    ),
    Row(
        "rollouts equal to the bit that are none",
        ("rollout.bitwise", "train.num_rollouts"),
        rollouts.bitwise_of_nothing,
    ),
    Row(
        "arguments of vLLM's that the run decides, or that falsify it",
        ("rollout.vllm", "rollout.speculation"),
        rollouts.vllm_arguments,
    ),
    Row("drafted tokens beside what excludes them", ("rollout",), rollouts.drafts),
    Row(
        "adapters alone for engines without them",
        ("weight_sync.adapters", "lora.rank", "rollout"),
        rollouts.adapters_alone,
    ),
    Row("changed weights for an engine that shares them", ("weight_sync", "rollout.engine"), rollouts.delta),
    Row("a critic that nothing asks, or beside what it rules out", WHOLE, models.critic),
    Row(
        "care for groups without signal where all have it",
        (
            *("has_critic", "has_teacher", "kl_in_reward", "advantage", "replay.capacity_groups"),
            "rollout.dynamic_sampling.max_rounds",
        ),
        objective.dead_groups,
    ),
    Row(
        "an overlong buffer beyond the response",
        ("reward.overlong_buffer_tokens", "rollout.max_response_tokens"),
        objective.overlong,
    ),
    Row(
        "early ends of samples whose reward their end decides, or that nothing looks at",
        ("reward", "rollout", "loss.mask_truncated", "plays_episodes"),
        objective.early_ends,
    ),
    Row(
        "an environment that is missing or too slow",
        ("environment", "reward.functions", "plays_episodes", "run.deadline_s"),
        rollouts.environment,
    ),
    Row(
        "agents beside what they rule out",
        ("rollout.endpoint", "environment.name", "run.deadline_s", "rollout.routing_replay"),
        rollouts.agents,
    ),
    Row("an evaluation of nothing", ("eval",), rollouts.evaluation),
)


def validate_config(config: Config, *only: Reason) -> None:
    """Raise ConfigError for the first refused combination of settings in a configuration, by the order of TABLE.

    The error names the keys, their values and the way out.

    only: if given, only rows whose ``reason`` is one of these functions are checked.
    """
    for row in TABLE:
        if only and row.reason not in only:
            continue
        values = [operator.attrgetter(key)(config) if key else config for key in row.reads]
        if reason := row.reason(*values):
            raise ConfigError(reason)
