"""The construction of ``GroupParts``, the objects that choose a rollout's groups, from the configuration.

A module that the configuration does not need is not imported.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_rl.config import ReplayConfig, RerollConfig, RolloutConfig, TrainConfig
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout.groups.parts import (
    AsDrawn,
    FixedSizes,
    GroupFilter,
    GroupParts,
    GroupSizes,
    HandOut,
    NoReplay,
    NoReroll,
    Replay,
    Reroll,
    StartOrder,
    WholeRollouts,
)
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.scored_batch import GroupScorer


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """Holds the settings from which ``build_parts`` builds a run's ``GroupParts``.

    num_stragglers: the number of groups that each rollout leaves unfinished for the next rollout
        (``rollout.producer.straggler_share``).
    seed: the run's seed.
    """

    rollout: RolloutConfig
    replay: ReplayConfig
    reroll: RerollConfig
    train: TrainConfig
    num_stragglers: int
    seed: int


def build_parts(
    settings: GroupSettings, prompts: PromptDataset, manager: RolloutManager, scorer: GroupScorer, timer: StepTimer
) -> GroupParts:
    """Return the objects that choose the groups of a run's rollouts.

    The field ``filters`` holds dynamic sampling, then replay, each only if it is configured.
    """
    order, reroll = _start_order(settings.rollout.start_order), _reroll(settings.reroll)
    filters: list[GroupFilter] = []
    if settings.rollout.dynamic_sampling.max_rounds:
        from megatron_rl.rollout.groups.refill import FurtherPrompts, Refill

        further = FurtherPrompts(
            prompts=prompts, epochs=settings.train.epochs, manager=manager, order=order, reroll=reroll
        )
        filters.append(Refill(settings.rollout.dynamic_sampling, further, scorer, timer))
    replay: Replay = NoReplay()
    if settings.replay.capacity_groups:
        from megatron_rl.rollout.groups.replay import GroupReplay

        replay = GroupReplay(settings.replay, settings.seed, backend=scorer.backend, scorer=scorer, timer=timer)
        filters.append(replay)
    hand_out: HandOut = WholeRollouts(settings.train.prompts_per_rollout)
    if settings.num_stragglers:
        hand_out = _stragglers(manager, timer, settings.train.prompts_per_rollout, settings.num_stragglers)
    return GroupParts(
        order=order,
        sizes=_group_sizes(settings.rollout),
        reroll=reroll,
        replay=replay,
        hand_out=hand_out,
        filters=filters,
    )


def _start_order(name: str) -> StartOrder:
    match name:
        case "longest_first":
            from megatron_rl.rollout.groups.longest_first import LongestFirst

            return LongestFirst()
        case _:
            return AsDrawn()


def _group_sizes(rollout: RolloutConfig) -> GroupSizes:
    match rollout.group_sizes:
        case "adaptive":
            from megatron_rl.rollout.groups.adaptive_sizes import AdaptiveSizes

            return AdaptiveSizes(rollout)
        case _:
            return FixedSizes(rollout.samples_per_prompt)


def _reroll(settings: RerollConfig) -> Reroll:
    match settings.max_groups:
        case 0:
            return NoReroll()
        case _:
            from megatron_rl.rollout.groups.reroll import GroupReroll

            return GroupReroll(settings)


def _stragglers(manager: RolloutManager, timer: StepTimer, prompts_per_rollout: int, num_stragglers: int) -> HandOut:
    from megatron_rl.rollout.groups.stragglers import Stragglers

    return Stragglers(manager, timer, prompts_per_rollout=prompts_per_rollout, num_stragglers=num_stragglers)


def with_stragglers(
    parts: GroupParts, manager: RolloutManager, timer: StepTimer, *, prompts_per_rollout: int
) -> GroupParts:
    """Return ``parts`` with a ``hand_out`` that can also train the stragglers of a checkpoint.

    ``hand_out`` decides which groups are trained. Stragglers are groups that their own rollout left
    unfinished. If ``hand_out`` can train them already, ``parts`` is returned unchanged.

    prompts_per_rollout: the number of groups that each rollout trains.
    """
    if not isinstance(parts.hand_out, WholeRollouts):
        return parts
    return dataclasses.replace(parts, hand_out=_stragglers(manager, timer, prompts_per_rollout, 0))
