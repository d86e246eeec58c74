"""The translation of verl 0.9.1's settings (``ppo_trainer`` on Megatron or FSDP, the recipe ``dapo``).

This module translates data, model and rewards; verl_training.py and verl_rollout.py translate the
rest.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from megatron_rl.commands.translate import verl_rollout, verl_training
from megatron_rl.commands.translate.translation import Translation, number, paths, truth, whole
from megatron_rl.commands.translate.verl_rollout import ACTOR, MODEL, ROLLOUT

# verl's defaults of translated settings, used if the user's file leaves them out (from its own generated YAML).
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
REFERENCE, OF_CRITIC = "actor_rollout_ref.ref", ("critic.model.fsdp_config", "critic.fsdp")
OF_MEGATRON = (
    *("param_offload", "optimizer_offload", "grad_offload", "use_mbridge", "vanilla_mbridge", "use_remove_padding"),
    *("use_distributed_optimizer", "use_dist_checkpointing"),
)
OF_FSDP = (
    *("param_offload", "optimizer_offload", "offload_policy", "reshard_after_forward", "fsdp_size", "wrap_policy."),
    *("forward_prefetch", "wrap_policy", "use_orig_params", "entropy_checkpointing", "use_torch_compile", "strategy"),
    "ulysses_sequence_parallel_size",
)
# Only time, memory and the place of files depend on these; never training, or how an evaluation samples.
NEEDLESS = (
    f"{ACTOR}.ppo_micro_batch_size",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{ACTOR}.use_dynamic_bsz",
    f"{ACTOR}.strategy",
    f"{ACTOR}.use_torch_compile",
    f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{ACTOR}.entropy_checkpointing",
    f"{ACTOR}.entropy_from_logits_with_chunking",
    f"{ACTOR}.load_weight",
    *(f"{part}.megatron.{name}" for part in (ACTOR, REFERENCE, "critic") for name in OF_MEGATRON),
    *(f"{REFERENCE}.megatron.{name}" for name in ("sequence_parallel", *verl_training.MEGATRON)),  # as the policy's
    *(
        f"{part}.{name}"
        for part in (f"{ACTOR}.fsdp_config", f"{REFERENCE}.fsdp_config", "critic.fsdp_config", *OF_CRITIC)
        for name in OF_FSDP
    ),
    *(
        f"{REFERENCE}.{name}"
        for name in (
            *("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz"),
            *("log_prob_max_token_len_per_gpu", "ulysses_sequence_parallel_size", "strategy", "use_torch_compile"),
            *("entropy_checkpointing", "entropy_from_logits_with_chunking", "profiler."),
        )
    ),
    *(f"{MODEL}.{name}" for name in ("use_remove_padding", "enable_gradient_checkpointing", "use_fused_kernels")),
    *(f"{MODEL}.{name}" for name in ("use_shm", "fused_kernel_options.", "enable_activation_offload")),
    f"{ROLLOUT}.log_prob_micro_batch_size",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{ROLLOUT}.mode",
    f"{ROLLOUT}.load_format",
    f"{ROLLOUT}.free_cache_engine",
    f"{ROLLOUT}.calculate_log_probs",
    f"{ROLLOUT}.update_weights_bucket_megabytes",
    f"{ROLLOUT}.checkpoint_engine.",
    f"{ROLLOUT}.layered_summon",
    f"{ROLLOUT}.multi_stage_wake_up",
    f"{ROLLOUT}.disable_log_stats",
    f"{ACTOR}.profiler.",
    f"{ACTOR}.checkpoint.",
    "data.val_batch_size",
    "trainer.max_critic_ckpt_to_keep",
    "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.nccl_timeout",
    "data.return_raw_chat",
    "data.filter_overlong_prompts_workers",
    "data.dataloader_num_workers",
    "trainer.balance_batch",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.use_v1",
    "trainer.use_legacy_worker_impl",
    "trainer.log_val_generations",
    "model_engine",
    "ray_kwargs.",
    "ray_init.",
    "hydra.",
    "global_profiler.",
    "critic.ppo_micro_batch_size",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size",
    "critic.forward_micro_batch_size_per_gpu",
    "critic.use_dynamic_bsz",
    "critic.ppo_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu",
    "critic.ulysses_sequence_parallel_size",
    "critic.strategy",
    "critic.model.use_remove_padding",
    "critic.model.enable_gradient_checkpointing",
    "critic.profiler.",
)


def translate(settings: Mapping[str, Any], unknown: Mapping[str, str] | None = None) -> Translation:
    """Return the translation of verl's settings into ours.

    settings: {verl's name: value}.
    unknown: {verl's name: reason} of settings whose value is not known, such as ``lr=$LR``.
    """
    translation = Translation(framework="verl", given=settings, assumed=DEFAULTS, unknown=unknown or {})
    translation.ours |= {"data.template": "chat"}
    _data(translation)
    _model(translation)
    _rewards(translation)
    verl_training.translate(translation)
    verl_rollout.translate(translation)
    if translation.given.get("global_profiler.steps"):
        translation.leave(
            "global_profiler.steps", "they count rollouts; name optimizer steps, profile.steps=[first, last]"
        )
    translation.skip(*NEEDLESS)
    translation.close()
    return translation


def _data(translation: Translation) -> None:
    translation.take("data.train_files", "data.train", paths)
    translation.take("data.val_files", "eval.sets", lambda value: _named(paths(value)))
    translation.take("data.prompt_key", "data.prompt_key", str)
    translation.take("data.max_prompt_length", "data.max_prompt_tokens", whole)
    translation.take("data.max_response_length", "rollout.max_response_tokens", whole)
    translation.take("data.train_batch_size", "train.prompts_per_rollout", whole)
    translation.take(
        "data.filter_overlong_prompts", "data.on_long_prompt", lambda value: "drop" if truth(value) else "fail"
    )
    if (
        translation.ours["data.on_long_prompt"] == "drop"
        or translation.given.get("data.truncation", "error") == "error"
    ):
        translation.skip("data.truncation")  # verl cuts nothing here either
    translation.leave(
        "data.truncation", "no prompt is cut here; data.on_long_prompt=fail ends the run at one, drop goes on"
    )
    translation.take("data.shuffle", "data.shuffle", truth)
    translation.take("data.seed", "run.seed", whole)
    for name in translation.under("data.apply_chat_template_kwargs."):
        translation.take(name, f"data.template_variables.{name.removeprefix('data.apply_chat_template_kwargs.')}")
    translation.leave(
        "data.gen_batch_size", "rollout.dynamic_sampling asks as many further prompts as groups are missing"
    )
    for name in ("data.image_key", "data.video_key", "data.custom_cls.path", "data.tool_config_path"):
        translation.leave(name, "texts alone are read here, from files of rows (docs/your-own.md)")


def _named(files: list[str]) -> dict[str, str]:
    """Return {name: path} of evaluation sets; a set is named after its file, without the suffix.

    If that name is ``test``, ``val``, ``validation`` or ``eval``, the set is named after the
    file's folder. A name that is already taken gets a number.
    """
    sets: dict[str, str] = {}
    for path in map(pathlib.PurePath, files):
        own = path.parent.name if path.stem in ("test", "val", "validation", "eval") else path.stem
        name = re.sub(r"\W", "_", own) or "test"
        sets[name if name not in sets else f"{name}_{len(sets) + 1}"] = str(path)
    return sets


def _model(translation: Translation) -> None:
    translation.take(f"{MODEL}.path", "model.hf_path", str)
    translation.take(f"{MODEL}.tokenizer_path", "model.tokenizer_path", str)
    for section, rank, alpha in (("", "lora_rank", "lora_alpha"), ("lora.", "lora.rank", "lora.alpha")):
        if translation.get(f"{MODEL}.{rank}"):
            translation.take(f"{MODEL}.{rank}", "lora.rank", whole)
            translation.take(f"{MODEL}.{alpha}", "lora.alpha", number)
            if translation.given.get(f"{MODEL}.{section}target_modules", "all-linear") == "all-linear":
                translation.skip(f"{MODEL}.{section}target_modules")  # as lora.targets by default
    translation.skip(f"{MODEL}.lora_alpha", f"{MODEL}.lora.alpha")
    for name in translation.under(f"{MODEL}.override_config."):
        if name.endswith(("dropout", "_pdrop")) and translation.given.get(name) == 0:
            translation.skip(name)  # dropout is 0 here
    for name in ("data.trust_remote_code", f"{MODEL}.trust_remote_code"):
        translation.leave(name, "no code of a model's folder is run here")


def _rewards(translation: Translation) -> None:
    for name in ("custom_reward_function.path", "reward.custom_reward_function.path"):
        translation.leave(
            name,
            "a reward function takes (prompts, completions, completion_ids, **columns) here and returns a list: call "
            "yours from one, and name it in reward.functions (docs/your-own.md)",
        )
        translation.skip(name.replace(".path", ".name"))
    for name in ("reward_model.enable", "reward.reward_model.enable"):
        if translation.get(name) in (True, "true", "True"):
            translation.leave(name, "reward.functions=[reward_model] with reward.model_path (docs/supervised.md)")
            for each in translation.under(name.removesuffix("enable")):
                if "overlong" not in each and "reward_manager" not in each and each != name:
                    translation.leave(each, "of the reward model; reward.model_path names it")
        else:
            translation.skip(name, *(f"{name.removesuffix('enable')}{each}" for each in ("model.", "rollout.")))
    translation.left["reward function"] = (
        "verl chooses it by the data's data_source; name one in reward.functions (docs/coming-from.md)"
    )
    for prefix in ("reward_model", "reward_model.reward_kwargs", "reward", "reward.reward_kwargs"):
        name = "overlong_buffer_cfg" if prefix.endswith("kwargs") else "overlong_buffer"
        _overlong(translation, f"{prefix}.{name}", f"{prefix}.max_resp_len")
    for name in ("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name"):
        if translation.given.get(name) in ("naive", "dapo"):
            translation.skip(name)


def _overlong(translation: Translation, section: str, limit: str) -> None:
    """Translate DAPO's penalty for long responses: min(0, −penalty_factor · (tokens − (longest − len)) / len).

    tokens is the response's length and longest its limit. The penalty grows over the last len tokens
    below that limit.

    section: the name of verl's section with ``len`` and ``penalty_factor``.
    limit: the name of verl's setting for longest.
    """
    translation.skip(f"{section}.log")
    enabled = translation.get(f"{section}.enable")
    if enabled is not None and truth(enabled):
        translation.take(f"{section}.len", "reward.overlong_buffer_tokens", whole)
        translation.take(f"{section}.penalty_factor", "reward.overlong_penalty", number)
    else:
        translation.skip(f"{section}.len", f"{section}.penalty_factor")
    longest = translation.given.get(limit)
    if longest == translation.get("data.max_response_length"):
        translation.skip(limit)
    translation.leave(limit, "the buffer ends at rollout.max_response_tokens here")
