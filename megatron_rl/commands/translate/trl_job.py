"""The translation of the settings that all TRL trainers share: model, data, batch size, schedule and logging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.commands.translate.translation import Translation, number, paths, truth, whole
from megatron_rl.config.lora import PROJECTIONS
from megatron_rl.errors import ConfigError
from megatron_rl.hub.names import HubName

# TRL's and transformers' defaults of translated settings, used if the user's file leaves them out.
DEFAULTS: dict[str, Any] = {
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "seed": 42,
}
NEEDLESS = (
    "tf32",
    "attn_implementation",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs.",
    "do_train",
    "do_eval",
    "eval_strategy",
    "per_device_eval_batch_size",
    "log_level",
    "logging_dir",
    "logging_first_step",
    "logging_steps",
    "logging_strategy",
    "overwrite_output_dir",
    "save_strategy",
    "save_only_model",
    "save_safetensors",
    "num_processes",
    "dataset_num_proc",
    "dataloader_num_workers",
    "ddp_timeout",
    "use_liger_kernel",
    "remove_unused_columns",
    "no_remove_unused_columns",
)


def processes_of(settings: Mapping[str, Any], processes: int | None) -> int:
    """Return the number of training processes, by which TRL's batch size per process is multiplied.

    settings: TRL's settings, which may hold ``num_processes``.
    processes: the number that the user gave; None if not given.

    Raises ConfigError if neither gives it.
    """
    processes = processes or settings.get("num_processes")
    if processes is None:
        raise ConfigError(
            "the batch there is per device: say how many processes train by --processes, as in --processes 8"
        )
    return whole(processes)


def model_and_data(translation: Translation) -> None:
    translation.take("model_name_or_path", "model.hf_path", str)
    for name in ("dtype", "torch_dtype"):
        translation.take(name, "model.dtype", _dtype)
    translation.take("seed", "run.seed", whole)
    translation.compute("data.train", ("dataset_name",), lambda name: [_data_set(translation, name)])
    for name in ("dataset_test_split", "dataset_mixture", "datasets"):
        translation.leave(name, "data.train names files of the rows that are trained")
    if translation.given.get("model_revision", "main") == "main":
        translation.skip("model_revision")
    translation.leave("model_revision", "model.hf_path is a folder of that revision")
    translation.leave("trust_remote_code", "no code of a model's folder is run here")
    for name in ("load_in_4bit", "load_in_8bit", "fp16"):
        if translation.given.get(name) is False:
            translation.skip(name)
        translation.leave(name, "model.dtype is float32 or bfloat16")
    for name, default in (("bf16", True), ("disable_dropout", True)):
        if translation.given.get(name, default) in (default, "auto"):
            translation.skip(name)
        translation.leave(name, "model.dtype=float32 says so here" if name == "bf16" else "dropout is off here")
    _adapters(translation)


def _data_set(translation: Translation, name: object) -> str:
    """Return a data set's name with its configuration and split, as data.train names it (docs/object-storage.md).

    The name is returned as it is if the settings name no configuration, and no split but ``train``.

    name: the data set's name on the hub.
    """
    subset, split = translation.get("dataset_config"), translation.get("dataset_train_split")
    if subset is None and split in (None, "train"):
        return str(name)
    return str(HubName(repo=str(name), subset=subset, split=split))


def _adapters(translation: Translation) -> None:
    names = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_task_type")
    if not truth(translation.get("use_peft") or False):
        translation.skip(*names)
        return
    translation.take("lora_r", "lora.rank", whole)
    translation.take("lora_alpha", "lora.alpha", number)
    if not translation.given.get("lora_dropout", 0.05):
        translation.skip("lora_dropout")
    dropout = "adapters have no dropout here: log-probs of engine and trainer would be of two models"
    translation.leave("lora_dropout", dropout)
    if not translation.is_given("lora_dropout"):
        translation.left["lora_dropout"] = f"0.05 by default: {dropout}"
    translation.take("lora_target_modules", "lora.targets", targets)
    translation.skip("lora_task_type")


def targets(value: Any) -> list[str]:
    """Return the value for our ``lora.targets``: our names of the layers that hold Hugging Face's projections.

    value: the projections' names, such as ``["q_proj", "k_proj", "v_proj"]``; or ``all-linear``.

    Raises ValueError if some, but not all, of the projections in one of our layers are listed.
    """
    names = set(paths(value))
    if names in ({"all-linear"}, {"all"}):
        return list(PROJECTIONS)
    layers = [ours for ours, theirs in PROJECTIONS.items() if names & set(theirs)]
    covered = {name for ours in layers for name in PROJECTIONS[ours]}
    if names != covered:
        raise ValueError(f"lora.targets are whole layers here: {PROJECTIONS}")
    return layers


def _dtype(value: Any) -> str:
    if value not in ("float32", "bfloat16", "auto"):
        raise ValueError("model.dtype is float32, bfloat16 or auto")
    return value


def schedule(translation: Translation, section: str) -> None:
    """Set our learning rate, its schedule, weight decay, gradient clipping and AdamW's betas and epsilon.

    section: the section of our configuration for the learning rate: ``optimizer`` or ``sft``.
    """
    translation.take("learning_rate", f"{section}.lr", number)
    translation.take("weight_decay", f"{section}.weight_decay", number)
    translation.take("max_grad_norm", "optimizer.clip_grad", number)
    share = translation.given.get("warmup_steps")
    if isinstance(share, float) and 0 < share < 1:
        translation.leave("warmup_steps", f"a share of the steps: give their number, {section}.warmup_steps")
    else:
        translation.take("warmup_steps", f"{section}.warmup_steps", whole)
    translation.leave("warmup_ratio", f"give the number of steps, {section}.warmup_steps")
    schedules: dict[object, Mapping[str, Any]] = {
        "constant": {f"{section}.schedule": "constant"},
        "constant_with_warmup": {f"{section}.schedule": "constant"},
        "linear": {f"{section}.schedule": "linear"},
        "cosine": {f"{section}.schedule": "cosine"},
        "cosine_with_min_lr": {f"{section}.schedule": "cosine"},
    }
    translation.choose("lr_scheduler_type", schedules, f"{section}.schedule is constant, cosine or linear")
    translation.compute(
        f"{section}.min_lr",
        ("lr_scheduler_kwargs.min_lr_rate", "learning_rate"),
        lambda share, rate: float(f"{number(share) * number(rate):.12g}"),
    )
    translation.take("lr_scheduler_kwargs.min_lr", f"{section}.min_lr", number)
    for name, index in (("adam_beta1", 0), ("adam_beta2", 1)):
        value = translation.get(name)
        if value is not None:
            betas = translation.ours.setdefault("optimizer.betas", [0.9, 0.999])
            betas[index] = number(value)
    translation.take("adam_epsilon", "optimizer.epsilon", number)
    if translation.given.get("optim", "adamw_torch") in ("adamw_torch", "adamw_torch_fused", "adamw_hf"):
        translation.skip("optim")
    translation.leave("optim", "AdamW in full precision is the optimizer here")


def records(translation: Translation) -> None:
    translation.take("output_dir", "run.dir", str)
    translation.take("run_name", "run.name", str)
    translation.take("save_total_limit", "checkpoint.keep_last", whole)
    report = translation.get("report_to")
    for name in paths(report) if report is not None else []:
        if name == "wandb":
            translation.ours["metrics.wandb_project"] = str(translation.get("wandb_project") or "megatron_rl")
        elif name == "tensorboard":
            translation.ours["metrics.tensorboard"] = True
        elif name == "mlflow":
            translation.ours["metrics.mlflow_experiment"] = "megatron_rl"
        elif name != "none":
            translation.left["report_to"] = f"{name!r}: wandb, tensorboard and mlflow are here"
    translation.skip("wandb_project", "wandb_entity")
    for name in ("push_to_hub", "hub_model_id", "hub_strategy", "hub_always_push", "push_to_hub_revision"):
        translation.leave(name, "nothing is sent to a hub; the policy is exported under checkpoints/")
