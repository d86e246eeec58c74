"""The translation of settings of TRL's GRPOTrainer (1.16.0).

They come from a YAML of ``trl grpo --config`` or of an open-r1 recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.commands.translate import trl_job
from megatron_rl.commands.translate.translation import Translation, number, paths, truth, whole

# TRL's defaults of translated settings, used if the user's file leaves them out.
DEFAULTS: dict[str, Any] = trl_job.DEFAULTS | {
    "learning_rate": 1e-6,
    "num_generations": 8,
    "max_completion_length": 512,
    "num_iterations": 1,
    "beta": 0.0,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "importance_sampling_level": "token",
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "use_bias_correction_kl": True,
}
REDUCTIONS = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "dr_grpo": "sequence_sum_norm",
    "luspo": "sequence_sum_mean",
}
NEEDLESS = (
    *trl_job.NEEDLESS,
    "steps_per_generation",
    "generation_batch_size",
    "vllm_device",
    "vllm_mode",
    "vllm_enable_sleep_mode",
    "ds3_gather_for_generation",
    "log_completions",
    "num_completions_to_print",
    "log_unique_prompts",
)


def translate(
    settings: Mapping[str, Any], unknown: Mapping[str, str] | None = None, *, processes: int | None = None
) -> Translation:
    """Return the translation of settings of TRL's GRPOTrainer into ours.

    settings: {TRL's name: value}.
    unknown: {TRL's name: reason} of settings whose value is not known, such as ``lr=$LR``.
    processes: the number of training processes, if ``num_processes`` is not among the settings;
        TRL's batch is per process.

    Raises ConfigError if nothing gives the number of processes.
    """
    num_processes = trl_job.processes_of(settings, processes)
    translation = Translation(framework="TRL", given=settings, assumed=DEFAULTS, unknown=unknown or {})
    trl_job.model_and_data(translation)
    translation.take("max_prompt_length", "data.max_prompt_tokens", whole)
    translation.take("system_prompt", "data.system_prompt", str)
    translation.leave("chat_template", "put it into the tokenizer's folder; data.template=chat applies it")
    translation.leave("dataset_prompt_column", "data.prompt_key names the column")
    translation.leave(
        "reward_funcs", "name functions of yours in reward.functions (docs/your-own.md); built in: math_verify"
    )
    if "reward_weights" in translation.given:
        translation.leave("reward_weights", "one each of reward.functions: reward.weights")
    _batches(translation, num_processes)
    trl_job.schedule(translation, "optimizer")
    _loss(translation)
    _advantages(translation)
    _engine(translation)
    trl_job.records(translation)
    translation.leave("save_steps", "checkpoint.save_every_rollouts counts rollouts")
    translation.leave("eval_steps", "eval.every_rollouts counts rollouts; eval.path names the data")
    translation.skip(*NEEDLESS)
    translation.close()
    return translation


def _batches(translation: Translation, processes: int) -> None:
    per_step = (
        processes
        * whole(translation.get("per_device_train_batch_size"))
        * whole(translation.get("gradient_accumulation_steps"))
    )
    group = whole(translation.get("num_generations"))
    generated = translation.get("generation_batch_size")
    steps = translation.get("steps_per_generation")
    accumulation = whole(translation.get("gradient_accumulation_steps"))
    # TRL: per_device × processes × steps_per_generation; the default of steps_per_generation is the accumulation
    if generated is None:
        per_device = whole(translation.get("per_device_train_batch_size"))
        generated = processes * per_device * (accumulation if steps is None else whole(steps))
    generated = whole(generated)
    if generated % group:
        translation.left["num_generations"] = f"{group} does not divide the {generated} samples of a generation"
    translation.ours |= {
        "rollout.samples_per_prompt": group,
        "train.prompts_per_rollout": max(1, generated // group),
        "train.samples_per_mini_batch": min(per_step, max(1, generated // group) * group),
    }
    translation.take("num_iterations", "train.epochs_per_rollout", whole)
    of_batches = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    for name in (*of_batches, "generation_batch_size", "steps_per_generation"):
        if name in translation.unknown:
            for key in ("rollout.samples_per_prompt", "train.prompts_per_rollout", "train.samples_per_mini_batch"):
                translation.need(key, f"{name}={translation.unknown[name]}")
    max_steps = translation.get("max_steps")
    if max_steps is not None and whole(max_steps) > 0:
        each = max(1, generated // per_step) * whole(translation.get("num_iterations"))
        translation.ours["train.num_rollouts"] = -(-whole(max_steps) // each)
    else:
        translation.ours["train.num_rollouts"] = None
        translation.take("num_train_epochs", "train.epochs", whole)
    translation.skip("num_train_epochs")


def _loss(translation: Translation) -> None:
    # The reduction, the policy's loss and its clips.
    kind, level = translation.get("loss_type"), translation.get("importance_sampling_level")
    reductions = {theirs: {"loss.reduction": ours} for theirs, ours in REDUCTIONS.items()}
    translation.choose("loss_type", reductions, f"of TRL's losses {', '.join(REDUCTIONS)} are here")
    low, high = number(translation.get("epsilon")), translation.get("epsilon_high")
    if kind == "cispo":  # for cispo, epsilon_high is the cap of the ratio itself
        translation.ours |= {"loss.policy": "cispo", "loss.clip_low": 1.0}
        if high is not None:
            translation.ours["loss.clip_high"] = number(high) - 1
    else:
        translation.ours["loss.policy"] = "gspo" if level == "sequence" or kind == "luspo" else "ppo"
        translation.ours |= {"loss.clip_low": low, "loss.clip_high": low if high is None else number(high)}
    translation.choose("importance_sampling_level", {"token": {}, "sequence": {}}, "token and sequence are here")
    delta = translation.get("delta")
    if delta is not None:
        if number(delta) > 1 + number(translation.ours.get("loss.clip_high", low)):
            translation.take("delta", "loss.dual_clip", number)
        else:
            translation.left["delta"] = f"{delta!r}: below 1 + epsilon_high it clips otherwise than a dual clip does"
    # The KL to the reference policy.
    if number(translation.get("beta")):
        translation.take("beta", "loss.kl_coefficient", number)
        unbiased = truth(translation.get("use_bias_correction_kl"))
        translation.ours["loss.kl_estimator"] = "unbiased" if unbiased else "k3"
    translation.skip("use_bias_correction_kl", "beta")
    if translation.get("sync_ref_model"):
        translation.leave(
            "sync_ref_model", "reference.refresh_every_rollouts renews the reference whole, without a mixture"
        )
    # Masks and the entropy term.
    translation.take("mask_truncated_completions", "loss.mask_truncated", truth)
    translation.take("entropy_coef", "loss.entropy_coefficient", number)
    for name, off in (
        ("top_entropy_quantile", 1.0),
        ("use_adaptive_entropy", False),
        ("off_policy_mask_threshold", None),
    ):
        if translation.get(name) not in (None, off):
            if name == "off_policy_mask_threshold":
                translation.take(name, "correction.off_policy_delta", number)
            else:
                translation.leave(name, "not here")


def _advantages(translation: Translation) -> None:
    """Set our ``advantage`` section from ``multi_objective_aggregation`` and ``scale_rewards``.

    ``multi_objective_aggregation=normalize_then_sum`` is the estimator GDPO. With it, TRL also
    whitens the advantages: it subtracts their mean and divides by their standard deviation (our
    ``advantage.whiten``).
    """
    if translation.given.get("multi_objective_aggregation") == "normalize_then_sum":
        translation.ours |= {"advantage.estimator": "gdpo", "advantage.whiten": "center_and_scale"}
        translation.skip("multi_objective_aggregation", "scale_rewards")
        return
    translation.choose("multi_objective_aggregation", {"sum_then_normalize": {}}, "sums, then normalises, or GDPO's")
    scales = {"group": "grpo", True: "grpo", "batch": "batch_std", "none": "dr_grpo", False: "dr_grpo"}
    translation.choose(
        "scale_rewards", {theirs: {"advantage.estimator": ours} for theirs, ours in scales.items()}, "unknown"
    )


def _engine(translation: Translation) -> None:
    translation.take("max_completion_length", "rollout.max_response_tokens", whole)
    translation.take("temperature", "rollout.temperature", number)
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", None), ("repetition_penalty", 1.0)):
        value = translation.get(name)
        if value is not None and value != off:
            translation.left[name] = (
                f"{value!r}: samples are drawn from the whole distribution, whose log-probs are trained"
            )
    if truth(translation.get("use_vllm")):
        translation.ours["rollout.engine"] = "vllm"
        translation.take("vllm_tensor_parallel_size", "rollout.tensor_parallel", whole)
        translation.take("vllm_gpu_memory_utilization", "rollout.gpu_memory_utilization", number)
        translation.take("vllm_max_model_length", "rollout.vllm.max_model_len", whole)
        translation.take("vllm_server_base_url", "rollout.servers", paths)
        if truth(translation.get("vllm_importance_sampling_correction")):
            modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
            translation.choose(
                "vllm_importance_sampling_mode",
                {mode: {"correction.mode": mode} for mode in modes},
                f"of TRL's corrections {', '.join(modes)} are here",
            )
            translation.take("vllm_importance_sampling_clip_max", "correction.cap", number)
            translation.take("vllm_importance_sampling_clip_min", "correction.floor", number)
    else:
        translation.ours["rollout.engine"] = "transformers"
    translation.skip(*(name for name in translation.given if name.startswith("vllm_importance_sampling")))
