"""The supervised start: optimizer steps on responses of the data set, with RL's planner and pipeline schedule.

Its steps imitate solutions, or train on preference pairs (``preference.loss``,
trainer/preference.py). They precede RL, or are the whole run.
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
from megatron_rl.config import DataConfig, OptimizerConfig, PreferenceConfig, SftConfig
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.rows import load_rows
from megatron_rl.data.solution import Solution, read_at_end
from megatron_rl.errors import ConfigError
from megatron_rl.observability.summary import SFT, WARMUP
from megatron_rl.observability.throughput import performance, step_times
from megatron_rl.observability.timer import StepTimer
from megatron_rl.planning.plan import plan_steps
from megatron_rl.planning.tokens import tokens_of
from megatron_rl.rollout.job import to_sample
from megatron_rl.trainer.run import Run
from megatron_rl.trainer.training_data import response_columns
from megatron_rl.types import LossInputs, Rollout, StepPlan, StepResult

PURPOSE = "imitate"  # names the plans of steps on solutions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResponseUpdate:
    """Holds everything that the optimizer step on a batch of S responses needs.

    batch: the batch, with the responses that this rank's micro-batches need.
    step: the plan of the optimizer step.
    fingerprint: a digest of the plan, which all ranks compare.
    signal: bool [S], the responses that add to the gradient.
    inputs: the inputs of the loss −Σ_i w_i Σ_t log π(t), over responses i and their loss tokens t. The
        weights w are [S], of any sign.
    """

    batch: Batch
    step: StepPlan
    fingerprint: bytes
    signal: np.ndarray
    inputs: LossInputs

    def accumulate(self, backend: TrainableModel) -> None:
        """Add the gradient of the loss −Σ_i w_i Σ_t log π(t) to the backend's accumulated gradient. A collective."""
        backend.forward_backward(self.batch, self.step, self.inputs, fingerprint=self.fingerprint, supervised=True)


class SupervisedTask(Protocol):
    """Trains and evaluates the model on the data set's responses. Methods are collectives.

    phase: the name in the field ``phase`` of the task's rows of metrics.jsonl.
    """

    phase: str

    def step(self) -> tuple[StepResult, dict[str, float]]:
        """Take one optimizer step on the next rows of the data; return (its result, {metric: value})."""
        ...

    def evaluate(self, *, suffix: str = "") -> dict[str, float]:
        """Return the metrics of the held-out rows; {} if no rows are held out.

        suffix: is appended to the metrics' names.
        """
        ...


def next_responses(prompts: PromptDataset, rows: int, pairs: PreferenceConfig) -> list[Solution]:
    """Return the responses of the next ``rows`` rows of the data.

    A row has one response. If ``pairs`` is on, it has a chosen and a rejected response, one after the
    other.
    """
    if not pairs.is_on:
        return prompts.next_solutions(rows)
    return _in_turns(prompts.next_pairs(rows, pairs.chosen_key, pairs.rejected_key), pairs)


def held_out_responses(
    sft: SftConfig,
    pairs: PreferenceConfig,
    data: DataConfig,
    seed: int,
    prompts: PromptDataset,
    tokenizer,
    context_tokens: int,
    vocab_size: int,
) -> list[Solution]:
    """Return the responses that ``sft.eval_path`` or ``sft.eval_share`` holds out; [] without supervised steps.

    pairs: the settings of preference pairs; if they are on, each row gives two responses.
    seed: ``run.seed``.
    prompts: the training data, from which ``sft.eval_share`` holds rows out.
    context_tokens, vocab_size: the model's context length and vocabulary size.

    Raises ConfigError for a row that cannot be evaluated.
    """
    path = sft.eval_path
    if not sft.is_on or not sft.has_evaluation:
        return []
    if path is None:
        if not pairs.is_on:
            return prompts.held_out_solutions()
        return _in_turns(prompts.held_out_pairs(pairs.chosen_key, pairs.rejected_key), pairs)
    rows, columns = load_rows(path, "sft.eval_path"), response_columns(sft, pairs, data)
    data = dataclasses.replace(data, shuffle=False, weights=())
    try:
        source = PromptDataset(rows, tokenizer, data, seed, context_tokens, vocab_size, responses=columns)
        return next_responses(source, len(source), pairs)
    except ConfigError as error:
        raise ConfigError(f"sft.eval_path={path!r}: {error}") from error


def _in_turns(rows: Sequence[tuple[Solution, Solution]], pairs: PreferenceConfig) -> list[Solution]:
    responses = [response for pair in rows for response in pair]
    return [read_at_end(response) for response in responses] if pairs.trains_reward_model else responses


