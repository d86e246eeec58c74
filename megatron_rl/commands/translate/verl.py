"""Translates verl's settings (0.9.1, ``ppo_trainer`` with Megatron or FSDP)."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from megatron_rl.commands.translate.translation import Translation, number, paths, truth, whole

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
# verl's defaults of settings that are translated, where the user's file leaves them out (its own generated YAML).
DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_penalty": "kl",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    "data.filter_overlong_prompts": False,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    "critic.cliprange_value": 0.5,
    "trainer.total_epochs": 30,
}
KL = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
MEGATRON = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
}
NEEDLESS = (
    f"{ACTOR}.ppo_micro_batch_size",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{ACTOR}.use_dynamic_bsz",
    f"{ACTOR}.strategy",
    f"{ACTOR}.use_torch_compile",
    f"{ACTOR}.megatron.",
    f"{ACTOR}.fsdp_config.",
    f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{MODEL}.use_remove_padding",
    f"{MODEL}.enable_gradient_checkpointing",
    f"{MODEL}.use_fused_kernels",
    f"{MODEL}.use_shm",
    f"{ROLLOUT}.log_prob_micro_batch_size",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{ROLLOUT}.mode",
    f"{ROLLOUT}.load_format",
    f"{ROLLOUT}.free_cache_engine",
    f"{ROLLOUT}.calculate_log_probs",
    "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.ref.",
    "data.return_raw_chat",
    "data.truncation",
    "data.filter_overlong_prompts_workers",
    "data.dataloader_num_workers",
    "trainer.balance_batch",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.device",
    "trainer.resume_mode",
    "trainer.use_v1",
    "model_engine",
    "ray_kwargs.",
    "ray_init.",
    "hydra.",
    "critic.ppo_micro_batch_size",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.strategy",
    "critic.megatron.",
    "critic.model.use_remove_padding",
    "critic.model.enable_gradient_checkpointing",
    "critic.model.fsdp_config.",
    "critic.fsdp.",
)


def translate(given: Mapping[str, Any]) -> Translation:
    """Return our settings for verl's."""
    found = Translation(given={k: v for k, v in given.items() if not _holds_variable(v)}, assumed=DEFAULTS)
    found.ours |= {"data.template": "chat"}
    _data_and_model(found)
    _actor(found)
    _advantages(found)
    _rollout(found)
    _trainer(found)
    found.skip(*NEEDLESS)
    found.close()
    found.left |= {name: f"{value!r} holds a shell variable" for name, value in given.items() if _holds_variable(value)}
    return found


def _holds_variable(value: Any) -> bool:
    return any("$" in str(each) for each in (value if isinstance(value, list) else [value]))


def _data_and_model(found: Translation) -> None:
    found.take("data.train_files", "data.train", paths)
    evaluated = found.get("data.val_files")
    if evaluated is not None:
        found.ours["eval.sets"] = _named(paths(evaluated))
    found.take("data.prompt_key", "data.prompt_key")
    found.take("data.max_prompt_length", "data.max_prompt_tokens", whole)
    found.take("data.max_response_length", "rollout.max_response_tokens", whole)
    found.take("data.train_batch_size", "train.prompts_per_rollout", whole)
    found.choose(
        "data.filter_overlong_prompts",
        {True: {"data.on_long_prompt": "drop"}, False: {"data.on_long_prompt": "fail"}},
        "it is neither true nor false",
    )
    found.take("data.shuffle", "data.shuffle", truth)
    found.take("data.seed", "run.seed", whole)
    found.take(f"{MODEL}.path", "model.hf_path", str)
    found.take(f"{MODEL}.tokenizer_path", "model.tokenizer_path", str)
    for rank, alpha in (("lora_rank", "lora_alpha"), ("lora.rank", "lora.alpha")):
        if found.get(f"{MODEL}.{rank}"):
            found.take(f"{MODEL}.{rank}", "lora.rank", whole)
            found.take(f"{MODEL}.{alpha}", "lora.alpha", number)
    found.skip(f"{MODEL}.lora_alpha", f"{MODEL}.lora.alpha")
    for name in ("data.trust_remote_code", f"{MODEL}.trust_remote_code"):
        found.leave(name, "no code of a model's folder is run here")
    for name in ("custom_reward_function.path", "reward.custom_reward_function.path"):
        found.leave(
            name,
            "a reward function takes (prompts, completions, completion_ids, **columns) here and returns a list: call "
            "yours from one, and name it in reward.functions (docs/your-own.md)",
        )
    if "reward.functions" not in found.ours:
        found.left["reward function"] = "verl chooses it by the data's data_source; name one in reward.functions"


