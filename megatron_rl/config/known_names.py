"""Tables from names of settings in other frameworks and earlier releases to this release's keys, for error messages.

The frameworks are verl 0.9 (its Hydra files too), TRL 1.16 with transformers' arguments, NeMo-RL,
OpenRLHF, slime and axolotl. A name includes its section (``rollout.n``) if the last part alone is ambiguous.
"""

from __future__ import annotations

# Keys of earlier releases and their present names; a renamed section renames all of its keys.
RENAMED = {
    "train.steps": "train.num_rollouts",
    "train.prompts_per_step": "train.prompts_per_rollout",
    "train.export_every": "train.export_every_rollouts",
    "warmup": "sft",
    "critic.warmup_steps": "critic.warmup_rollouts",
    "checkpoint.save_every": "checkpoint.save_every_rollouts",
    "reference.refresh_every": "reference.refresh_every_rollouts",
    "eval.every": "eval.every_rollouts",
    "metrics.dense_every": "metrics.dense_every_rollouts",
    "weight_sync.interval": "weight_sync.interval_steps",
    "rollout.producer.depth": "rollout.producer.prefetch_rollouts",
    "rollout.producer.max_staleness": "rollout.producer.max_staleness_steps",
    "reward.overlong_buffer": "reward.overlong_buffer_tokens",
    "replay.size": "replay.capacity_groups",
    "replay.max_age": "replay.max_age_versions",
    "reroll.buffer_size": "reroll.capacity_prompts",
}

