"""Dynamic sampling: groups without signal (all advantages 0) are replaced by groups of further prompts, in rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.algorithm.own_estimator import in_unequal_groups
from megatron_rl.config import DynamicSamplingConfig, RewardConfig
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.errors import NoSignalError
from megatron_rl.observability.timer import StepTimer
from megatron_rl.reward.function import BUILT_IN
from megatron_rl.rollout.groups.parts import Reroll, StartOrder
from megatron_rl.rollout.groups.selection import Selection
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.scored_batch import GroupScorer, ScoredBatch
from megatron_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FurtherPrompts:
    """Holds what dynamic sampling needs to draw and sample further prompts.

    epochs: the number of passes over the data; None: no limit.
    order: decides in which order the groups of one round of replacement are started.
    reroll: records prompts whose group has no reward above ``reroll.fail_threshold``, so that they
        are sampled again later.
    """

    prompts: PromptDataset
    epochs: int | None
    manager: RolloutManager
    order: StartOrder
    reroll: Reroll

    def next(self, places: Sequence[int]) -> dict[int, Prompt]:
        """Return {place: new prompt} for the given places, in the order in which to start their groups.

        A place is a group's number in the rollout. Near the end of the data there are fewer prompts
        than places.
        """
        return self.order.arrange(dict(zip(places, self.prompts.next(len(places), self.epochs), strict=False)))


class Refill:
    """Replaces groups without signal by groups of further prompts (``rollout.dynamic_sampling``)."""

    def __init__(
        self,
        settings: DynamicSamplingConfig,
        further: FurtherPrompts,
        scorer: GroupScorer,
        timer: StepTimer,
    ) -> None:
        self.settings, self.further, self.scorer, self.timer = settings, further, scorer, timer

    def fill(self, index: int, selection: Selection) -> Selection:
        """Return the selection after at most ``rollout.dynamic_sampling.max_rounds`` rounds. A collective.

        Each round samples a further prompt for every group that ``kept_places`` does not keep.
        Raises NoSignalError if such groups are left after the last round and
        ``rollout.dynamic_sampling.on_exhausted`` is "fail".

        index: the rollout's index in the run.
        """
        settings, further, scoring, num_rounds = self.settings, self.further, self.scorer.scoring, 0
        selection = selection.narrowed(kept_places(settings.metric, scoring.reward, selection.scored))
        while num_rounds < settings.max_rounds and selection.dead:
            prompts = further.next(selection.dead)
            if not prompts:
                break
            num_rounds += 1
            with self.timer.measure("rollout"):
                job = further.manager.produce(prompts, scoring.samples_per_prompt)
            with self.timer.measure("reward"):
                scored = self.scorer.gather(job.groups())
            further.order.note(prompts, scored.facts)
            further.reroll.note(scored, prompts, list(prompts))  # all are fresh: made by the current weights
            live = kept_places(settings.metric, scoring.reward, scored)
            whole = self.scorer.join([selection.scored, scored], list(selection.prompts))
            selection = selection.refill(prompts, job.groups(), live, whole)
        num_dead, num_places = len(selection.dead), len(selection.prompts)
        if num_dead and settings.on_exhausted == "fail":
            raise NoSignalError(
                f"{num_dead} of {num_places} groups have no signal after {num_rounds} rounds "
                f"(rollout.dynamic_sampling.max_rounds={settings.max_rounds}); raise it, set "
                "rollout.dynamic_sampling.on_exhausted=skip, or take harder prompts"
            )
        metrics = {"dynamic_sampling/rounds": float(num_rounds), "dynamic_sampling/left": float(num_dead)}
        return selection.measured(metrics)


def kept_places(metric: str | None, reward: RewardConfig, scored: ScoredBatch) -> set[int]:
    """Return the places of the groups that dynamic sampling keeps; a place is a group's number in the rollout.

    A group is kept if it may have signal (a non-zero advantage) and its samples differ in
    ``metric``. DAPO keeps a group in which some answers are correct and some are not
    (arXiv:2503.14476, eq. 11). So a group of wrong answers is not kept, even if a length penalty
    makes their rewards differ.

    metric: ``rollout.dynamic_sampling.metric``. The name of a reward function: the samples must
        differ in its values. ``reward``: they must differ in the weighted sum of all functions,
        before a length penalty. ``shaped``: they need not differ, so signal alone decides. None:
        the first configured function that is built in (``arithmetic`` or ``math_verify``), else
        ``reward``. A missing value counts as 0.

    Example: a group has two wrong answers, and one loses 0.5 to the overlong penalty. With
    ``metric`` None the group is not kept. With ``shaped`` it is.
    """
    functions = reward.functions
    if metric is None:
        metric = next((name for name in functions if name in BUILT_IN), "reward")
    if metric == "shaped" or not functions:
        return scored.live_places()
    values = np.nan_to_num(scored.by_function)
    column = values @ reward.resolved_weights if metric == "reward" else values[:, functions.index(metric)]
    mixed = in_unequal_groups(replace(scored.rewards, totals=column))
    return scored.live_places() & set(scored.facts.groups[mixed].tolist())
