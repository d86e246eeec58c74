"""The evaluation on held-out prompts by the current weights: mean@k and pass@k of each named set.

Training does not depend on it. A set's prompts have ids ``eval/<set>/<row>@0``, which no training
prompt has. A sample's seed derives from its prompt's id, its index and the weight version
(rollout/engines/engine.py). So the same weights give the same samples, under any parallel layout
and after any number of training samples.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.backend import batch_exchange
from megatron_rl.config import Config
from megatron_rl.data.columns import RequiredColumn
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.rows import load_rows
from megatron_rl.distributed import collectives
from megatron_rl.errors import ConfigError
from megatron_rl.observability.completions import Completion
from megatron_rl.rollout.job import Group, RolloutJob
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.reward_metrics import RewardErrors, count_errors, gather_errors, judge_errors
from megatron_rl.trainer.completions import completion_rules, of_evaluation
from megatron_rl.types import Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcomes:
    """Holds the rewards of one set of P prompts with k samples each.

    totals:          float64 [P, k], each sample's total reward; NaN for an excluded sample.
    by_function:     float64 [P, k, F], the reward of each of F functions; NaN if the function did
                     not apply.
    response_tokens: the number of response tokens of all samples together.
    truncated:       the number of samples that were cut off at the token limit.
    errors:          how many samples had a reward function that failed, and the first failure.

    Example: two prompts of one sample each. The second sample's reward function raised an error,
    under ``reward.on_error=drop``: ``totals=[[1.0], [nan]], by_function=[[[1.0]], [[nan]]],
    response_tokens=9, truncated=0``.
    """

    totals: np.ndarray
    by_function: np.ndarray
    response_tokens: int
    truncated: int
    errors: RewardErrors = field(default_factory=RewardErrors)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Holds the metrics ``eval/*`` of all held-out sets, and the completions that this rank chose to record."""

    metrics: Mapping[str, float]
    completions: Sequence[Completion]


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the chance that at least one sample passed among k drawn from n samples, of which c passed.

        pass@k = 1 − C(n − c, k) / C(n, k)

    n is ``num_samples`` and c is ``num_passed``. Chen et al. 2021 (arXiv:2107.03374), equation 1:
    unbiased for k independent samples, n ≥ k. Computed in integers, rounded once.

    Example: n = 4, c = 1, k = 2. Of the C(4, 2) = 6 pairs, C(3, 2) = 3 miss the sample that passed:
    pass@2 = 1 − 3/6 = 0.5.
    """
    if not (1 <= k <= num_samples and 0 <= num_passed <= num_samples):
        raise ValueError(
            f"pass@{k} of {num_samples} samples of which {num_passed} passed; 1 <= k <= samples and 0 <= passed <= "
            "samples"
        )
    draws = math.comb(num_samples, k)
    return (draws - math.comb(num_samples - num_passed, k)) / draws


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to ``limit``."""
    return [2**power for power in range(limit.bit_length())]


def standard_error(totals: np.ndarray) -> float | None:
    """Return the standard error of the mean reward over all samples, for prompts drawn at random.

    totals: float64 [P, k], the rewards of k samples of P prompts; NaN for a sample that is
        excluded.

    Samples of one prompt depend on each other, so each prompt is a cluster. Let n_p be the number
    of included samples of prompt p, s_p their sum, and m the mean of all N included samples. The
    error is sqrt(P / (P − 1) · Σ_p (s_p − n_p m)²) / N. These are clustered standard errors (Miller
    2024, arXiv:2411.00640) with the factor for a small number of clusters. If no sample is
    excluded, that is the standard deviation of the prompts' means over √P. None if fewer than two
    prompts have an included sample.
    """
    included = ~np.isnan(totals)
    n = included.sum(axis=1)
    num_prompts, num_samples = np.count_nonzero(n), n.sum()
    if num_prompts < 2:
        return None
    sums = np.where(included, totals, 0.0).sum(axis=1)
    residuals = sums - n * (sums.sum() / num_samples)
    return math.sqrt(num_prompts / (num_prompts - 1) * float(residuals @ residuals)) / float(num_samples)


