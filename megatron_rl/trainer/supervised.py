"""The supervised start: optimizer steps on the data set's own responses, by the same plan and schedule as RL's.

They imitate solutions, or train on preference pairs (``preference.loss``, trainer/preference.py); they come before RL
or are the whole run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_rl.algorithm.advantage import reduction_weights
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.config import Config
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.rows import load_rows
from megatron_rl.data.solution import Solution, read_at_end
from megatron_rl.errors import ConfigError
from megatron_rl.observability.phases import SFT, WARMUP
from megatron_rl.observability.throughput import performance, step_times
from megatron_rl.planning.plan import plan_steps
from megatron_rl.planning.tokens import tokens_of
from megatron_rl.rollout.worker import to_sample
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.types import LossInputs, Rollout, StepPlan, StepResult

PURPOSE = "imitate"  # of the plans of steps on solutions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResponseUpdate:
    """Holds all values that the optimizer step on a batch of S responses reads.

    batch: with the rows that this rank's micro-batches need.
    signal: bool [S], the responses that the loss reads with a coefficient other than 0.
    inputs: of the linear loss −Σ_i w_i Σ_t log π(t): its weights [S], of any sign.
    """

    batch: Batch
    step: StepPlan
    fingerprint: bytes
    signal: np.ndarray
    inputs: LossInputs

    def accumulate(self, backend: TrainableModel) -> None:
        """Add the gradient of the linear loss. A collective."""
        backend.forward_backward(self.batch, self.step, self.inputs, fingerprint=self.fingerprint, supervised=True)


class SupervisedTask(Protocol):
    """Trains and evaluates the model on the data set's responses. Methods are collectives.

    phase: of its rows in metrics.jsonl.
    """

    phase: str

    def step(self) -> tuple[StepResult, dict[str, float]]:
        """Take one optimizer step on the next rows; return its result and its metrics."""
        ...

    def evaluate(self, *, suffix: str = "") -> dict[str, float]:
        """Return the metrics of the held-out rows, ``suffix`` behind their names; {} where none are held out."""
        ...


def response_columns(config: Config) -> tuple[tuple[str, str], ...]:
    """Return the (column, setting) of each response that the supervised steps read; () without such steps."""
    if not config.sft.is_on:
        return ()
    pairs = config.preference
    if pairs.is_on:
        return (pairs.chosen_key, "preference.chosen_key"), (pairs.rejected_key, "preference.rejected_key")
    return ((config.data.solution_key, "data.solution_key"),)


def next_responses(config: Config, prompts: PromptDataset, rows: int) -> list[Solution]:
    """Return the responses of the next rows: one of each, or under ``preference`` chosen and rejected in turns."""
    pairs = config.preference
    if not pairs.is_on:
        return prompts.next_solutions(rows)
    return _in_turns(config, prompts.next_pairs(rows, pairs.chosen_key, pairs.rejected_key))


def held_out_responses(
    config: Config, prompts: PromptDataset, tokenizer, context_tokens: int, vocab_size: int | None = None
) -> list[Solution]:
    """Return the responses that ``sft.eval_path`` or ``sft.eval_share`` holds out; [] without supervised steps.

    prompts: the training data, which hold the share.
    context_tokens, vocab_size: the model's.
    Raises ConfigError for a row that cannot be evaluated.
    """
    path, pairs = config.sft.eval_path, config.preference
    if not config.sft.is_on or not config.sft.has_evaluation:
        return []
    if path is None:
        if not pairs.is_on:
            return prompts.held_out_solutions()
        return _in_turns(config, prompts.held_out_pairs(pairs.chosen_key, pairs.rejected_key))
    data = dataclasses.replace(config.data, shuffle=False, weights=())
    rows = load_rows(path, "sft.eval_path")
    try:
        source = PromptDataset(
            rows, tokenizer, data, config.run.seed, context_tokens, vocab_size, responses=response_columns(config)
        )
        return next_responses(config, source, len(source))
    except ConfigError as error:
        raise ConfigError(f"sft.eval_path={path!r}: {error}") from error


def _in_turns(config: Config, pairs: Sequence[tuple[Solution, Solution]]) -> list[Solution]:
    responses = [response for pair in pairs for response in pair]
    return [read_at_end(response) for response in responses] if config.trains_reward_model else responses


def start_supervised_optimizer(backend: TrainableModel, config: Config) -> None:
    """Start AdamW anew under the rates and the schedule of ``sft``. A collective."""
    backend.reset_optimizer(total_steps=config.sft.steps, settings=config.sft.optimizer(config.optimizer))


def supervised_start(trainer: Trainer, task: SupervisedTask) -> bool:
    """Take the steps of ``sft.steps`` that are left, then start a fresh optimizer for RL. A collective.

    Returns whether the run was told to leave between two of them, with a checkpoint saved.
    """
    settings, backend, done = trainer.config.sft, trainer.backend, trainer.supervised_steps_done
    if not (settings.steps or done):
        return False
    if not done:  # a checkpoint has brought its optimizer, and the reference
        start_supervised_optimizer(backend, trainer.config)
        if trainer.config.preference.needs_reference:
            backend.keep_reference()
        trainer.next_row |= task.evaluate(suffix="_before")
    for number in range(done + 1, settings.steps + 1):
        trainer.timer.restart()
        result, values = task.step()
        last = number == settings.steps
        if last or (settings.eval_every_steps and number % settings.eval_every_steps == 0):
            values |= task.evaluate()
        if last and trainer.evaluation.due_at_start():
            values |= trainer.evaluate()
        trainer.write(task.phase, result, values)
        if not last and trainer.save_supervised_if_due(number):
            return True
    backend.reset_optimizer(total_steps=trainer.total_steps)
    return False


class Imitation:
    """Trains the policy to say the data set's solutions: −log π of each loss token, the mean over the step's tokens."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.phase = SFT if trainer.config.train.num_rollouts == 0 else WARMUP

    def step(self) -> tuple[StepResult, dict[str, float]]:
        trainer = self.trainer
        backend: MegatronBackend = trainer.backend
        solutions = next_responses(trainer.config, trainer.prompts, trainer.config.sft.samples_per_step)
        update = imitate(backend, response_batch(backend, solutions))
        with trainer.timer.measure("update"):
            update.accumulate(backend)
            result = backend.optim_step(update.step.kind)
        metrics = performance(backend, update.batch.facts, update.step, trainer.timer.seconds["update"])
        return result, metrics | step_times(trainer.timer, update.batch.facts)

    def evaluate(self, *, suffix: str = "") -> dict[str, float]:
        """Return the held-out solutions' loss, −log π per loss token, as ``sft/eval_loss``."""
        trainer, sums, num_tokens = self.trainer, [], 0
        if not trainer.held_out:
            return {}
        with trainer.timer.follow("eval"):
            for batch in response_batches(trainer.backend, trainer.held_out, trainer.config.sft.samples_per_step):
                read = trainer.backend.logprobs(batch, np.ones(batch.facts.num_samples, dtype=bool))
                sums.append(-float(read.flat.astype(np.float64).sum()))
                num_tokens += int(batch.facts.loss_tokens.sum())
        loss = math.fsum(sums) / num_tokens
        return {f"sft/eval_loss{suffix}": loss, f"sft/eval_tokens{suffix}": num_tokens}


