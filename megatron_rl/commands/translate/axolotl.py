"""The translation of axolotl's YAML: its settings are renamed to TRL's, and then translated by the rules for TRL.

axolotl trains with TRL's trainers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.commands.translate import trl, trl_pairs
from megatron_rl.commands.translate.translation import Translation

NAMES = {  # axolotl's → TRL's
    "base_model": "model_name_or_path",
    "revision_of_model": "model_revision",
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "sequence_len": "max_length",
    "sample_packing": "packing",
    "rl_beta": "beta",
    "dpo_beta": "beta",
    "dpo_label_smoothing": "label_smoothing",
    "wandb_name": "run_name",
}
DEFAULTS: dict[str, Any] = {  # axolotl's defaults that differ from TRL's
    "lr_scheduler_type": "cosine",
    "num_train_epochs": 1,
    "per_device_train_batch_size": 1,
}
NEEDLESS = (
    *("model_type", "tokenizer_type", "is_llama_derived_model", "strict", "dataset_prepared_path", "dataset_processes"),
    *("tf32", "flash_attention", "sdp_attention", "xformers_attention", "attn_implementation"),
    *("eager_attention", "pad_to_sequence_len", "eval_sample_packing", "evals_per_epoch"),
    *("saves_per_epoch", "debug", "deepspeed", "fsdp", "wandb_watch", "wandb_log_model", "wandb_entity"),
    *("local_rank",),
    *("save_safetensors", "save_first_step", "gradient_checkpointing", "activation_offloading", "fsdp_version"),
    *("skip_prepare_dataset", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "use_kernels"),
    *("ddp_find_unused_parameters", "torch_compile", "logging_steps"),
)
PREFIXES = ("gradient_checkpointing_kwargs.", "fsdp_config.", "special_tokens.pad_token", "liger_")


def trainer_of(settings: Mapping[str, Any]) -> str:
    """Return the trainer that an axolotl file is for, such as ``grpo``; ``sft`` if the file does not say.

    The name is ``reward`` for a reward model, ``prm`` for a process reward model, else the value of
    the setting ``rl``.
    """
    if settings.get("reward_model"):
        return "reward"
    if settings.get("process_reward_model"):
        return "prm"
    return str(settings.get("rl") or "sft")


def translate(
    trainer: str, given: Mapping[str, Any], unknown: Mapping[str, str] | None = None, *, processes: int | None = None
) -> Translation:
    """Return the translation of axolotl's settings into ours.

    trainer: the result of ``trainer_of``.
    given: the settings in the file.
    unknown: {name: reason} of settings whose value is not known, such as ``lr=$LR``.
    processes: the number of training processes, if no setting gives it; axolotl's batch is per
        process.

    Raises ConfigError if nothing gives the number of processes.
    """
    written = {name: value for name, value in given.items() if value is not None}
    needless = [name for name in written if name in NEEDLESS or name.startswith(PREFIXES)]
    theirs: dict[str, str] = {}  # TRL's name → axolotl's
    settings: dict[str, Any] = dict(DEFAULTS)
    for name, value in written.items():
        if name not in needless:
            other = NAMES.get(name, name.removeprefix("trl."))
            theirs[other] = name
            settings[other] = value
    _own(trainer, settings)
    renamed = {NAMES.get(name, name): why for name, why in (unknown or {}).items()}
    if trainer in ("grpo", "gdpo"):
        translation = trl.translate(settings, renamed, processes=processes)
    else:
        translation = trl_pairs.translate(
            {"ipo": "dpo", "simpo": "cpo"}.get(trainer, trainer), settings, renamed, processes=processes
        )
    translation.framework = "axolotl"
    share = settings.get("val_set_size")
    if share == 0 or (isinstance(share, float) and trainer not in ("grpo", "gdpo")):
        translation.left.pop("val_set_size")
        translation.ours |= {"sft.eval_share": share} if share else {}
    translation.left = {theirs.get(name, name): why for name, why in translation.left.items()}
    translation.needless = [theirs[name] for name in translation.needless if name in theirs] + needless
    return translation


def _own(trainer: str, settings: dict[str, Any]) -> None:
    """Change ``settings`` in place: replace each setting that only axolotl has by TRL's setting of equal meaning."""
    for name in ("rl", "reward_model"):
        settings.pop(name, None)
    if settings.get("packing") is False:
        settings.pop("packing")
    if trainer == "gdpo":
        settings.setdefault("multi_objective_aggregation", "normalize_then_sum")
    elif trainer in ("dpo", "ipo", "simpo"):
        settings.setdefault("loss_type", {"dpo": "sigmoid"}.get(trainer, trainer))
    if trainer == "simpo":
        settings.setdefault("cpo_alpha", 0)
    if trainer == "sft":
        settings["assistant_only_loss"] = not settings.pop("train_on_inputs", False)
    if settings.pop("adapter", None) in ("lora", "qlora"):
        settings["use_peft"] = True
        if settings.pop("lora_target_linear", False):
            settings["lora_target_modules"] = "all-linear"
    if settings.get("wandb_project"):
        settings.setdefault("report_to", "wandb")