def set_metrics(name: str, outcomes: Outcomes, functions: Sequence[str], *, threshold: float) -> dict[str, float]:
    """Return the metrics ``eval/<name>/*`` of one set.

    outcomes: the rewards of the set's samples.
    functions: [F], the names of the reward functions.
    threshold: a sample passes if its total reward is at least this.

    An excluded sample counts as not passed and enters no mean. If all are excluded, the means are
    left out. The metrics of reward errors are left out if no reward failed.
    """
    totals = outcomes.totals
    num_prompts, num_samples = totals.shape
    included = ~np.isnan(totals)
    metrics = {f"mean@{num_samples}": float(totals[included].mean())} if included.any() else {}
    if (error := standard_error(totals)) is not None:
        metrics[f"mean@{num_samples}_se"] = error
    passed_P = np.count_nonzero(totals >= threshold, axis=1).tolist()  # NaN has not passed
    for k in powers_of_two(num_samples):
        metrics[f"pass@{k}"] = math.fsum(pass_at_k(num_samples, num_passed, k) for num_passed in passed_P) / num_prompts
    for index, function in enumerate(functions):
        column = outcomes.by_function[:, :, index]
        if not np.isnan(column).all():
            metrics[function] = float(np.nanmean(column))
    metrics["response_tokens_mean"] = outcomes.response_tokens / totals.size
    metrics["truncated_share"] = outcomes.truncated / totals.size
    metrics["excluded"] = float(np.count_nonzero(~included))
    if outcomes.errors.failed:
        metrics |= outcomes.errors.metrics()
    return {f"eval/{name}/{key}": value for key, value in metrics.items()}