def imitate(backend: MegatronBackend, batch: Batch) -> ResponseUpdate:
    """Plan the one optimizer step on a batch of solutions: w = 1/N over its N loss tokens. A collective."""
    facts = batch.facts
    weights = reduction_weights("token_mean", facts, np.arange(facts.num_samples), max_response_tokens=1)
    return plan_update(backend, batch, weights, facts.loss_tokens > 0, purpose=PURPOSE, drops=False)


def plan_update(
    backend: TrainableModel, batch: Batch, weights: np.ndarray, signal: np.ndarray, *, purpose: str, drops: bool
) -> ResponseUpdate:
    """Plan the one optimizer step on a batch of S responses. A collective.

    weights: float64 [S], of the linear loss. signal: bool [S]. purpose, drops: as ``plan_steps`` takes them.
    """
    facts = batch.facts
    tokens = tokens_of(facts, share_prompts=backend.rules.share_prompts)
    plan = plan_steps(purpose, [np.arange(facts.num_samples)], tokens, signal, backend.rules, drops=drops)
    return ResponseUpdate(
        batch=backend.fetch_rows(batch, plan),
        step=plan.mini_batches[0],
        fingerprint=plan.fingerprints()[0],
        signal=signal,
        inputs=LossInputs(advantages=weights, weights=weights),
    )


def response_batches(
    backend: TrainableModel, responses: Sequence[Solution], size: int, *, of_row: int = 1
) -> Iterator[Batch]:
    """Yield batches of ``size`` rows, ``of_row`` responses each. Collectives."""
    for first in range(0, len(responses), size * of_row):
        yield response_batch(backend, responses[first : first + size * of_row], of_row=of_row)


def response_batch(backend: TrainableModel, responses: Sequence[Solution], *, of_row: int = 1) -> Batch:
    """Make a batch of responses, ``of_row`` of each group, spread over all ranks. A collective."""
    topology, version = backend.topology, backend.weight_version
    places = list(range(topology.rank, len(responses), topology.world_size))
    samples = []
    for place in places:
        response, num_tokens = responses[place], len(responses[place].response_ids)
        rollout = Rollout(
            prompt=response.prompt,
            sample_index=place % of_row,
            response_ids=response.response_ids,
            logprobs=(0.0,) * num_tokens,
            text="",
            finish_reason="stop",
            weight_versions=((version, num_tokens),),
            loss_mask=response.loss_mask,
        )
        samples.append(to_sample(rollout, included=True))
    return backend.gather(samples, [place // of_row for place in places], places)
