"""Translates TRL's SFT, DPO, CPO (SimPO) and reward trainers: the supervised steps of a run without RL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.commands.translate import trl_job
from megatron_rl.commands.translate.translation import Translation, number, whole

_SHARED: dict[str, Any] = {
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_length": 1024,
    "seed": 42,
}
# TRL's and transformers' defaults of settings that are translated, by trainer.
DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": _SHARED | {"learning_rate": 2e-5},
    "dpo": _SHARED | {"learning_rate": 1e-6, "beta": 0.1, "loss_type": "sigmoid"},
    "cpo": _SHARED | {"learning_rate": 1e-6, "beta": 0.1, "loss_type": "sigmoid", "cpo_alpha": 1.0, "simpo_gamma": 0.5},
    "reward": _SHARED | {"learning_rate": 1e-4},
}
NEEDLESS = (
    *trl_job.NEEDLESS,
    "activation_offloading",
    "pad_to_multiple_of",
    "padding_free",
    "eval_packing",
    "precompute_ref_log_probs",
    "precompute_ref_batch_size",
    "dataset_batch_size",
)


def translate(
    trainer: str, given: Mapping[str, Any], unknown: Mapping[str, str] | None = None, *, processes: int | None = None
) -> Translation:
    """Return our settings for those of a trainer of DEFAULTS. Raises ConfigError as ``processes_of`` does."""
    num_processes = trl_job.processes_of(given, processes)
    found = Translation(framework="TRL", given=given, assumed=DEFAULTS[trainer], unknown=unknown or {})
    found.ours["train.num_rollouts"] = 0
    trl_job.model_and_data(found)
    _steps(found, num_processes)
    trl_job.schedule(found, "sft")
    {"sft": _responses, "dpo": _dpo, "cpo": _cpo, "reward": _reward}[trainer](found)
    trl_job.records(found)
    found.skip("packing", "packing_strategy")
    found.take("save_steps", "sft.save_every_steps", whole)
    found.leave("eval_steps", "sft.eval_every_steps, with rows held out by sft.eval_share or sft.eval_path")
    found.skip(*NEEDLESS)
    found.close()
    return found


def _steps(found: Translation, processes: int) -> None:
    found.compute(
        "sft.samples_per_step",
        ("per_device_train_batch_size", "gradient_accumulation_steps"),
        lambda each, times: processes * whole(each) * whole(times),
    )
    steps = found.given.get("max_steps")
    if "max_steps" in found.unknown or (steps is not None and whole(steps) > 0):
        found.take("max_steps", "sft.steps", whole)
    else:
        found.skip("max_steps")
        found.take("num_train_epochs", "sft.epochs", whole)
    found.skip("num_train_epochs")
    for name in ("max_length", "max_seq_length"):
        found.take(name, "data.max_prompt_tokens", whole)
    cut = "no row is cut here: one beyond the model's context ends the start, or data.on_long_prompt=drop leaves it out"
    for name in ("max_length", "max_seq_length", "max_prompt_length", "max_completion_length", "truncation_mode"):
        found.leave(name, cut)
    if not found.is_given("max_length") and not found.is_given("max_seq_length"):
        found.left["max_length"] = f"{found.assumed['max_length']} by default: {cut}"


def _responses(found: Translation) -> None:
    if found.given.get("packing") is True:
        found.leave("packing", "rows are packed without attention between them; sft.samples_per_step counts rows")
    if found.given.get("shuffle_dataset") is True:
        found.skip("shuffle_dataset")
    found.ours["data.messages_key"] = "messages"
    found.left["rows"] = (
        "data.messages_key=messages is set, for rows of conversations; of prompt and completion, set it to null and "
        "data.solution_key=completion (docs/supervised.md)"
    )
    if found.given.get("assistant_only_loss") is True or found.given.get("completion_only_loss") is True:
        found.skip("assistant_only_loss", "completion_only_loss")
    else:
        found.left["assistant_only_loss"] = (
            "only the assistant's turns have loss here; TRL trains all tokens by default"
        )
    found.leave("dataset_text_field", "a text without roles has no response to train here (docs/supervised.md)")
    if found.given.get("loss_type", "nll") in ("nll", None):
        found.skip("loss_type")
    found.leave("loss_type", "the loss is −log π of each token here")
    found.leave("chat_template_path", "put it into the tokenizer's folder; data.template=chat applies it")


def _pairs(found: Translation, losses: Mapping[str, str]) -> None:
    """Set the pairs' loss and β. ``losses``: theirs → ours."""
    given = found.get("loss_type")
    if isinstance(given, list):  # TRL takes several, weighted
        found.given = {**found.given, "loss_type": given[0] if len(given) == 1 else ", ".join(map(str, given))}
    found.choose(
        "loss_type",
        {theirs: {"preference.loss": ours} for theirs, ours in losses.items()},
        f"of TRL's losses {', '.join(losses)} are here (docs/preference.md)",
    )
    found.take("beta", "preference.beta", number)


def _dpo(found: Translation) -> None:
    _pairs(found, {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo"})
    for name, off in (("label_smoothing", 0), ("use_weighting", False), ("sync_ref_model", False)):
        if found.given.get(name, off) == off:
            found.skip(name)
        found.leave(name, "not in this loss here (docs/preference.md)")
    if found.given.get("f_divergence_type", "reverse_kl") == "reverse_kl":
        found.skip("f_divergence_type", "f_alpha_divergence_coef")
    for name in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
        if not found.given.get("sync_ref_model"):
            found.skip(name)


def _cpo(found: Translation) -> None:
    _pairs(found, {"simpo": "simpo"})
    found.take("simpo_gamma", "preference.margin", number)
    if number(found.get("cpo_alpha")):
        found.left["cpo_alpha"] = "the loss has no term of imitation here; 0 is SimPO"
    if found.given.get("label_smoothing"):
        found.take("label_smoothing", "preference.label_smoothing", number)
    found.skip("label_smoothing")


def _reward(found: Translation) -> None:
    found.ours |= {"preference.loss": "bradley_terry"}
    if not found.given.get("center_rewards_coefficient"):
        found.skip("center_rewards_coefficient")
    found.leave("center_rewards_coefficient", "no term that centers rewards is here")
