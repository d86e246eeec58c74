"""The translation of TRL's SFT, DPO, CPO (SimPO) and reward trainers into runs of supervised steps without RL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.commands.translate import trl_job
from megatron_rl.commands.translate.translation import Translation, number, whole

_SHARED = trl_job.DEFAULTS | {"max_length": 1024}
# TRL's and transformers' defaults of translated settings, by trainer.
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
    trainer: str, settings: Mapping[str, Any], unknown: Mapping[str, str] | None = None, *, processes: int | None = None
) -> Translation:
    """Return the translation of a TRL trainer's settings into ours.

    trainer: ``sft``, ``dpo``, ``cpo`` or ``reward``.
    settings: {TRL's name: value}.
    unknown: {TRL's name: reason} of settings whose value is not known, such as ``lr=$LR``.
    processes: the number of training processes, if ``num_processes`` is not among the settings.

    Raises ConfigError if nothing gives the number of processes.
    """
    num_processes = trl_job.processes_of(settings, processes)
    translation = Translation(framework="TRL", given=settings, assumed=DEFAULTS[trainer], unknown=unknown or {})
    translation.ours["train.num_rollouts"] = 0
    trl_job.model_and_data(translation)
    _steps(translation, num_processes)
    trl_job.schedule(translation, "sft")
    {"sft": _responses, "dpo": _dpo, "cpo": _cpo, "reward": _reward}[trainer](translation)
    trl_job.records(translation)
    translation.skip("packing", "packing_strategy")
    translation.take("save_steps", "sft.save_every_steps", whole)
    translation.leave("eval_steps", "sft.eval_every_steps, with rows held out by sft.eval_share or sft.eval_path")
    translation.skip(*NEEDLESS)
    translation.close()
    return translation


def _steps(translation: Translation, processes: int) -> None:
    translation.compute(
        "sft.samples_per_step",
        ("per_device_train_batch_size", "gradient_accumulation_steps"),
        lambda each, times: processes * whole(each) * whole(times),
    )
    steps = translation.given.get("max_steps")
    if "max_steps" in translation.unknown or (steps is not None and whole(steps) > 0):
        translation.take("max_steps", "sft.steps", whole)
    else:
        translation.skip("max_steps")
        translation.take("num_train_epochs", "sft.epochs", whole)
    translation.skip("num_train_epochs")
    for name in ("max_length", "max_seq_length"):
        translation.take(name, "data.max_prompt_tokens", whole)
    cut = "no row is cut here: one beyond the model's context ends the start, or data.on_long_prompt=drop leaves it out"
    for name in ("max_length", "max_seq_length", "max_prompt_length", "max_completion_length", "truncation_mode"):
        translation.leave(name, cut)
    if not translation.is_given("max_length") and not translation.is_given("max_seq_length"):
        translation.left["max_length"] = f"{translation.assumed['max_length']} by default: {cut}"


def _responses(translation: Translation) -> None:
    if translation.given.get("packing") is True:
        translation.leave("packing", "rows are packed without attention between them; sft.samples_per_step counts rows")
    if translation.given.get("shuffle_dataset") is True:
        translation.skip("shuffle_dataset")
    translation.ours["data.messages_key"] = "messages"
    translation.left["rows"] = (
        "data.messages_key=messages is set, for rows of conversations; of prompt and completion, set it to null and "
        "data.solution_key=completion (docs/supervised.md)"
    )
    if translation.given.get("assistant_only_loss") is True or translation.given.get("completion_only_loss") is True:
        translation.skip("assistant_only_loss", "completion_only_loss")
    else:
        translation.left["assistant_only_loss"] = (
            "only the assistant's turns have loss here; TRL trains all tokens by default"
        )
    translation.leave("dataset_text_field", "a text without roles has no response to train here (docs/supervised.md)")
    if translation.given.get("loss_type", "nll") in ("nll", None):
        translation.skip("loss_type")
    translation.leave("loss_type", "the loss is −log π of each token here")
    translation.leave("chat_template_path", "put it into the tokenizer's folder; data.template=chat applies it")


def _pairs(translation: Translation, losses: Mapping[str, str]) -> None:
    """Set our ``preference.loss`` and ``preference.beta`` from TRL's ``loss_type`` and ``beta``.

    losses: {TRL's name of a loss: our name}.
    """
    kinds = translation.get("loss_type")
    if isinstance(kinds, list):  # TRL takes several losses, weighted
        translation.given = {
            **translation.given,
            "loss_type": kinds[0] if len(kinds) == 1 else ", ".join(map(str, kinds)),
        }
    translation.choose(
        "loss_type",
        {theirs: {"preference.loss": ours} for theirs, ours in losses.items()},
        f"of TRL's losses {', '.join(losses)} are here (docs/supervised.md)",
    )
    translation.take("beta", "preference.beta", number)


def _dpo(translation: Translation) -> None:
    _pairs(translation, {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo"})
    for name, off in (("label_smoothing", 0), ("use_weighting", False), ("sync_ref_model", False)):
        if translation.given.get(name, off) == off:
            translation.skip(name)
        translation.leave(name, "not in this loss here (docs/supervised.md)")
    if translation.given.get("f_divergence_type", "reverse_kl") == "reverse_kl":
        translation.skip("f_divergence_type", "f_alpha_divergence_coef")
    for name in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
        if not translation.given.get("sync_ref_model"):
            translation.skip(name)


def _cpo(translation: Translation) -> None:
    _pairs(translation, {"simpo": "simpo"})
    translation.take("simpo_gamma", "preference.margin", number)
    if number(translation.get("cpo_alpha")):
        translation.left["cpo_alpha"] = "the loss has no term of imitation here; 0 is SimPO"
    if translation.given.get("label_smoothing"):
        translation.take("label_smoothing", "preference.label_smoothing", number)
    translation.skip("label_smoothing")


def _reward(translation: Translation) -> None:
    translation.ours |= {"preference.loss": "bradley_terry"}
    if not translation.given.get("center_rewards_coefficient"):
        translation.skip("center_rewards_coefficient")
    translation.leave("center_rewards_coefficient", "no term that centers rewards is here")
