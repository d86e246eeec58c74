"""Translates verl's rollout and trainer: the engine, sampling, evaluation, records."""

from __future__ import annotations

from typing import Any

from megatron_rl.commands.translate.translation import Translation, number, paths, truth, whole
from megatron_rl.commands.translate.verl_names import ROLLOUT

WHOLE_DISTRIBUTION = {"top_p": (1,), "top_k": (-1, 0)}  # verl writes 0 for Hugging Face's engine


def translate(found: Translation) -> None:
    """Set our sections rollout, eval, train, checkpoint, metrics and run."""
    _engine(found)
    _evaluation(found)
    _trainer(found)


def _engine(found: Translation) -> None:
    engine = found.get(f"{ROLLOUT}.name")
    found.ours["rollout.engine"] = "vllm"
    if engine not in ("vllm", "hf"):
        found.left[f"{ROLLOUT}.name"] = f"{engine!r}: engines here are vllm and transformers; vllm is set"
    found.take(f"{ROLLOUT}.n", "rollout.samples_per_prompt", whole)
    found.take(f"{ROLLOUT}.temperature", "rollout.temperature", number)
    found.take(f"{ROLLOUT}.tensor_model_parallel_size", "rollout.tensor_parallel", whole)
    found.take(f"{ROLLOUT}.gpu_memory_utilization", "rollout.gpu_memory_utilization", number)
    for name, off in WHOLE_DISTRIBUTION.items():
        if found.given.get(f"{ROLLOUT}.{name}", off[0]) in off:
            found.skip(f"{ROLLOUT}.{name}")
        found.leave(f"{ROLLOUT}.{name}", "samples are drawn from the whole distribution, whose log-probs are trained")
    for name in ("enforce_eager", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"):
        found.take(f"{ROLLOUT}.{name}", f"rollout.vllm.{name}")
    found.take(f"{ROLLOUT}.enable_prefix_caching", "rollout.vllm.enable_prefix_caching")
    prefix = f"{ROLLOUT}.engine_kwargs.vllm."
    for name in found.under(prefix):
        found.take(name, f"rollout.vllm.{name.removeprefix(prefix)}")
    for name in found.under(f"{ROLLOUT}.multi_turn."):
        found.leave(name, "episodes of several turns: environment.name or rollout.endpoint.agent (docs/multi-turn.md)")


def _evaluation(found: Translation) -> None:
    name = f"{ROLLOUT}.val_kwargs"
    sampled = found.get(f"{name}.do_sample")
    if sampled is not None and truth(sampled):
        found.take(f"{name}.temperature", "eval.temperature", number)
        found.take(f"{name}.n", "eval.samples_per_prompt", whole)
        for each, off in WHOLE_DISTRIBUTION.items():
            if found.given.get(f"{name}.{each}", off[0]) in off:
                found.skip(f"{name}.{each}")
            found.leave(f"{name}.{each}", "an evaluation samples the whole distribution here too")
        return
    if found.given.get(f"{name}.n", 1) != 1:
        found.leave(f"{name}.n", "an evaluation is greedy without do_sample, and equal samples are drawn once here")
    found.skip(*(f"{name}.{each}" for each in ("n", "temperature", *WHOLE_DISTRIBUTION)))  # greedy: none is read


def _trainer(found: Translation) -> None:
    found.ours["train.num_rollouts"] = None
    steps = found.given.get("trainer.total_training_steps")
    if "trainer.total_training_steps" in found.unknown or (steps is not None and whole(steps) > 0):
        found.take("trainer.total_training_steps", "train.num_rollouts", whole)  # verl's step is a rollout
    else:
        found.skip("trainer.total_training_steps")
        found.take("trainer.total_epochs", "train.epochs", whole)
    found.skip("trainer.total_epochs")
    found.take("trainer.save_freq", "checkpoint.save_every_rollouts", lambda value: max(0, whole(value)))
    found.take("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last", whole)
    found.choose(
        "trainer.resume_mode",
        {"auto": {"checkpoint.resume": "auto"}, "disable": {"checkpoint.resume": "never"}},
        "a run goes on from its own run.dir here: auto, or never",
    )
    every = found.given.get("trainer.test_freq")
    if "trainer.test_freq" in found.unknown or (every is not None and whole(every) > 0):
        found.take("trainer.test_freq", "eval.every_rollouts", whole)
    found.skip("trainer.test_freq")
    found.take("trainer.val_before_train", "eval.at_start", truth)
    found.take("trainer.experiment_name", "run.name", str)
    found.take("trainer.default_local_dir", "run.dir", str)
    if found.given.get("trainer.device", "cuda") == "cuda":
        found.skip("trainer.device")
    found.leave("trainer.device", "GPUs run it here, or CPUs for trials")
    _loggers(found, found.get("trainer.logger"), found.get("trainer.project_name"))


def _loggers(found: Translation, loggers: Any, project: Any) -> None:
    for logger in paths(loggers) if loggers is not None else []:
        if logger == "wandb":
            found.ours["metrics.wandb_project"] = str(project or "megatron_rl")
        elif logger == "tensorboard":
            found.ours["metrics.tensorboard"] = True
        elif logger == "mlflow":
            found.ours["metrics.mlflow_experiment"] = str(project or "megatron_rl")
        elif logger != "console":
            found.left["trainer.logger"] = f"{logger!r}: wandb, tensorboard and mlflow are here"