def _named(files: list[str]) -> dict[str, str]:
    """Return evaluation sets by the names of their folders, and by numbers behind them where those are the same."""
    sets: dict[str, str] = {}
    for path in files:
        name = re.sub(r"\W", "_", pathlib.PurePath(path).parent.name) or "test"
        sets[name if name not in sets else f"{name}_{len(sets) + 1}"] = path
    return sets


def _actor(found: Translation) -> None:
    optimizer = f"{ACTOR}.optim"
    found.take(f"{optimizer}.lr", "optimizer.lr", number)
    found.take(f"{optimizer}.weight_decay", "optimizer.weight_decay", number)
    found.take(f"{optimizer}.clip_grad", "optimizer.clip_grad", number)
    found.take(f"{ACTOR}.grad_clip", "optimizer.clip_grad", number)
    found.take(f"{optimizer}.betas", "optimizer.betas", list)
    found.take(f"{optimizer}.min_lr", "optimizer.min_lr", number)
    found.take(f"{optimizer}.lr_decay_steps", "optimizer.decay_steps", whole)
    warmup = found.get(f"{optimizer}.lr_warmup_steps")
    if warmup is not None and whole(warmup) > 0:
        found.ours["optimizer.warmup_steps"] = whole(warmup)
    elif found.get(f"{optimizer}.lr_warmup_steps_ratio"):
        found.leave(f"{optimizer}.lr_warmup_steps_ratio", "give the number of steps, optimizer.warmup_steps")
    schedules = {name: {"optimizer.schedule": name} for name in ("constant", "cosine", "linear")}
    found.choose(f"{optimizer}.lr_decay_style", schedules, "optimizer.schedule is constant, cosine or linear")
    group = whole(found.get(f"{ROLLOUT}.n"))
    found.ours["train.samples_per_mini_batch"] = group * whole(found.get(f"{ACTOR}.ppo_mini_batch_size"))
    found.take(f"{ACTOR}.ppo_epochs", "train.epochs_per_rollout", whole)
    found.take(f"{ACTOR}.ppo_max_token_len_per_gpu", "plan.max_tokens_per_microbatch", whole)
    both = found.get(f"{ACTOR}.clip_ratio")
    for side in ("low", "high"):  # verl reads clip_ratio where the side is null
        value = found.get(f"{ACTOR}.clip_ratio_{side}")
        found.ours[f"loss.clip_{side}"] = number(both if value is None else value)
    modes = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}
    found.choose(
        f"{ACTOR}.policy_loss.loss_mode",
        {theirs: {"loss.policy": ours} for theirs, ours in modes.items()},
        f"of verl's losses {', '.join(modes)} are here; a function of yours can be loss.policy (docs/your-own.md)",
    )
    if found.ours.get("loss.policy") == "ppo":
        found.take(f"{ACTOR}.clip_ratio_c", "loss.dual_clip", number)
    found.skip(f"{ACTOR}.clip_ratio_c")
    found.choose(
        f"{ACTOR}.loss_agg_mode",
        {
            "token-mean": {"loss.reduction": "token_mean"},
            "token-sum": {"loss.reduction": "token_sum"},
            "seq-mean-token-mean": {"loss.reduction": "sequence_mean"},
            "seq-mean-token-sum": {"loss.reduction": "sequence_sum_mean"},
            "seq-mean-token-sum-norm": {"loss.reduction": "sequence_sum_norm"},
        },
        "no reduction of that name",
    )
    found.take(f"{ACTOR}.entropy_coeff", "loss.entropy_coefficient", number)
    _kl(found)
    parallel = {f"{ACTOR}.megatron.{theirs}": ours for theirs, ours in MEGATRON.items()}
    for theirs, ours in parallel.items():
        found.take(theirs, f"parallel.{ours}", whole)
    tensor = found.ours.get("parallel.tensor", 1)
    if tensor > 1:  # verl turns it on wherever there is tensor parallelism
        value = found.get(f"{ACTOR}.megatron.sequence_parallel")
        found.ours["parallel.sequence_parallel"] = True if value is None else truth(value)
    for name, value in found.given.items():
        prefix = f"{ACTOR}.megatron.override_transformer_config."
        if name.startswith(prefix):
            found.get(name)
            found.ours[f"megatron.transformer.{name.removeprefix(prefix)}"] = value
    found.leave(f"{ACTOR}.megatron.dist_checkpointing_path", "weights are read from model.hf_path, at any topology")