def start_supervised_optimizer(backend: TrainableModel, sft: SftConfig, of_rl: OptimizerConfig) -> None:
    """Replace the optimizer by a fresh AdamW with the learning rate and the schedule of ``sft``. A collective.

    of_rl: RL's optimizer settings; those that ``sft`` does not set are taken from it.
    """
    backend.reset_optimizer(total_steps=sft.steps, settings=sft.optimizer(of_rl))


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedStart:
    """Takes the remaining steps of ``sft.steps``, then starts a fresh optimizer for RL.

    optimizer:       RL's optimizer settings.
    done:            the supervised steps taken before the run resumed; 0 if it did not resume
                     within the start.
    total_rl_steps:  the optimizer steps of RL that may move the policy; the schedule of RL's
                     learning rate ends after them.
    keeps_reference: whether the supervised loss needs a reference policy, as DPO does. The weights
                     before the first supervised step are then kept as the reference.
    """

    task: SupervisedTask
    settings: SftConfig
    optimizer: OptimizerConfig
    done: int
    total_rl_steps: int
    keeps_reference: bool

    def take(self, run: Run) -> bool:
        """Take the supervised steps that are left; return whether the run must stop before their end. A collective.

        It must stop if a rank got SIGTERM, SIGUSR1 or SIGINT; a checkpoint is saved by then.
        """
        settings, backend, task = self.settings, run.backend, self.task
        if not self.done:  # else the checkpoint has brought optimizer and reference
            start_supervised_optimizer(backend, settings, self.optimizer)
            if self.keeps_reference:
                backend.keep_reference()
            run.records.add(task.evaluate(suffix="_before"))
        for number in range(self.done + 1, settings.steps + 1):
            run.timer.restart()
            result, values = task.step()
            last = number == settings.steps
            if last or (settings.eval_every_steps and number % settings.eval_every_steps == 0):
                values |= task.evaluate()
            if last and run.evaluation is not None and run.evaluation.due_at_start():
                values |= run.evaluate()
            run.records.write(task.phase, result, values)
            if not last and run.checkpoints is not None and run.checkpoints.save_supervised_if_due(number):
                return True
        backend.reset_optimizer(total_steps=self.total_rl_steps)
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """Holds the responses that a supervised task trains and evaluates on.

    prompts:  the training data.
    size:     the number of rows per step, ``sft.samples_per_step``.
    pairs:    the settings of pairs: whether each row has two responses, and their columns.
    held_out: held-out solutions, or chosen and rejected responses in alternation.
    """

    prompts: PromptDataset
    size: int
    pairs: PreferenceConfig
    held_out: Sequence[Solution]

    def next(self) -> list[Solution]:
        """Read the rows of the next step from the data, and return their responses."""
        return next_responses(self.prompts, self.size, self.pairs)


class Imitation:
    """Trains the policy to imitate the data set's solutions, by the mean of −log π over a step's loss tokens.

    precedes_rl: whether RL follows; it decides the phase in the rows of metrics.jsonl.
    """

    def __init__(self, backend: MegatronBackend, responses: Responses, timer: StepTimer, *, precedes_rl: bool) -> None:
        self.backend, self.responses, self.timer = backend, responses, timer
        self.phase = WARMUP if precedes_rl else SFT

    def step(self) -> tuple[StepResult, dict[str, float]]:
        """Take one optimizer step on ``sft.samples_per_step`` solutions; return (its result, {metric: value})."""
        backend, timer = self.backend, self.timer
        update = imitate(backend, response_batch(backend, self.responses.next()))
        with timer.measure("update"):
            update.accumulate(backend)
            result = backend.optim_step(update.step.kind)
        metrics = performance(backend, update.batch.facts, update.step, timer.seconds["update"])
        return result, metrics | step_times(timer, update.batch.facts)

    def evaluate(self, *, suffix: str = "") -> dict[str, float]:
        """Return the loss of the held-out solutions, −log π per loss token, and their number of loss tokens.

        The metrics are ``sft/eval_loss`` and ``sft/eval_tokens``; {} if no solutions are held out.

        suffix: is appended to the metrics' names.
        """
        held_out, sums, num_tokens = self.responses.held_out, [], 0
        if not held_out:
            return {}
        with self.timer.follow("eval"):
            for batch in response_batches(self.backend, held_out, self.responses.size):
                read = self.backend.logprobs(batch, np.ones(batch.facts.num_samples, dtype=bool))
                sums.append(-float(read.flat.astype(np.float64).sum()))
                num_tokens += int(batch.facts.loss_tokens.sum())
        loss = math.fsum(sums) / num_tokens
        return {f"sft/eval_loss{suffix}": loss, f"sft/eval_tokens{suffix}": num_tokens}


def imitate(backend: MegatronBackend, batch: Batch) -> ResponseUpdate:
    """Plan the one optimizer step on a batch of solutions: each of its N loss tokens weighs 1/N. A collective."""
    facts = batch.facts
    weights = reduction_weights("token_mean", facts, np.arange(facts.num_samples), max_response_tokens=1)
    return plan_update(backend, batch, weights, facts.loss_tokens > 0, purpose=PURPOSE, drops=False)


def plan_update(
    backend: TrainableModel, batch: Batch, weights: np.ndarray, signal: np.ndarray, *, purpose: str, drops: bool
) -> ResponseUpdate:
    """Plan the one optimizer step on a batch of S responses. A collective.

    weights: float64 [S], each response's weight w_i in the loss −Σ_i w_i Σ_t log π(t).
    signal: bool [S], the responses that add to the gradient.
    purpose: a name of the plan's purpose, which is part of its fingerprint.
    drops: whether responses without signal are left out.
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
    """Yield batches of ``size`` rows of the data with ``of_row`` responses each; the last may be smaller.

    Making a batch is a collective.
    """
    for first in range(0, len(responses), size * of_row):
        yield response_batch(backend, responses[first : first + size * of_row], of_row=of_row)


def response_batch(backend: TrainableModel, responses: Sequence[Solution], *, of_row: int = 1) -> Batch:
    """Return a batch of responses, spread over all ranks. A collective.

    of_row: the number of responses to a row of the data, which form a group.
    """
    topology, version = backend.topology, backend.weight_version
    mine = list(range(topology.rank, len(responses), topology.world_size))
    samples = []
    for number in mine:
        response, num_tokens = responses[number], len(responses[number].response_ids)
        rollout = Rollout(
            prompt=response.prompt,
            sample_index=number % of_row,
            response_ids=response.response_ids,
            logprobs=(0.0,) * num_tokens,
            text="",
            finish_reason="stop",
            weight_versions=((version, num_tokens),),
            loss_mask=response.loss_mask,
        )
        samples.append(to_sample(rollout, included=True))
    return backend.gather(samples, [number // of_row for number in mine], mine)
