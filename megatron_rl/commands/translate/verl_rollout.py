"""The translation of verl's settings on rollouts and the trainer: engine, sampling, evaluation, checkpoints, logs."""

from __future__ import annotations

from typing import Any

from megatron_rl.commands.translate.translation import Translation, number, paths, truth, whole

# the beginnings of verl's names
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
WHOLE_DISTRIBUTION = {"top_p": (1,), "top_k": (-1, 0)}  # verl writes top_k 0 for Hugging Face's engine


def translate(translation: Translation) -> None:
    """Set our sections rollout, eval, train, checkpoint, metrics and run in ``translation`` from verl's settings."""
    _engine(translation)
    _evaluation(translation)
    _trainer(translation)


def _engine(translation: Translation) -> None:
    engine = translation.get(f"{ROLLOUT}.name")
    translation.ours["rollout.engine"] = "vllm"
    if engine not in ("vllm", "hf"):
        translation.left[f"{ROLLOUT}.name"] = f"{engine!r}: engines here are vllm and transformers; vllm is set"
    translation.take(f"{ROLLOUT}.n", "rollout.samples_per_prompt", whole)
    translation.take(f"{ROLLOUT}.temperature", "rollout.temperature", number)
    translation.take(f"{ROLLOUT}.tensor_model_parallel_size", "rollout.tensor_parallel", whole)
    translation.take(f"{ROLLOUT}.gpu_memory_utilization", "rollout.gpu_memory_utilization", number)
    for name, off in WHOLE_DISTRIBUTION.items():
        if translation.given.get(f"{ROLLOUT}.{name}", off[0]) in off:
            translation.skip(f"{ROLLOUT}.{name}")
        translation.leave(
            f"{ROLLOUT}.{name}", "samples are drawn from the whole distribution, whose log-probs are trained"
        )
    for name in ("enforce_eager", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"):
        translation.take(f"{ROLLOUT}.{name}", f"rollout.vllm.{name}")
    translation.take(f"{ROLLOUT}.enable_prefix_caching", "rollout.vllm.enable_prefix_caching")
    prefix = f"{ROLLOUT}.engine_kwargs.vllm."
    for name in translation.under(prefix):
        translation.take(name, f"rollout.vllm.{name.removeprefix(prefix)}")
    for name in translation.under(f"{ROLLOUT}.multi_turn."):
        translation.leave(
            name, "episodes of several turns: environment.name or rollout.endpoint.agent (docs/agents.md)"
        )


def _evaluation(translation: Translation) -> None:
    name = f"{ROLLOUT}.val_kwargs"
    sampled = translation.get(f"{name}.do_sample")
    if sampled is not None and truth(sampled):
        translation.take(f"{name}.temperature", "eval.temperature", number)
        translation.take(f"{name}.n", "eval.samples_per_prompt", whole)
        for each, off in WHOLE_DISTRIBUTION.items():
            if translation.given.get(f"{name}.{each}", off[0]) in off:
                translation.skip(f"{name}.{each}")
            translation.leave(f"{name}.{each}", "an evaluation samples the whole distribution here too")
        return
    if translation.given.get(f"{name}.n", 1) != 1:
        translation.leave(
            f"{name}.n", "an evaluation is greedy without do_sample, and equal samples are drawn once here"
        )
    # a greedy evaluation reads none of them
    translation.skip(*(f"{name}.{each}" for each in ("n", "temperature", *WHOLE_DISTRIBUTION)))


def _trainer(translation: Translation) -> None:
    translation.ours["train.num_rollouts"] = None
    steps = translation.given.get("trainer.total_training_steps")
    if "trainer.total_training_steps" in translation.unknown or (steps is not None and whole(steps) > 0):
        translation.take("trainer.total_training_steps", "train.num_rollouts", whole)  # verl's step is a rollout
    else:
        translation.skip("trainer.total_training_steps")
        translation.take("trainer.total_epochs", "train.epochs", whole)
    translation.skip("trainer.total_epochs")
    translation.take("trainer.save_freq", "checkpoint.save_every_rollouts", lambda value: max(0, whole(value)))
    translation.take("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last", whole)
    translation.choose(
        "trainer.resume_mode",
        {"auto": {"checkpoint.resume": "auto"}, "disable": {"checkpoint.resume": "never"}},
        "a run goes on from its own run.dir here: auto, or never",
    )
    every = translation.given.get("trainer.test_freq")
    if "trainer.test_freq" in translation.unknown or (every is not None and whole(every) > 0):
        translation.take("trainer.test_freq", "eval.every_rollouts", whole)
    translation.skip("trainer.test_freq")
    translation.take("trainer.val_before_train", "eval.at_start", truth)
    translation.take("trainer.experiment_name", "run.name", str)
    translation.take("trainer.default_local_dir", "run.dir", str)
    if translation.given.get("trainer.device", "cuda") == "cuda":
        translation.skip("trainer.device")
    translation.leave("trainer.device", "GPUs run it here, or CPUs for trials")
    _loggers(translation, translation.get("trainer.logger"), translation.get("trainer.project_name"))


def _loggers(translation: Translation, loggers: Any, project: Any) -> None:
    for logger in paths(loggers) if loggers is not None else []:
        if logger == "wandb":
            translation.ours["metrics.wandb_project"] = str(project or "megatron_rl")
        elif logger == "tensorboard":
            translation.ours["metrics.tensorboard"] = True
        elif logger == "mlflow":
            translation.ours["metrics.mlflow_experiment"] = str(project or "megatron_rl")
        elif logger != "console":
            translation.left["trainer.logger"] = f"{logger!r}: wandb, tensorboard and mlflow are here"
