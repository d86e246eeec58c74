"""The translation of verl's settings on actor, critic and algorithm: optimizer, loss, KL, parallelism, advantages."""

from __future__ import annotations

from typing import Any

from megatron_rl.commands.translate.translation import MISSING, Translation, number, truth, whole
from megatron_rl.commands.translate.verl_rollout import ACTOR, ROLLOUT

KL = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
MEGATRON = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
}

LAYOUT_FIELDS = (
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)


def translate(translation: Translation) -> None:
    """Set our training sections in ``translation`` from verl's settings.

    They are optimizer, loss, reference, parallel, advantage, critic and correction.
    """
    _optimizer(translation)
    _loss(translation)
    _kl(translation)
    _layout(translation)
    _advantages(translation)
    _groups_and_weights(translation)


def _optimizer(translation: Translation) -> None:
    optimizer = f"{ACTOR}.optim"
    translation.take(f"{optimizer}.lr", "optimizer.lr", number)
    translation.take(f"{optimizer}.weight_decay", "optimizer.weight_decay", number)
    translation.take(f"{optimizer}.clip_grad", "optimizer.clip_grad", number)
    translation.take(f"{ACTOR}.grad_clip", "optimizer.clip_grad", number)
    translation.take(f"{optimizer}.betas", "optimizer.betas", list)
    translation.take(f"{optimizer}.min_lr", "optimizer.min_lr", number)
    translation.compute(
        "optimizer.min_lr", (f"{optimizer}.min_lr_ratio", f"{optimizer}.lr"), lambda a, b: number(a) * number(b)
    )
    translation.take(f"{optimizer}.lr_decay_steps", "optimizer.decay_steps", whole)
    translation.take(f"{optimizer}.lr_warmup_steps", "optimizer.warmup_steps", lambda value: max(0, whole(value)))
    if translation.given.get(f"{optimizer}.lr_warmup_steps_ratio"):
        translation.leave(f"{optimizer}.lr_warmup_steps_ratio", "give the number of steps, optimizer.warmup_steps")
    translation.skip(f"{optimizer}.lr_warmup_steps_ratio")
    if translation.given.get(f"{optimizer}.total_training_steps") in (None, -1):
        translation.skip(f"{optimizer}.total_training_steps")
    schedules = {name: {"optimizer.schedule": name} for name in ("constant", "cosine", "linear")}
    for name in ("lr_decay_style", "lr_scheduler_type", "warmup_style"):
        translation.choose(f"{optimizer}.{name}", schedules, "optimizer.schedule is constant, cosine or linear")
    prefix = f"{optimizer}.override_optimizer_config."
    for name in translation.under(prefix):
        translation.leave(name, f"Megatron-Core's; if wanted, megatron.optimizer.{name.removeprefix(prefix)}")
    translation.compute(
        "train.samples_per_mini_batch",
        (f"{ROLLOUT}.n", f"{ACTOR}.ppo_mini_batch_size"),
        lambda group, prompts: whole(group) * whole(prompts),
    )
    translation.take(f"{ACTOR}.ppo_epochs", "train.epochs_per_rollout", whole)
    translation.take(f"{ACTOR}.ppo_max_token_len_per_gpu", "plan.max_tokens_per_microbatch", whole)