def _kl(found: Translation) -> None:
    in_loss, in_reward = truth(found.get(f"{ACTOR}.use_kl_loss")), truth(found.get("algorithm.use_kl_in_reward"))
    if in_loss and in_reward:
        found.left["algorithm.use_kl_in_reward"] = "the KL is in the loss or in the reward here, not in both"
    if in_loss:
        found.take(f"{ACTOR}.kl_loss_coef", "loss.kl_coefficient", number)
        kinds = {theirs: {"loss.kl_estimator": ours} for theirs, ours in KL.items()}
        found.choose(f"{ACTOR}.kl_loss_type", kinds, f"of verl's estimators {', '.join(KL)} are here")
    elif in_reward:
        found.ours["reference.kl_in"] = "reward"
        found.take("algorithm.kl_ctrl.kl_coef", "loss.kl_coefficient", number)
        kinds = {theirs: {"loss.kl_estimator": ours} for theirs, ours in KL.items()}
        found.choose("algorithm.kl_penalty", kinds, f"of verl's estimators {', '.join(KL)} are here")
        if found.get("algorithm.kl_ctrl.type") == "adaptive":
            found.ours["reference.controller"] = "adaptive"
            found.take("algorithm.kl_ctrl.target_kl", "reference.kl_target", number)
            found.take("algorithm.kl_ctrl.horizon", "reference.kl_horizon", whole)
    found.skip(f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type", "algorithm.kl_ctrl.", "algorithm.kl_penalty")


def _advantages(found: Translation) -> None:
    scaled = truth(found.get("algorithm.norm_adv_by_std_in_grpo"))
    estimators = {
        "gae": "gae",
        "grpo": "grpo" if scaled else "dr_grpo",
        "rloo": "rloo",
        "reinforce_plus_plus": "reinforce_plus_plus",
    }
    found.choose(
        "algorithm.adv_estimator",
        {theirs: {"advantage.estimator": ours} for theirs, ours in estimators.items()},
        f"of verl's estimators {', '.join(estimators)} are here; a function of yours can be advantage.estimator",
    )
    if found.ours.get("advantage.estimator") == "gae":
        found.take("algorithm.gamma", "advantage.gamma", number)
        found.take("algorithm.lam", "advantage.lam", number)
        found.take("critic.optim.lr", "critic.lr", number)
        found.take("critic.model.path", "critic.hf_path", str)
        found.take("critic.cliprange_value", "critic.value_clip", number)
        found.take("critic.ppo_epochs", "critic.epochs_per_rollout", whole)
        found.take("trainer.critic_warmup", "critic.warmup_rollouts", whole)
    else:
        found.skip("algorithm.gamma", "algorithm.lam", "critic.", "trainer.critic_warmup")
    if found.get("algorithm.filter_groups.enable"):
        rounds = found.get("algorithm.filter_groups.max_num_gen_batches")
        found.ours["rollout.dynamic_sampling.max_rounds"] = whole(rounds) if rounds else 10
        if found.get("algorithm.filter_groups.metric") not in (None, "acc"):  # of scores with the overlong penalty
            found.ours["rollout.dynamic_sampling.metric"] = "shaped"
    found.skip("algorithm.filter_groups.")
    weights = found.get("algorithm.rollout_correction.rollout_is")
    if weights in ("token", "sequence"):
        found.ours["correction.mode"] = f"{weights}_truncate"
        found.take("algorithm.rollout_correction.rollout_is_threshold", "correction.cap", number)
    elif weights is not None:
        found.left["algorithm.rollout_correction.rollout_is"] = f"{weights!r}: token or sequence"


def _rollout(found: Translation) -> None:
    engine = found.get(f"{ROLLOUT}.name")
    found.ours["rollout.engine"] = "vllm"
    if engine not in ("vllm", "hf"):
        found.left[f"{ROLLOUT}.name"] = f"{engine!r}: engines here are vllm and transformers; vllm is set"
    found.take(f"{ROLLOUT}.n", "rollout.samples_per_prompt", whole)
    found.take(f"{ROLLOUT}.temperature", "rollout.temperature", number)
    found.take(f"{ROLLOUT}.tensor_model_parallel_size", "rollout.tensor_parallel", whole)
    found.take(f"{ROLLOUT}.gpu_memory_utilization", "rollout.gpu_memory_utilization", number)
    for name, off in ((f"{ROLLOUT}.top_p", 1), (f"{ROLLOUT}.top_k", -1)):
        value = found.get(name)
        if value is not None and value != off:
            found.left[name] = f"{value!r}: samples are drawn from the whole distribution, whose log-probs are trained"
    for name in ("enforce_eager", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"):
        found.take(f"{ROLLOUT}.{name}", f"rollout.vllm.{name}")
    prefix = f"{ROLLOUT}.engine_kwargs.vllm."
    for name in [each for each in found.given if each.startswith(prefix)]:
        found.take(name, f"rollout.vllm.{name.removeprefix(prefix)}")
    sampled = found.get(f"{ROLLOUT}.val_kwargs.do_sample")
    if sampled is not None and truth(sampled):
        found.take(f"{ROLLOUT}.val_kwargs.temperature", "eval.temperature", number)
        found.take(f"{ROLLOUT}.val_kwargs.n", "eval.samples_per_prompt", whole)
    found.skip(f"{ROLLOUT}.val_kwargs.")


def _trainer(found: Translation) -> None:
    steps = found.get("trainer.total_training_steps")
    if steps is not None and whole(steps) > 0:  # verl's step is a rollout
        found.ours["train.num_rollouts"] = whole(steps)
    else:
        found.ours["train.num_rollouts"] = None
        found.take("trainer.total_epochs", "train.epochs", whole)
    found.skip("trainer.total_epochs")
    found.take("trainer.save_freq", "checkpoint.save_every_rollouts", lambda value: max(0, whole(value)))
    found.take("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last", whole)
    every = found.get("trainer.test_freq")
    if every is not None and whole(every) > 0:
        found.ours["eval.every_rollouts"] = whole(every)
    found.take("trainer.val_before_train", "eval.at_start", truth)
    found.take("trainer.experiment_name", "run.name", str)
    project, loggers = found.get("trainer.project_name"), found.get("trainer.logger")
    for logger in paths(loggers) if loggers is not None else []:
        if logger == "wandb":
            found.ours["metrics.wandb_project"] = str(project or "megatron_rl")
        elif logger == "tensorboard":
            found.ours["metrics.tensorboard"] = True
        elif logger == "mlflow":
            found.ours["metrics.mlflow_experiment"] = str(project or "megatron_rl")
        elif logger != "console":
            found.left["trainer.logger"] = f"{logger!r}: wandb, tensorboard and mlflow are here"
