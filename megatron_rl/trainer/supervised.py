"""The supervised start: optimizer steps on the data set's solutions, by the same plan and schedule as RL's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from megatron_rl.algorithm.advantage import reduction_weights
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.config import Config
from megatron_rl.data.prompt_dataset import PromptDataset, Solution
from megatron_rl.data.rows import load_rows
from megatron_rl.errors import ConfigError
from megatron_rl.observability.throughput import performance
from megatron_rl.planning.plan import plan_steps
from megatron_rl.planning.tokens import tokens_of
from megatron_rl.rollout.worker import to_sample
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.types import LossInputs, Rollout, StepResult


def held_out_solutions(
    config: Config, prompts: PromptDataset, tokenizer, context_tokens: int, vocab_size: int | None = None
) -> list[Solution]:
    """Return the solutions that ``sft.eval_path`` or ``sft.eval_share`` holds out; [] without supervised steps.

    prompts: the training data, which hold the share.
    context_tokens, vocab_size: the model's.
    Raises ConfigError for a row that cannot be evaluated.
    """
    path, steps = config.sft.eval_path, config.sft.steps
    if not steps or path is None:
        return prompts.held_out_solutions() if steps and config.sft.eval_share else []
    data = dataclasses.replace(config.data, shuffle=False, weights=())
    rows = load_rows(path, "sft.eval_path")
    try:
        source = PromptDataset(rows, tokenizer, data, config.run.seed, context_tokens, vocab_size)
        return source.next_solutions(len(source))
    except ConfigError as error:
        raise ConfigError(f"sft.eval_path={path!r}: {error}") from error


def start_supervised_optimizer(backend: MegatronBackend, config: Config) -> None:
    """Start AdamW anew under the rates and the schedule of ``sft``. A collective."""
    backend.reset_optimizer(total_steps=config.sft.steps, settings=config.sft.optimizer(config.optimizer))


def supervised_start(trainer: Trainer) -> bool:
    """Take the steps of ``sft.steps`` that are left, then start a fresh optimizer for RL. A collective.

    Returns whether the run was told to leave between two of them, with a checkpoint saved.
    """
    settings, backend, done = trainer.config.sft, trainer.backend, trainer.supervised_steps_done
    if not (settings.steps or done):
        return False
    if not done:  # a checkpoint has brought its optimizer
        start_supervised_optimizer(backend, trainer.config)
        trainer.next_row |= evaluate_solutions(trainer, suffix="_before")
    for number in range(done + 1, settings.steps + 1):
        trainer.timer.restart()
        batch = solution_batch(backend, trainer.prompts.next_solutions(settings.samples_per_step))
        result, values = supervised_step(trainer, batch)
        last = number == settings.steps
        if last or (settings.eval_every_steps and number % settings.eval_every_steps == 0):
            values |= evaluate_solutions(trainer)
        if last and trainer.evaluation.due_at_start():
            values |= trainer.evaluate()
        trainer.write("warmup", result, values)
        if not last and trainer.save_supervised_if_due(number):
            return True
    backend.reset_optimizer(total_steps=trainer.total_steps)
    return False


def supervised_step(trainer: Trainer, batch: Batch) -> tuple[StepResult, dict[str, float]]:
    """Take one optimizer step on a batch of solutions; return its result, and its times. A collective."""
    backend, facts = trainer.backend, batch.facts
    members = np.arange(facts.num_samples)
    tokens = tokens_of(facts, share_prompts=backend.rules.share_prompts)
    plan = plan_steps("warmup", [members], tokens, facts.loss_tokens > 0, backend.rules, drops=False)
    batch = backend.fetch_rows(batch, plan)
    (step,) = plan.mini_batches
    weights = reduction_weights("token_mean", facts, step.members, max_response_tokens=1)
    inputs = LossInputs(advantages=weights, weights=weights)
    with trainer.timer.measure("update"):
        backend.forward_backward(batch, step, inputs, fingerprint=plan.fingerprints()[0], supervised=True)
        result = backend.optim_step(step.kind)
    return result, performance(backend, facts, step, trainer.timer.seconds["update"]) | trainer.timer.take()


def evaluate_solutions(trainer: Trainer, *, suffix: str = "") -> dict[str, float]:
    """Return the held-out solutions' loss, −log π per loss token, as ``sft/eval_loss``; {} where none are held out.

    suffix: ends the metric's name. A collective.
    """
    solutions, size = trainer.held_out, trainer.config.sft.samples_per_step
    if not solutions:
        return {}
    sums: list[float] = []
    num_tokens = 0
    with trainer.watchdog.stage("eval"):
        for first in range(0, len(solutions), size):
            batch = solution_batch(trainer.backend, solutions[first : first + size])
            read = trainer.backend.logprobs(batch, np.ones(batch.facts.num_samples, dtype=bool))
            sums.append(-float(read.flat.astype(np.float64).sum()))
            num_tokens += int(batch.facts.loss_tokens.sum())
    loss = math.fsum(sums) / num_tokens
    return {f"sft/eval_loss{suffix}": loss, f"sft/eval_tokens{suffix}": num_tokens}


def solution_batch(backend: MegatronBackend, solutions: Sequence[Solution]) -> Batch:
    """Make a batch of solutions, spread over all ranks. A collective."""
    topology, version = backend.topology, backend.weight_version
    places = list(range(topology.rank, len(solutions), topology.world_size))
    samples = []
    for place in places:
        solution, num_tokens = solutions[place], len(solutions[place].response_ids)
        rollout = Rollout(
            prompt=solution.prompt,
            sample_index=0,
            response_ids=solution.response_ids,
            logprobs=(0.0,) * num_tokens,
            text="",
            finish_reason="stop",
            weight_versions=((version, num_tokens),),
            loss_mask=solution.loss_mask,
        )
        samples.append(to_sample(rollout, included=True))
    return backend.gather(samples, places, places)