def _loss(translation: Translation) -> None:
    for side in ("low", "high"):  # verl reads clip_ratio if the side is null
        name = f"{ACTOR}.clip_ratio_{side}"
        is_null = name in translation.given and translation.get(name) is None
        translation.take(f"{ACTOR}.clip_ratio" if is_null else name, f"loss.clip_{side}", number)
    translation.skip(f"{ACTOR}.clip_ratio")
    modes = {"vanilla": "ppo", "gspo": "gspo", "cispo": "cispo"}
    translation.choose(
        f"{ACTOR}.policy_loss.loss_mode",
        {theirs: {"loss.policy": ours} for theirs, ours in modes.items()},
        f"of verl's losses {', '.join(modes)} are here; a function of yours can be loss.policy (docs/your-own.md)",
    )
    if translation.ours.get("loss.policy") == "ppo":
        translation.take(f"{ACTOR}.clip_ratio_c", "loss.dual_clip", number)
    translation.skip(f"{ACTOR}.clip_ratio_c")
    translation.choose(
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
    translation.take(f"{ACTOR}.entropy_coeff", "loss.entropy_coefficient", number)


def _kl(translation: Translation) -> None:
    in_loss, in_reward = (
        truth(translation.get(f"{ACTOR}.use_kl_loss")),
        truth(translation.get("algorithm.use_kl_in_reward")),
    )
    if in_loss and in_reward:
        translation.left["algorithm.use_kl_in_reward"] = "the KL is in the loss or in the reward here, not in both"
    kinds = {theirs: {"loss.kl_estimator": ours} for theirs, ours in KL.items()}
    if in_loss:
        translation.take(f"{ACTOR}.kl_loss_coef", "loss.kl_coefficient", number)
        translation.choose(f"{ACTOR}.kl_loss_type", kinds, f"of verl's estimators {', '.join(KL)} are here")
    elif in_reward:
        translation.ours["reference.kl_in"] = "reward"
        translation.take("algorithm.kl_ctrl.kl_coef", "loss.kl_coefficient", number)
        translation.choose("algorithm.kl_penalty", kinds, f"of verl's estimators {', '.join(KL)} are here")
        if translation.get("algorithm.kl_ctrl.type") == "adaptive":
            translation.ours["reference.controller"] = "adaptive"
            translation.take("algorithm.kl_ctrl.target_kl", "reference.kl_target", number)
            translation.take("algorithm.kl_ctrl.horizon", "reference.kl_horizon", whole)
    translation.skip(f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type", "algorithm.kl_ctrl.", "algorithm.kl_penalty")


def _layout(translation: Translation) -> None:
    megatron = f"{ACTOR}.megatron"
    for theirs, ours in MEGATRON.items():
        translation.take(f"{megatron}.{theirs}", f"parallel.{ours}", whole)
    tensor = translation.ours.get("parallel.tensor", 1)
    if isinstance(tensor, int) and tensor > 1:  # verl turns it on whenever there is tensor parallelism
        translation.ours["parallel.sequence_parallel"] = True
        translation.take(f"{megatron}.sequence_parallel", "parallel.sequence_parallel", truth)
    translation.skip(f"{megatron}.sequence_parallel")
    prefix = f"{megatron}.override_transformer_config."
    translation.take(f"{prefix}pipeline_model_parallel_layout", "parallel.pipeline_layout", str)
    for name in LAYOUT_FIELDS:
        translation.leave(
            prefix + name, "stages balance by themselves; parallel.pipeline_layout states the layers of each"
        )
    for name in translation.under(prefix):
        field = name.removeprefix(prefix)
        if field not in (*LAYOUT_FIELDS, "pipeline_model_parallel_layout"):
            translation.take(name, f"megatron.transformer.{field}")
    for part in (ACTOR, "actor_rollout_ref.ref", "critic"):
        translation.leave(
            f"{part}.megatron.dist_checkpointing_path", "weights are read from model.hf_path, at any topology"
        )
    replays = {"disabled": "off", "R2": "old_logprobs", "R3": "rollout"}
    for name in (f"{megatron}.router_replay.mode", f"{ACTOR}.router_replay.mode"):
        translation.choose(
            name,
            {theirs: {"rollout.routing_replay": ours} for theirs, ours in replays.items()},
            f"of verl's modes {', '.join(replays)} are here",
        )
    of_fsdp = (f"{ACTOR}.fsdp_config.dtype", f"{ACTOR}.fsdp_config.model_dtype")
    for name in (f"{megatron}.dtype", *of_fsdp, f"{ROLLOUT}.dtype"):
        if translation.given.get(name) in ("bfloat16", "bf16"):
            translation.skip(name)
        translation.leave(name, "model.dtype is float32 or bfloat16")


def _advantages(translation: Translation) -> None:
    scaled = truth(translation.get("algorithm.norm_adv_by_std_in_grpo"))
    grouped = {"advantage.estimator": "grpo" if scaled else "dr_grpo", "advantage.whiten": "scale"}
    leave_one_out = {"advantage.estimator": "rloo", "advantage.whiten": "scale"}
    estimators: dict[object, dict[str, Any]] = {  # docs/evidence/oracles.md: verl whitens by the mean and the deviation
        "gae": {"advantage.estimator": "gae", "advantage.whiten": "center_and_scale"},
        "grpo": grouped,
        "grpo_vectorized": grouped,
        "rloo": leave_one_out,
        "rloo_vectorized": leave_one_out,
        "reinforce_plus_plus_baseline": {
            "advantage.estimator": "reinforce_plus_plus",
            "advantage.whiten": "center_and_scale",
        },
        "gdpo": {"advantage.estimator": "gdpo", "advantage.whiten": "center_and_scale"},
    }
    translation.choose(
        "algorithm.adv_estimator",
        estimators,
        f"of verl's estimators {', '.join(map(str, estimators))} are here; a function of yours can be "
        "advantage.estimator (docs/your-own.md)",
    )
    estimator = translation.ours.get("advantage.estimator")
    if estimator == "gae":
        _critic(translation)
    elif estimator != MISSING:
        translation.skip("algorithm.gamma", "algorithm.lam", "critic.", "trainer.critic_warmup")
    else:
        for name in ("algorithm.gamma", "algorithm.lam", "trainer.critic_warmup", *translation.under("critic.")):
            translation.leave(name, "of a critic, under advantage.estimator=gae")


def _critic(translation: Translation) -> None:
    translation.take("algorithm.gamma", "advantage.gamma", number)
    translation.take("algorithm.lam", "advantage.lam", number)
    translation.take("critic.optim.lr", "critic.lr", number)
    translation.take("critic.optim.weight_decay", "critic.optimizer.weight_decay", number)
    translation.take(
        "critic.optim.lr_warmup_steps", "critic.optimizer.warmup_steps", lambda value: max(0, whole(value))
    )
    translation.take("critic.grad_clip", "critic.optimizer.clip_grad", number)
    translation.take("critic.model.path", "critic.hf_path", str)
    translation.take("critic.cliprange_value", "critic.value_clip", number)
    translation.take("critic.ppo_epochs", "critic.epochs_per_rollout", whole)
    translation.compute(
        "critic.samples_per_mini_batch",
        ("critic.ppo_mini_batch_size", f"{ROLLOUT}.n"),
        lambda prompts, group: whole(prompts) * whole(group),
    )
    translation.take("trainer.critic_warmup", "critic.warmup_rollouts", whole)
    for theirs, ours in MEGATRON.items():
        translation.take(f"critic.megatron.{theirs}", f"critic.parallel.{ours}", whole)
    if not translation.given.get("critic.optim.lr_warmup_steps_ratio"):
        translation.skip("critic.optim.lr_warmup_steps_ratio")
    translation.leave("critic.optim.lr_warmup_steps_ratio", "give the number of steps, critic.optimizer.warmup_steps")
    translation.leave("critic.model.tokenizer_path", "the critic has the policy's tokenizer here")
    translation.leave("critic.model.trust_remote_code", "no code of a model's folder is run here")


def _groups_and_weights(translation: Translation) -> None:
    """Translate the settings on dynamic sampling, and on importance weights π_trainer / π_engine of tokens."""
    # Groups that are drawn again.
    filtered = translation.get("algorithm.filter_groups.enable")
    if filtered is not None and truth(filtered):
        rounds = "algorithm.filter_groups.max_num_gen_batches"
        if not translation.is_given(rounds):
            translation.ours["rollout.dynamic_sampling.max_rounds"] = 10
            translation.left[rounds] = (
                "0 by default, which asks without an end; rollout.dynamic_sampling.max_rounds=10 is set"
            )
        translation.take(rounds, "rollout.dynamic_sampling.max_rounds", _rounds)
        if translation.get("algorithm.filter_groups.metric") not in (
            None,
            "acc",
        ):  # of scores with the overlong penalty
            translation.ours["rollout.dynamic_sampling.metric"] = "shaped"
    translation.skip("algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches")
    # Importance weights against the engine.
    name = "algorithm.rollout_correction"
    weights = translation.get(f"{name}.rollout_is")
    if weights in ("token", "sequence"):
        translation.ours["correction.mode"] = f"{weights}_truncate"
        translation.take(f"{name}.rollout_is_threshold", "correction.cap", number)
    elif weights not in (None, "null"):
        translation.leave(f"{name}.rollout_is", "token or sequence")
    else:
        translation.skip(f"{name}.rollout_is_threshold")
    cap = translation.given.get(f"{ACTOR}.tis_imp_ratio_cap")
    if isinstance(cap, int | float) and cap > 0:
        translation.ours["correction.mode"] = "token_truncate"
        translation.take(f"{ACTOR}.tis_imp_ratio_cap", "correction.cap", number)
    translation.skip(f"{ACTOR}.tis_imp_ratio_cap")
    if translation.given.get(f"{name}.bypass_mode") is True:
        translation.ours["correction.old_logprobs"] = "rollout"
    translation.skip(f"{name}.bypass_mode")
    for each in ("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower", "rollout_token_veto_threshold"):
        if translation.given.get(f"{name}.{each}", 0) is not None:
            translation.leave(
                f"{name}.{each}", "samples are rejected by correction.mode=…_mask here (docs/semantics.md)"
            )
        translation.skip(f"{name}.{each}")


def _rounds(value: Any) -> int:
    if whole(value) < 1:
        raise ValueError("verl asks without an end; rollout.dynamic_sampling.max_rounds has one, 1 to 1000")
    return whole(value)
