"""Re-roll: prompts whose group failed (no reward above ``reroll.fail_threshold``) are sampled again later."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from megatron_rl.config import RerollConfig
from megatron_rl.rollout.groups.reroll_buffer import RerollBuffer, failed_groups
from megatron_rl.rollout.scored_batch import ScoredBatch
from megatron_rl.types import Prompt


class GroupReroll:
    """Finds groups without a reward above ``reroll.fail_threshold``, and buffers their prompts to be sampled again."""

    def __init__(self, config: RerollConfig) -> None:
        self.buffer, self._threshold = RerollBuffer(config), config.fail_threshold

    def take(self, fraction: float, room: int) -> list[tuple[str, int]]:
        return self.buffer.take(fraction, room)

    def note(self, scored: ScoredBatch, prompts: Mapping[int, Prompt], fresh: Collection[int]) -> None:
        """Put the prompts of failed groups, in which no reward is above the threshold, in the buffer.

        prompts: a group's number in the rollout → its prompt.
        fresh: the numbers of the groups sampled by weights at most
            ``rollout.producer.max_staleness_steps`` steps old. Older groups are ignored: the queue
            drops them, and draws their prompts again anyway.
        """
        failed = failed_groups(scored.rewards.totals, scored.facts.groups, self._threshold)
        failed = np.intersect1d(failed, list(fresh))
        self.buffer.note([(prompts[number].prompt_id, prompts[number].attempt) for number in failed.tolist()])

    def metrics(self) -> dict[str, float]:
        return {
            "reroll/size": float(len(self.buffer)),
            "reroll/buffered": float(self.buffer.num_buffered),
            "reroll/issued": float(self.buffer.num_issued),
        }

    def state(self) -> dict:
        return self.buffer.state()

    def load_state(self, state: Mapping) -> None:
        self.buffer.load_state(state)