class Evaluation:
    """Evaluates the held-out sets of ``eval.sets`` and ``eval.path``.

    context_tokens: the model's context length.
    vocab_size: the number of tokens that the model knows; None for no limit.
    required: the columns that every row must have.

    The constructor tokenizes all prompts, so that a bad row ends the run at its start. For such a row
    it raises ConfigError, which names the set's setting.
    """

    def __init__(
        self,
        config: Config,
        tokenizer,
        context_tokens: int,
        vocab_size: int | None = None,
        required: Sequence[RequiredColumn] = (),
    ) -> None:
        self.config, self.completions = config, completion_rules(config.metrics, config.reward.functions)
        short_form = config.eval.path is not None
        self.sets: dict[str, list[Prompt]] = {}
        for number, (name, path) in enumerate(config.eval.named_sets.items()):
            key = "eval.path" if short_form and number == 0 else f"eval.sets.{name}"
            self.sets[name] = self._load(name, path, key, tokenizer, context_tokens, vocab_size, required)

    def _load(self, name: str, path: str, key: str, tokenizer, *limits) -> list[Prompt]:
        data = dataclasses.replace(self.config.data, shuffle=False, weights=())
        rows, environment = load_rows(path, key), self.config.environment
        role = None if environment.name is None else environment.role
        try:
            source = PromptDataset(rows, tokenizer, data, self.config.run.seed, *limits, followed_by=role)
        except ConfigError as error:
            raise ConfigError(f"{key}={path!r}: {error}") from error
        drawn = source.next(min(len(source), self.config.eval.max_prompts or len(source)))
        return [dataclasses.replace(prompt, prompt_id=f"eval/{name}/{prompt.prompt_id}") for prompt in drawn]

    def due_at_start(self) -> bool:
        """Return whether to evaluate before RL's first step.

        True if ``eval.at_start`` is set. True also in a run without RL, which has no other evaluation.
        """
        return self.config.eval.at_start or self.config.train.num_rollouts == 0

    def due(self, num_rollouts: int, *, last: bool) -> bool:
        """Return whether to evaluate now: after every ``eval.every_rollouts`` rollouts, and after the last.

        num_rollouts: the number of rollouts trained so far.
        last: whether no further rollout follows.
        """
        every = self.config.eval.every_rollouts
        return last or (every is not None and num_rollouts % every == 0)

    def run(self, manager: RolloutManager, *, step: int, suffix: str = "") -> EvaluationResult:
        """Sample and score completions for all held-out prompts under the current weights; return their metrics.

        A collective. The metrics include the evaluation's seconds.

        step: the number of optimizer steps so far, for the log.
        suffix: is appended to the metrics' names, and to the set's name in recorded completions.
        """
        started, settings = time.perf_counter(), self.config.eval
        prompts = [prompt for members in self.sets.values() for prompt in members]
        job = manager.produce(dict(enumerate(prompts)), settings.samples_per_prompt, temperature=settings.temperature)
        metrics, completions = {}, []
        groups = self._groups(job)
        for name, outcomes in self._outcomes(job).items():
            judge_errors(outcomes.errors, self.config.reward, f"eval/{name} after {step} steps")
            values = set_metrics(name, outcomes, self.config.reward.functions, threshold=settings.reward_threshold)
            summary = ", ".join(
                f"{key.rpartition('/')[2]} {value:.4f}"
                + (f" ± {values[f'{key}_se']:.4f}" if f"{key}_se" in values else "")
                for key, value in values.items()
                if re.search(r"@\d+$", key)
            )
            log.info("eval/%s after %d steps: %s over %d prompts", name, step, summary, len(self.sets[name]))
            metrics |= {f"{key}{suffix}": value for key, value in values.items()}
            completions += of_evaluation(self.completions, f"eval/{name}{suffix}", groups[name])
        metrics["time/eval_s"] = time.perf_counter() - started
        return EvaluationResult(metrics=metrics, completions=completions)

    def _groups(self, job: RolloutJob) -> dict[str, dict[int, Group]]:
        """Return {set: {prompt's index in ``job``: its group of samples}} for this rank's prompts. Not a collective."""
        names = [name for name, members in self.sets.items() for _ in members]
        return {name: {place: job.group(place) for place in job.mine if names[place] == name} for name in self.sets}

    def _outcomes(self, job: RolloutJob) -> dict[str, Outcomes]:
        """Return {set: its outcomes} on every rank.

        job: this rank's completions and scores. Its prompts are numbered set after set.
        """
        size, functions = self.config.eval.samples_per_prompt, self.config.reward.functions
        # The rewards of all prompts, gathered from every rank.
        places = [number * size + index for number in job.mine for index in range(size)]
        scores = [score for number in job.mine for score in job.scores[number]]
        names = [rollout.sample_id for number in job.mine for rollout in job.rollouts[number]]
        totals, by_function = batch_exchange.gather_scores(scores, places, len(functions), sample_ids=names)
        # This rank's response tokens, truncated samples and errors per set, then summed over ranks.
        ends = np.cumsum([len(members) for members in self.sets.values()])
        local = np.zeros((2, len(ends)), dtype=np.int64)
        for place in job.mine:
            number = np.searchsorted(ends, place, side="right")
            local[0, number] += sum(len(rollout.response_ids) for rollout in job.rollouts[place])
            local[1, number] += sum(rollout.finish_reason == "length" for rollout in job.rollouts[place])
        errors = {
            name: gather_errors(
                count_errors(pair for x in groups.values() for pair in zip(x.rollouts, x.scores, strict=True))
            )
            for name, groups in self._groups(job).items()
        }
        tokens, truncated = np.sum(collectives.gather_json(local.tolist()), axis=0)
        # Cut the rewards into sets.
        shape = (int(ends[-1]), size)
        totals_of = np.split(totals.reshape(shape), ends[:-1])
        by_function_of = np.split(by_function.reshape(*shape, len(functions)), ends[:-1])
        return {
            name: Outcomes(
                totals=totals_of[i],
                by_function=by_function_of[i],
                response_tokens=int(tokens[i]),
                truncated=int(truncated[i]),
                errors=errors[name],
            )
            for i, name in enumerate(self.sets)
        }