# A key here → its names in other frameworks.
_KEYS = {
    "model.hf_path": "model_name_or_path model_name base_model pretrain hf_checkpoint model.path policy.model_name",
    "model.tokenizer_path": "tokenizer_name_or_path tokenizer_path tokenizer.name policy.tokenizer.name",
    "model.dtype": "torch_dtype bf16 fp16 precision param_dtype model_dtype",
    "lora.rank": "lora_r lora_rank lora_dim lora.r peft.dim peft.r",
    "lora.alpha": "lora_alpha",
    "lora.targets": "lora_target_modules target_modules lora_target_linear",
    "parallel.tensor": "tensor_model_parallel_size tp tp_size tensor_parallel",
    "parallel.pipeline": "pipeline_model_parallel_size pp pp_size pipeline_parallel",
    "parallel.virtual_pipeline": "virtual_pipeline_model_parallel_size vpp vpp_size",
    "parallel.context": "context_parallel_size cp cp_size ulysses_sequence_parallel_size ring_attn_size sp_size",
    "parallel.expert": "expert_model_parallel_size ep ep_size expert_parallel",
    "parallel.expert_tensor": "expert_tensor_parallel_size etp etp_size",
    "data.train": "train_files dataset_name dataset_path dataset prompt_data datasets train_data_path data_path",
    "data.prompt_key": "input_key dataset_prompt_column prompt_column dataset_text_field problem_key",
    "data.answer_key": "label_key reward_model.ground_truth output_key answer_column",
    "data.messages_key": "field_messages conversation_key",
    "data.template": "chat_template apply_chat_template input_template prompt_template",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len max_input_seq_length rollout_max_prompt_len",
    "data.on_long_prompt": "filter_overlong_prompts truncation",
    "data.shuffle": "shuffle_dataset rollout_shuffle",
    "rollout.samples_per_prompt": "rollout.n num_generations n_samples_per_prompt num_generations_per_prompt "
    "samples_per_prompt group_size num_samples num_return_sequences",
    "rollout.max_response_tokens": "max_response_length max_completion_length max_new_tokens generate_max_len "
    "rollout_max_response_len max_tokens max_completion_tokens response_length",
    "rollout.temperature": "rollout_temperature sampling_temperature",
    "rollout.engine": "rollout.name use_vllm inference_backend generation.backend",
    "rollout.tensor_parallel": "rollout.tensor_model_parallel_size vllm_tensor_parallel_size "
    "vllm_cfg.tensor_parallel_size rollout_num_gpus_per_engine",
    "rollout.num_engines": "vllm_num_engines",
    "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization gpu_memory_utilisation",
    "rollout.sleep": "free_cache_engine vllm_enable_sleep_mode enable_sleep_mode",
    "rollout.servers": "vllm_server_base_url vllm_server_host base_url",
    "rollout.dynamic_sampling.max_rounds": "filter_groups.enable filter_groups.max_num_gen_batches dynamic_filtering "
    "use_dynamic_sampling max_num_gen_batches",
    "rollout.producer.mode": "async_training fully_async async_grpo.enabled",
    "rollout.producer.max_staleness_steps": "staleness_threshold max_trajectory_age_steps max_staleness",
    "environment.max_turns": "max_assistant_turns max_rollout_turns max_user_turns",
    "environment.name": "tool_config_path interaction_config_path",
    "reward.functions": "reward_funcs custom_reward_function.path custom_reward_function.name reward_fn reward_manager "
    "rm_type custom_rm_path remote_rm_url",
    "reward.weights": "reward_weights",
    "reward.model_path": "reward_pretrain reward_model.path reward_model_path",
    "reward.overlong_buffer_tokens": "overlong_buffer.len overlong_buffer_len soft_punish_cache",
    "reward.overlong_penalty": "overlong_buffer.penalty_factor overlong_penalty_factor",
    "advantage.estimator": "adv_estimator advantage_estimator use_leave_one_out_baseline",
    "advantage.whiten": "whiten_advantages normalize_advantages normalize_reward",
    "advantage.lam": "lambd gae_lambda",
    "loss.policy": "loss_mode policy_loss.loss_mode importance_sampling_level policy_loss_type",
    "loss.reduction": "loss_agg_mode loss_type token_level_loss calculate_per_token_loss",
    "loss.clip_low": "clip_ratio clip_ratio_low eps_clip cliprange epsilon ratio_clip_min",
    "loss.clip_high": "clip_ratio_high eps_clip_high epsilon_high ratio_clip_max",
    "loss.dual_clip": "clip_ratio_c ratio_clip_c dual_clip delta eps_clip_c",
    "loss.kl_coefficient": "kl_coef kl_loss_coef init_kl_coef kl_coeff kl_penalty_coef reference_policy_kl_penalty "
    "use_kl_loss kl_beta",
    "loss.kl_estimator": "kl_loss_type kl_type kl_penalty",
    "loss.entropy_coefficient": "entropy_coeff entropy_coef ent_coef entropy_loss_coef",
    "loss.mask_truncated": "mask_truncated_completions overlong_filtering",
    "reference.kl_in": "use_kl_in_reward apply_kl_in_reward",
    "reference.placement": "ref.megatron.param_offload ref.fsdp_config.param_offload ref_reward_offload",
    "reference.refresh_every_rollouts": "ref_model_sync_steps sync_ref_model ref_update_interval",
    "reference.controller": "kl_ctrl.type",
    "reference.kl_target": "target_kl kl_target kl_ctrl.target_kl",
    "reference.kl_horizon": "kl_horizon kl_ctrl.horizon",
    "correction.mode": "rollout_is vllm_importance_sampling_correction use_importance_sampling_correction use_tis "
    "enable_vllm_is_correction",
    "correction.cap": "rollout_is_threshold vllm_importance_sampling_clip_max tis_clip vllm_is_truncated_threshold",
    "plan.max_tokens_per_microbatch": "ppo_max_token_len_per_gpu max_tokens_per_gpu log_prob_max_token_len_per_gpu "
    "sequence_len max_total_sequence_length train_mb_tokens max_tokens_per_mb",
    "plan.samples_per_microbatch": "ppo_micro_batch_size_per_gpu ppo_micro_batch_size micro_train_batch_size "
    "train_micro_batch_size micro_batch_size",
    "optimizer.lr": "learning_rate actor_learning_rate optim.lr",
    "optimizer.min_lr": "lr_min min_lr_ratio",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler lr_decay_style lr_schedule",
    "optimizer.warmup_steps": "lr_warmup_steps num_warmup_steps lr_warmup_iters",
    "optimizer.decay_steps": "lr_decay_steps lr_decay_iters",
    "optimizer.betas": "adam_betas adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.epsilon": "adam_epsilon adam_eps eps",
    "optimizer.weight_decay": "l2 wd",
    "optimizer.clip_grad": "max_grad_norm grad_clip max_norm clip_grad_norm gradient_clipping",
    "optimizer.distributed": "use_distributed_optimizer zero_stage",
    "sft.eval_share": "val_set_size",
    "preference.loss": "rpo_alpha dpo_loss",
    "preference.beta": "rl_beta dpo_beta dpo.reference_policy_kl_penalty",
    "preference.margin": "simpo_gamma gamma_beta_ratio",
    "train.epochs": "total_epochs num_epochs max_num_epochs num_episodes max_epochs",
    "train.prompts_per_rollout": "data.train_batch_size rollout_batch_size num_prompts_per_step gen_batch_size",
    "train.samples_per_mini_batch": "ppo_mini_batch_size train_global_batch_size global_batch_size train_batch_size "
    "generation_batch_size",
    "train.epochs_per_rollout": "ppo_epochs num_iterations num_ppo_epochs",
    "train.export_every_rollouts": "hf_save_freq",
    "critic.hf_path": "critic.model.path critic_pretrain critic_model_path",
    "critic.lr": "critic_learning_rate critic.optim.lr",
    "critic.value_clip": "cliprange_value value_clip vf_clip",
    "critic.warmup_rollouts": "critic_warmup freezing_actor_steps num_critic_only_steps",
    "checkpoint.save_every_rollouts": "save_freq save_steps save_period save_interval save_every",
    "checkpoint.keep_last": "save_total_limit max_actor_ckpt_to_keep keep_top_k max_ckpt_num",
    "checkpoint.resume": "resume_from_checkpoint resume_mode auto_resume_from_checkpoints load_checkpoint",
    "checkpoint.asynchronous": "async_save",
    "eval.path": "val_files eval_prompt_data eval_dataset test_files eval_data",
    "eval.every_rollouts": "test_freq eval_steps val_period eval_interval eval_every",
    "eval.at_start": "val_before_train val_at_start eval_on_start",
    "eval.samples_per_prompt": "val_kwargs.n eval_n_samples_per_prompt n_samples_per_eval_prompt",
    "eval.temperature": "val_kwargs.temperature eval_temperature",
    "eval.max_prompts": "max_val_samples max_eval_samples",
    "metrics.wandb_project": "wandb_project use_wandb project_name wandb_enabled wandb.project report_to "
    "trainer.logger",
    "metrics.tensorboard": "tensorboard_enabled use_tensorboard tensorboard_dir",
    "metrics.mlflow_experiment": "mlflow_enabled mlflow.experiment_name",
    "metrics.log_completions": "log_completions num_completions_to_print log_val_generations",
    "run.name": "run_name experiment_name exp_name wandb_run_name",
    "run.dir": "output_dir default_local_dir checkpoint_dir save_path ckpt_path log_dir save_dir",
    "run.seed": "random_seed",
}
# Names in other frameworks that need a note, since the name alone would mislead: name → (a key here, the note).
_WITH_NOTE = {
    "max_steps": ("train.num_rollouts", "sft.steps in a supervised run"),
    "num_train_epochs": ("train.epochs", "with train.num_rollouts=null; sft.epochs in a supervised run"),
    "total_training_steps": ("train.num_rollouts", "a step is a rollout there"),
    "max_num_steps": ("train.num_rollouts", "sft.steps in a supervised run"),
    "num_rollout": ("train.num_rollouts", ""),
    "beta": ("loss.kl_coefficient", "preference.beta of pairs"),
    "per_device_train_batch_size": (
        "train.samples_per_mini_batch",
        "of all GPUs together; plan.max_tokens_per_microbatch bounds what a GPU holds",
    ),
    "per_device_eval_batch_size": ("rollout.max_batch_samples", "of the embedded engine; vLLM batches by itself"),
    "scale_rewards": ("advantage.estimator", "grpo divides by the group's standard deviation, dr_grpo does not"),
    "norm_adv_by_std_in_grpo": ("advantage.estimator", "grpo divides by the standard deviation, dr_grpo does not"),
    "normalize_rewards": ("advantage.estimator", "grpo divides by the group's standard deviation, dr_grpo does not"),
    "gradient_checkpointing": ("megatron.transformer", "as in megatron.transformer.recompute_granularity=full"),
    "enable_gradient_checkpointing": ("megatron.transformer", "as in megatron.transformer.recompute_granularity=full"),
    "activation_checkpointing": ("megatron.transformer", "as in megatron.transformer.recompute_granularity=full"),
    "recompute_granularity": ("megatron.transformer", "its field megatron.transformer.recompute_granularity"),
    "recompute_num_layers": ("megatron.transformer", "its field megatron.transformer.recompute_num_layers"),
    "override_transformer_config": ("megatron.transformer", "each field of Megatron-Core's TransformerConfig"),
    "num_layers": ("model.hf_path", "sizes are those of its config.json"),
    "logging_steps": ("metrics.progress", "every optimizer step has a row in metrics.jsonl"),
    "max_model_len": ("rollout.vllm", "as in rollout.vllm.max_model_len=8192"),
    "max_num_seqs": ("rollout.vllm", "as in rollout.vllm.max_num_seqs=256"),
    "max_num_batched_tokens": ("rollout.vllm", "as in rollout.vllm.max_num_batched_tokens=8192"),
    "enforce_eager": ("rollout.vllm", "as in rollout.vllm.enforce_eager=true"),
    "vllm_enforce_eager": ("rollout.vllm", "as in rollout.vllm.enforce_eager=true"),
    "rl": ("preference.loss", "of pairs; GRPO is advantage.estimator=grpo"),
    "adapter": ("lora.rank", ""),
    "use_peft": ("lora.rank", "a rank turns adapters on"),
}
_WHOLE = "samples are drawn from the whole distribution, whose log-probs are trained"
_LAUNCHER = "the launcher sets it (megatron-rl train --nproc N, torchrun, SLURM)"
_PACKED = "micro-batches are packed by tokens, under plan.max_tokens_per_microbatch"
# Names in other frameworks without a setting here → the reason.
NOT_HERE = {
    **dict.fromkeys(("top_p", "top_k", "min_p", "rollout_top_p", "rollout_top_k"), _WHOLE),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _WHOLE),
    **dict.fromkeys(("nnodes", "num_nodes", "n_gpus_per_node", "gpus_per_node", "num_processes"), _LAUNCHER),
    **dict.fromkeys(("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus"), _LAUNCHER),
    **dict.fromkeys(
        ("packing", "sample_packing", "packing_samples", "sequence_packing", "use_remove_padding"), _PACKED
    ),
    **dict.fromkeys(("use_dynamic_bsz", "use_dynamic_batch_size", "dynamic_batching", "group_by_length"), _PACKED),
    "gradient_accumulation_steps": f"{_PACKED}, as many as train.samples_per_mini_batch takes",
    **dict.fromkeys(
        ("warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio"), "give the steps, optimizer.warmup_steps"
    ),
    "trust_remote_code": "no code of a model's folder is run",
    "attn_implementation": "model.layer_spec chooses the layers",
    "flash_attention": "model.layer_spec chooses the layers",
    "deepspeed": "parallel and optimizer.distributed say how the model is cut",
    "fsdp": "parallel and optimizer.distributed say how the model is cut",
    "load_in_4bit": "weights are trained in model.dtype",
    "load_in_8bit": "weights are trained in model.dtype",
    "completion_only_loss": "only the assistant's tokens have a loss",
    "assistant_only_loss": "only the assistant's tokens have a loss",
    "train_on_inputs": "only the assistant's tokens have a loss",
}
# All names in other frameworks → (a key here, a note or "").
ELSEWHERE: dict[str, tuple[str, str]] = {
    name: (key, "") for key, names in _KEYS.items() for name in names.split()
} | _WITH_NOTE
