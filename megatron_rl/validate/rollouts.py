"""Functions that return an error message if settings of rollouts cannot go together, else None.

They cover engines, rollouts ahead of training, weight sync, environments, reward workers and
evaluation.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from megatron_rl.config.checks import choose
from megatron_rl.config.lora import VLLM_LORA_RANKS
from megatron_rl.config.rollout import WEIGHT_DRAFTERS
from megatron_rl.errors import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_rl.config import (
        EndpointConfig,
        EnvironmentConfig,
        EvalConfig,
        ModelConfig,
        ParallelConfig,
        ProducerConfig,
        RewardConfig,
        RolloutConfig,
        SkipConfig,
        TeacherConfig,
        TrainConfig,
        WeightSyncConfig,
    )

# Arguments of vLLM's engines that the run itself sets → the setting or fact that decides each.
OWNED_ARGUMENTS = {
    "model": "model.hf_path",
    "tokenizer": "model.tokenizer_path",
    "skip_tokenizer_init": "token ids travel, never texts",
    "dtype": "model.dtype",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "logprobs_mode": "log-probs are at the sampling temperature",
    "worker_extension_cls": "it takes the weights",
    "weight_transfer_config": "weight_sync.channel",
    "enable_sleep_mode": "rollout.sleep",
    "sleep_preserve_parameter_names": "rollout.speculation",
    "generation_config": "rollout.temperature",
    "load_format": "weights come by weight_sync",
    "enable_return_routed_experts": "rollout.routing_replay",
    "enable_lora": "weight_sync.adapters",
    "max_loras": "weight_sync.adapters",
    "max_cpu_loras": "weight_sync.adapters",
    "max_lora_rank": "lora.rank",
    "lora_dtype": "model.dtype",
    "lora_target_modules": "lora.targets",
}


def _late(key: str, seconds: float, deadline_s: float) -> str | None:
    """Return an error message if a wait of ``seconds`` is not shorter than ``run.deadline_s``, else None.

    The other ranks wait at most ``run.deadline_s`` for a rank.

    key: the setting of the wait.
    """
    if seconds < deadline_s:
        return None
    return (
        f"{key}={seconds:g} must be below run.deadline_s={deadline_s:g}, because the other ranks wait no longer; raise "
        f"run.deadline_s or lower {key}"
    )


def teachers_answer(teacher: TeacherConfig, deadline_s: float) -> str | None:
    """Return an error message if a wait for a teacher's servers may last ``deadline_s`` or longer, else None.

    deadline_s: ``run.deadline_s``, the seconds that ranks wait for one another.
    """
    return _late("teacher.request_s", teacher.request_s, deadline_s) if teacher.servers else None


def engines_answer(rollout: RolloutConfig, deadline_s: float) -> str | None:
    """Return an error message if a wait for vLLM's engines may last ``deadline_s`` or longer, else None.

    deadline_s: ``run.deadline_s``, the seconds that ranks wait for one another.
    """
    if rollout.engine != "vllm":
        return None
    for name, seconds in (("start_s", rollout.start_s), ("request_s", rollout.request_s)):
        if late := _late(f"rollout.{name}", seconds, deadline_s):
            return late
    return None


def metric(metric: str | None, functions: tuple[str, ...]) -> None:
    """Raise ConfigError if ``rollout.dynamic_sampling.metric`` names no reward of the run.

    functions: ``reward.functions``.
    """
    if metric is not None:
        choose("rollout.dynamic_sampling.metric", metric, (*functions, "reward", "shaped"))


def replay_beside_refill(capacity_groups: int, rounds: int) -> str | None:
    """Return an error message if replay and dynamic sampling are both on, else None.

    Both replace groups that have no gradient.

    capacity_groups, rounds: ``replay.capacity_groups`` and ``rollout.dynamic_sampling.max_rounds``.
    """
    if not (capacity_groups and rounds):
        return None
    return (
        f"replay.capacity_groups={capacity_groups} and rollout.dynamic_sampling.max_rounds={rounds} both fill the "
        "places of groups without signal; set one of them to 0"
    )


def in_flight(in_flight: bool, engine: str, producer: ProducerConfig) -> str | None:
    """Return an error message if weights should be sent during generation and no engine can do that, else None.

    Only vLLM engines that generate ahead of training can.
    """
    if not in_flight or (engine == "vllm" and producer.ahead > 0):
        return None
    return (
        f"weight_sync.in_flight=true sends weights to vLLM engines that generate ahead, and rollout.engine={engine}, "
        f"rollout.producer.mode={producer.mode}, prefetch_rollouts={producer.prefetch_rollouts} have none; set it to "
        "false, or take rollout.engine=vllm and rollout.producer.mode=prefetch"
    )


def stragglers(
    rollout: RolloutConfig,
    weight_sync: WeightSyncConfig,
    environment: str | None,
    train: TrainConfig,
    skip: SkipConfig,
) -> str | None:
    """Return an error message if ``rollout.producer.straggler_share`` clashes with other settings, else None.

    Under it a rollout is trained before its slowest groups (stragglers) end; these are trained one
    rollout later. That needs ``weight_sync.in_flight``: otherwise the next weight sync would wait for
    the stragglers. Stragglers cannot be combined with:

    - ``rollout.producer.min_groups``, which scores a fixed number of groups at a time;
    - dynamic sampling, which waits for all prompts;
    - an environment, whose engine runs one call at a time.

    Stragglers are trained one rollout's optimizer steps late; a staleness limit must be at least this
    number.
    """
    # A share that is no group, settings that exclude stragglers, then their age.
    producer = rollout.producer
    share, prompts = producer.straggler_share, train.prompts_per_rollout
    if not share:
        return None
    if not producer.num_stragglers(prompts):
        return (
            f"rollout.producer.straggler_share={share:g} of train.prompts_per_rollout={prompts} is less than one "
            f"group; set it to at least {1 / prompts:.3g}, or to 0"
        )
    needed = (
        ("weight_sync.in_flight", weight_sync.in_flight, True),
        ("rollout.producer.mode", producer.mode, "prefetch"),
        ("rollout.producer.min_groups", producer.min_groups, None),
        ("rollout.dynamic_sampling.max_rounds", rollout.dynamic_sampling.max_rounds, 0),
        ("environment.name", environment, None),
    )
    for name, value, wanted in needed:
        if value != wanted:
            return (
                f"rollout.producer.straggler_share={share:g} leaves groups under way while their rollout is trained, "
                f"which {name}={json.dumps(value)} rules out; set {name}={json.dumps(wanted)}, or "
                "rollout.producer.straggler_share=0"
            )
    from megatron_rl.planning.num_steps import steps_per_rollout

    steps, limit = steps_per_rollout(train, rollout, skip), producer.max_staleness_steps
    if limit is not None and limit < steps:
        return (
            f"rollout.producer.straggler_share={share:g} trains groups one rollout, {steps} optimizer steps, after "
            f"their own, and rollout.producer.max_staleness_steps={limit}; set that limit to "
            f"at least {steps}, or to null"
        )
    return None


def reward_workers(reward: RewardConfig, deadline_s: float) -> str | None:
    """Return an error message if reward workers have settings but none is started, or their deadline is too long.

    Otherwise it returns None. ``reward.deadline_s`` must be below ``deadline_s`` (``run.deadline_s``),
    the seconds that ranks wait for one another.
    """
    if reward.worker_environment and not reward.num_workers:
        return (
            f"reward.worker_environment={quoted(list(reward.worker_environment))} is for workers, and "
            "reward.num_workers=0 starts none; start some, or leave it out: the rank's own process has its environment"
        )
    bounds_calls = reward.num_workers or reward.decided is not None
    return _late("reward.deadline_s", reward.deadline_s, deadline_s) if bounds_calls else None


def bitwise(
    rollout: RolloutConfig,
    parallel: ParallelConfig,
    fields: Mapping[str, object],
    lora_rank: int | None,
    model: ModelConfig,
    interval_steps: int,
    old_logprobs: str,
    capacity_groups: int,
) -> str | None:
    """Return an error message if ``rollout.bitwise`` is set with a setting that makes log-probs differ, else None.

    ``rollout.bitwise`` demands bitwise equal log-probs of engine and trainer; docs/bitwise.md gives
    the reasons.

    fields: the configured fields of Megatron-Core's TransformerConfig.
    interval_steps, old_logprobs, capacity_groups: ``weight_sync.interval_steps``,
        ``correction.old_logprobs`` and ``replay.capacity_groups``.
    """
    # (setting, value, values that agree to the bit with the neutral one last, reason against all others)
    if not rollout.bitwise:
        return None
    allowed: list[tuple[str, object, tuple[object, ...], str]] = [
        ("rollout.engine", rollout.engine, ("transformers",), "vLLM computes with kernels of its own"),
        ("parallel.sequence_parallel", parallel.sequence_parallel, (False,), "its sums have no order of ranks"),
        ("parallel.context", parallel.context, (1,), "its attention needs sequences whole on a rank"),
        ("parallel.expert", parallel.expert, (1,), "it is for dense models"),
        ("lora.rank", lora_rank, (None,), "adapters are added to a product here and merged in the engine"),
        ("model.layer_spec", model.layer_spec, ("auto", "torch"), "its layers are row-invariant ones"),
        ("model.logprob_kernel", model.logprob_kernel, ("auto", "torch"), "its kernel is a row-invariant one"),
        ("rollout.producer.mode", rollout.producer.mode, ("sync",), "rollouts ahead have older weights"),
        ("weight_sync.interval_steps", interval_steps, (1,), "the engine's weights would lag"),
        ("correction.old_logprobs", old_logprobs, ("recompute", "auto"), "it would compare nothing"),
        ("replay.capacity_groups", capacity_groups, (0,), "replayed groups have older weights"),
        *(
            (f"megatron.transformer.{name}", fields.get(name), (None, 0, 0.0), "dropout is another pass's noise")
            for name in ("attention_dropout", "hidden_dropout")
        ),
    ]
    for key, value, values, why in allowed:
        if value not in values:
            now, neutral = (x if isinstance(x, str) else json.dumps(x) for x in (value, values[-1]))
            return (
                f"rollout.bitwise=true does not hold with {key}={now}: {why}; set {key}={neutral}, or "
                "rollout.bitwise=false"
            )
    return None


def bitwise_of_nothing(bitwise: bool, num_rollouts: int | None) -> str | None:
    """Return an error message if ``rollout.bitwise`` is set in a run without rollouts, else None."""
    if not bitwise or num_rollouts != 0:
        return None
    return "rollout.bitwise=true compares rollouts, and train.num_rollouts=0 has none; set rollout.bitwise=false"


def vllm_arguments(arguments: Mapping[str, object], drafter: str) -> str | None:
    """Return an error message if ``rollout.vllm`` has an argument that the run itself sets, else None.

    The message may also be of speculative decoding that samples from another distribution (speculation.py).

    arguments: ``rollout.vllm``, arguments by name.
    drafter: ``rollout.speculation``.
    """
    for name, value in arguments.items():
        if name in OWNED_ARGUMENTS:
            return f"rollout.vllm.{name}={quoted(value)} must not be set: {OWNED_ARGUMENTS[name]} decides it"
    if drafter == "off" and arguments.get("speculative_config") is None:
        return None
    from megatron_rl.validate.speculation import speculation

    return speculation(arguments, drafter)


def drafts(rollout: RolloutConfig) -> str | None:
    """Return an error message if ``rollout.speculation`` is set beside what it does not work with, else None."""
    if rollout.speculation == "off":
        return None
    from megatron_rl.validate.speculation import drafts_beside

    return drafts_beside(rollout)


def adapters_alone(adapters: str, rank: int | None, rollout: RolloutConfig) -> str | None:
    """Return an error message if only LoRA adapters should be sent to engines and that is impossible, else None.

    It is impossible without adapters, and for engines that cannot load them.

    adapters: ``weight_sync.adapters``: "alone", or "merged" into the weights.
    rank: ``lora.rank``; None: no adapters.
    """
    if adapters == "merged":
        return None
    if rank is None or rollout.engine != "vllm":
        return (
            "weight_sync.adapters=alone sends adapters to vLLM engines, and lora.rank="
            f"{'null' if rank is None else rank}, rollout.engine={rollout.engine}; set both, or "
            "weight_sync.adapters=merged"
        )
    if rollout.servers:
        return (
            f"weight_sync.adapters=alone and rollout.servers={quoted(list(rollout.servers))}: a vLLM server takes "
            "adapters from files of its own host alone, by name; use engines of the run's own, or set "
            "weight_sync.adapters=merged"
        )
    most = max(VLLM_LORA_RANKS)
    if rank > most:
        return (
            f"lora.rank={rank} is more than vLLM's engines hold, {most}; lower lora.rank, or set "
            "weight_sync.adapters=merged"
        )
    if rollout.speculation in WEIGHT_DRAFTERS:
        return (
            f"weight_sync.adapters=alone with rollout.speculation={rollout.speculation}: vLLM's adapters were not run "
            "beside a drafter with weights; set weight_sync.adapters=merged, or rollout.speculation=off"
        )
    return None


def delta(weight_sync: WeightSyncConfig, engine: str) -> str | None:
    """Return an error message if ``weight_sync.delta`` (send changed weights alone) cannot work, else None.

    It needs vLLM engines, and excludes ``weight_sync.adapters=alone``.
    """
    if not weight_sync.delta:
        return None
    if engine != "vllm":
        return (
            f"weight_sync.delta=true sends vLLM engines what changed, and rollout.engine={engine} reads the weights in "
            "the trainer's own process; set weight_sync.delta=false, or take rollout.engine=vllm"
        )
    if weight_sync.adapters == "alone":
        return (
            "weight_sync.delta=true and weight_sync.adapters=alone both send less than all weights, and adapters "
            "change in every value; set weight_sync.delta=false, or weight_sync.adapters=merged"
        )
    return None


def environment(
    environment: EnvironmentConfig, functions: tuple[str, ...], plays_episodes: bool, deadline_s: float
) -> str | None:
    """Return an error message if the reward ``environment`` has no source, or its deadline is too long, else None.

    Its source is an environment or an agent.

    functions: ``reward.functions``.
    plays_episodes: whether an environment or an agent makes the samples.
    deadline_s: ``run.deadline_s``, the seconds that ranks wait for one another;
        ``environment.deadline_s`` must be below it.
    """
    if "environment" in functions and not plays_episodes:
        return (
            "reward.functions names 'environment', what the samples' environment gives, and environment.name is null; "
            "name one, as in environment.name=calculator, or an agent by rollout.endpoint.agent"
        )
    return _late("environment.deadline_s", environment.deadline_s, deadline_s) if environment.name is not None else None


def agents(endpoint: EndpointConfig, environment: str | None, deadline_s: float, routing_replay: str) -> str | None:
    """Return an error message if an agent's settings cannot work, else None.

    They cannot work with an environment, with the engine's routing replay, or with too long a
    deadline.

    deadline_s: ``run.deadline_s``, the seconds that ranks wait for one another;
        ``rollout.endpoint.deadline_s`` must be below it.
    """
    if endpoint.agent is None:
        return None
    if environment is not None:
        return (
            f"rollout.endpoint.agent={endpoint.agent} and environment.name={environment} would both make the episodes; "
            "set one of them to null"
        )
    if late := _late("rollout.endpoint.deadline_s", endpoint.deadline_s, deadline_s):
        return late
    if routing_replay == "rollout":
        return (
            "rollout.routing_replay=rollout replays the engine's experts, which the endpoint does not record; set it "
            "to old_logprobs or off"
        )
    return None


def evaluation_temperature(temperature: float) -> str | None:
    """Return an error message if evaluation's temperature is above 0 and too small to divide by, else None."""
    if not 0 < temperature < 0.01:
        return None
    return f"eval.temperature={temperature} must be 0 (greedy) or at least 0.01; engines divide by it"


def evaluation(evaluation: EvalConfig) -> str | None:
    """Return an error message if evaluation is switched on without a data set, else None."""
    if not evaluation.every_rollouts or evaluation.named_sets:
        return None
    return (
        f"eval.every_rollouts={evaluation.every_rollouts} and eval.path is null, eval.sets empty; name a data "
        "set, or set eval.every_rollouts=null"
    )


def group_sizes(rollout: RolloutConfig, train: TrainConfig, estimator: str, denominator: str) -> str | None:
    """Return an error message if adaptive group sizes would bias the gradient, or do not fit, else None.

    estimator, denominator: ``advantage.estimator`` and ``loss.denominator``.
    """
    if rollout.group_sizes == "fixed":
        return None
    from megatron_rl.validate.groups import adaptive_sizes

    return adaptive_sizes(rollout, train, estimator, denominator)
