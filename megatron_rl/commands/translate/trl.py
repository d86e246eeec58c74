"""Translates the settings of TRL's GRPOTrainer (1.16.0): the YAML of ``trl grpo --config`` and of open-r1's recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.commands.translate import trl_job
from megatron_rl.commands.translate.translation import Translation, number, paths, truth, whole

# TRL's and transformers' defaults of settings that are translated, where the user's file leaves them out.
DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
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
    "seed": 42,
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
    given: Mapping[str, Any], unknown: Mapping[str, str] | None = None, *, processes: int | None = None
) -> Translation:
    """Return our settings for TRL's GRPO.

    unknown: settings without a value → what it depends on. processes: of the job, where the file's ``num_processes``
    does not say it: TRL's batch is per device. Raises ConfigError where neither does.
    """
    num_processes = trl_job.processes_of(given, processes)
    found = Translation(framework="TRL", given=given, assumed=DEFAULTS, unknown=unknown or {})
    trl_job.model_and_data(found)
    found.take("max_prompt_length", "data.max_prompt_tokens", whole)
    found.take("system_prompt", "data.system_prompt", str)
    found.leave("chat_template", "put it into the tokenizer's folder; data.template=chat applies it")
    found.leave("dataset_prompt_column", "data.prompt_key names the column")
    found.leave("reward_funcs", "name functions of yours in reward.functions (docs/your-own.md); built in: math_verify")
    if "reward_weights" in found.given:
        found.leave("reward_weights", "one each of reward.functions: reward.weights")
    _batches(found, num_processes)
    trl_job.schedule(found, "optimizer")
    _loss(found)
    _advantages(found)
    _engine(found)
    trl_job.records(found)
    found.leave("save_steps", "checkpoint.save_every_rollouts counts rollouts")
    found.leave("eval_steps", "eval.every_rollouts counts rollouts; eval.path names the data")
    found.skip(*NEEDLESS)
    found.close()
    return found


def _batches(found: Translation, processes: int) -> None:
    per_step = (
        processes * whole(found.get("per_device_train_batch_size")) * whole(found.get("gradient_accumulation_steps"))
    )
    group = whole(found.get("num_generations"))
    generated = found.get("generation_batch_size")
    steps = found.get("steps_per_generation")
    accumulation = whole(found.get("gradient_accumulation_steps"))
    if generated is None:  # TRL: per_device × processes × steps_per_generation, which is by default the accumulation
        per_device = whole(found.get("per_device_train_batch_size"))
        generated = processes * per_device * (accumulation if steps is None else whole(steps))
    generated = whole(generated)
    if generated % group:
        found.left["num_generations"] = f"{group} does not divide the {generated} samples of a generation"
    found.ours |= {
        "rollout.samples_per_prompt": group,
        "train.prompts_per_rollout": max(1, generated // group),
        "train.samples_per_mini_batch": min(per_step, max(1, generated // group) * group),
    }
    found.take("num_iterations", "train.epochs_per_rollout", whole)
    of_batches = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    for name in (*of_batches, "generation_batch_size", "steps_per_generation"):
        if name in found.unknown:
            for key in ("rollout.samples_per_prompt", "train.prompts_per_rollout", "train.samples_per_mini_batch"):
                found.need(key, f"{name}={found.unknown[name]}")
    max_steps = found.get("max_steps")
    if max_steps is not None and whole(max_steps) > 0:
        each = max(1, generated // per_step) * whole(found.get("num_iterations"))
        found.ours["train.num_rollouts"] = -(-whole(max_steps) // each)
    else:
        found.ours["train.num_rollouts"] = None
        found.take("num_train_epochs", "train.epochs", whole)
    found.skip("num_train_epochs")


def _loss(found: Translation) -> None:
    kind, level = found.get("loss_type"), found.get("importance_sampling_level")
    reductions = {theirs: {"loss.reduction": ours} for theirs, ours in REDUCTIONS.items()}
    found.choose("loss_type", reductions, f"of TRL's losses {', '.join(REDUCTIONS)} are here")
    low, high = number(found.get("epsilon")), found.get("epsilon_high")
    if kind == "cispo":  # epsilon_high is the cap of the ratio itself there
        found.ours |= {"loss.policy": "cispo", "loss.clip_low": 1.0}
        if high is not None:
            found.ours["loss.clip_high"] = number(high) - 1
    else:
        found.ours["loss.policy"] = "gspo" if level == "sequence" or kind == "luspo" else "ppo"
        found.ours |= {"loss.clip_low": low, "loss.clip_high": low if high is None else number(high)}
    found.choose("importance_sampling_level", {"token": {}, "sequence": {}}, "token and sequence are here")
    delta = found.get("delta")
    if delta is not None:
        if number(delta) > 1 + number(found.ours.get("loss.clip_high", low)):
            found.take("delta", "loss.dual_clip", number)
        else:
            found.left["delta"] = f"{delta!r}: below 1 + epsilon_high it clips otherwise than a dual clip does"
    if number(found.get("beta")):
        found.take("beta", "loss.kl_coefficient", number)
        unbiased = truth(found.get("use_bias_correction_kl"))
        found.ours["loss.kl_estimator"] = "unbiased" if unbiased else "k3"
    found.skip("use_bias_correction_kl", "beta")
    if found.get("sync_ref_model"):
        found.leave("sync_ref_model", "reference.refresh_every_rollouts renews the reference whole, without a mixture")
    found.take("mask_truncated_completions", "loss.mask_truncated", truth)
    found.take("entropy_coef", "loss.entropy_coefficient", number)
    for name, off in (
        ("top_entropy_quantile", 1.0),
        ("use_adaptive_entropy", False),
        ("off_policy_mask_threshold", None),
    ):
        if found.get(name) not in (None, off):
            if name == "off_policy_mask_threshold":
                found.take(name, "correction.off_policy_delta", number)
            else:
                found.leave(name, "not here")


def _advantages(found: Translation) -> None:
    """Set the estimator; the sum of standardised rewards is GDPO, which TRL whitens by mean and deviation."""
    if found.given.get("multi_objective_aggregation") == "normalize_then_sum":
        found.ours |= {"advantage.estimator": "gdpo", "advantage.whiten": "center_and_scale"}
        found.skip("multi_objective_aggregation", "scale_rewards")
        return
    found.choose("multi_objective_aggregation", {"sum_then_normalize": {}}, "sums, then normalises, or GDPO's")
    scales = {"group": "grpo", True: "grpo", "batch": "batch_std", "none": "dr_grpo", False: "dr_grpo"}
    found.choose("scale_rewards", {theirs: {"advantage.estimator": ours} for theirs, ours in scales.items()}, "unknown")


def _engine(found: Translation) -> None:
    found.take("max_completion_length", "rollout.max_response_tokens", whole)
    found.take("temperature", "rollout.temperature", number)
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", None), ("repetition_penalty", 1.0)):
        value = found.get(name)
        if value is not None and value != off:
            found.left[name] = f"{value!r}: samples are drawn from the whole distribution, whose log-probs are trained"
    if truth(found.get("use_vllm")):
        found.ours["rollout.engine"] = "vllm"
        found.take("vllm_tensor_parallel_size", "rollout.tensor_parallel", whole)
        found.take("vllm_gpu_memory_utilization", "rollout.gpu_memory_utilization", number)
        found.take("vllm_max_model_length", "rollout.vllm.max_model_len", whole)
        found.take("vllm_server_base_url", "rollout.servers", paths)
        if truth(found.get("vllm_importance_sampling_correction")):
            modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
            found.choose(
                "vllm_importance_sampling_mode",
                {mode: {"correction.mode": mode} for mode in modes},
                f"of TRL's corrections {', '.join(modes)} are here",
            )
            found.take("vllm_importance_sampling_clip_max", "correction.cap", number)
            found.take("vllm_importance_sampling_clip_min", "correction.floor", number)
    else:
        found.ours["rollout.engine"] = "transformers"
    found.skip(*(name for name in found.given if name.startswith("vllm_importance_sampling")))
