"""The optimizer steps on preference pairs, for a policy (as in DPO) or for a reward model.

Each step begins with a forward pass without a gradient, under the current weights. The pass gives
the policy's log-probs, or a reward model's scores. ``preference.loss`` turns them into a
coefficient c_i for each response i (algorithm/preference_loss.py). The step then trains on
−Σ c_i · log π, summed over all tokens (algorithm/linear_loss.py). This sum has the gradient of
``preference.loss``, and each term is of one response. So the two responses of a pair may lie on any
ranks and in any micro-batches.

A response whose coefficient is 0 adds nothing to the gradient, so it is dropped. Under ``hinge``
that is a response beyond the margin. The mean of the loss counts every pair, dropped or not.
"""

from __future__ import annotations

import numpy as np

from megatron_rl.algorithm.flat import sum_per_sample
from megatron_rl.algorithm.preference_loss import PairOutcome, PairScores, compare, pair_metrics
from megatron_rl.algorithm.signal import SignalRule, has_signal
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.config import PreferenceConfig
from megatron_rl.critic import RewardModel
from megatron_rl.distributed import collectives
from megatron_rl.observability.metrics import skip_metrics
from megatron_rl.observability.summary import PREFERENCE
from megatron_rl.observability.throughput import performance, step_times
from megatron_rl.observability.timer import StepTimer
from megatron_rl.trainer.supervised import (
    Responses,
    ResponseUpdate,
    plan_update,
    response_batch,
    response_batches,
)
from megatron_rl.types import StepResult

HALVES = 2  # responses of a pair: chosen and rejected, in alternation


def compare_pairs(
    backend: MegatronBackend | RewardModel, batch: Batch, config: PreferenceConfig
) -> tuple[PairScores, PairOutcome]:
    """Return (scores of a batch's pairs under the current weights, the loss of each pair). A collective."""
    facts, reference = batch.facts, None
    if config.needs_reference:
        with backend.reference_weights():
            reference = _sums(backend, batch)
    sums = _sums(backend, batch)
    scores = PairScores(sums=sums, reference=reference, loss_tokens=facts.loss_tokens, sample_ids=facts.sample_ids)
    return scores, compare(scores, config)


def _sums(backend: MegatronBackend | RewardModel, batch: Batch) -> np.ndarray:
    """Return one number per response, float64 [S], under the model's current weights.

    The number is the sum of the response's log-probs, or a reward model's score.
    """
    everything = np.ones(batch.facts.num_samples, dtype=bool)
    is_judge = isinstance(backend, RewardModel)
    flat = backend.scores(batch, everything) if is_judge else backend.logprobs(batch, everything).flat
    return sum_per_sample(flat.astype(np.float64), batch.facts.response_tokens)


def prepare_pairs(
    backend: MegatronBackend | RewardModel, batch: Batch, outcome: PairOutcome, rule: SignalRule
) -> ResponseUpdate:
    """Plan one optimizer step on the responses that add to the gradient of the pairs' loss. A collective.

    A response's coefficient is its weight in that gradient; at 0 it adds nothing. The loss is the mean
    over all P pairs of the batch, those with dropped responses included.

    outcome: the pairs' losses and coefficients, from ``compare_pairs``.
    rule: says whether responses are dropped, and up to which absolute value a coefficient counts as 0.
    """
    facts = batch.facts
    # exp or log may round differently on another CPU: every rank takes rank 0's numbers.
    coefficients = collectives.broadcast_from_rank0(outcome.coefficients)
    signal = has_signal(
        coefficients, facts.loss_tokens, advantage_epsilon=rule.advantage_epsilon, sample_ids=facts.sample_ids
    )
    weights = coefficients / (facts.num_samples // HALVES)
    return plan_update(backend, batch, weights, signal, purpose=PREFERENCE, drops=rule.drops)


class Comparison:
    """Trains a policy or a reward model on preference pairs. Methods are collectives.

    rule: says whether steps leave out responses that add nothing to the gradient.
    """

    phase = PREFERENCE

    def __init__(
        self, backend: MegatronBackend | RewardModel, responses: Responses, timer: StepTimer, rule: SignalRule
    ) -> None:
        self.backend, self.responses, self.timer, self.rule = backend, responses, timer, rule

    def step(self) -> tuple[StepResult, dict[str, float]]:
        """Take one optimizer step on the next ``sft.samples_per_step`` pairs; return (its result, {metric: value})."""
        backend, timer = self.backend, self.timer
        batch = response_batch(backend, self.responses.next(), of_row=HALVES)
        with timer.measure("logprob"):
            scores, outcome = compare_pairs(backend, batch, self.responses.pairs)
        with timer.measure("plan"):
            update = prepare_pairs(backend, batch, outcome, self.rule)
        with timer.measure("update"):
            update.accumulate(backend)
            result = backend.optim_step(update.step.kind)
        metrics = pair_metrics(outcome, scores)
        metrics |= skip_metrics(update.step, batch.facts, update.signal, share_prompts=backend.rules.share_prompts)
        metrics |= performance(backend, batch.facts, update.step, timer.seconds["update"])
        metrics |= step_times(timer, batch.facts)
        return result, {**metrics, "train/loss": metrics["preference/loss"]}

    def evaluate(self, *, suffix: str = "") -> dict[str, float]:
        """Return the metrics ``preference/eval_*``, means over the held-out pairs; {} if no pairs are held out.

        suffix: is appended to the metrics' names.
        """
        held_out, size, pairs = self.responses.held_out, self.responses.size, self.responses.pairs
        if not held_out:
            return {}
        with self.timer.follow("eval"):
            parts = [
                compare_pairs(self.backend, batch, pairs)
                for batch in response_batches(self.backend, held_out, size, of_row=HALVES)
            ]
        outcome = PairOutcome(
            losses=np.concatenate([part.losses for _, part in parts]),
            rewards=np.concatenate([part.rewards for _, part in parts]),
            coefficients=np.concatenate([part.coefficients for _, part in parts]),
        )
        scores = PairScores(
            sums=np.concatenate([part.sums for part, _ in parts]),
            reference=None,
            loss_tokens=np.concatenate([part.loss_tokens for part, _ in parts]),
        )
        return pair_metrics(outcome, scores, prefix="preference/eval_", suffix=suffix)
