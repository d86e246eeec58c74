"""The re-roll buffer: holds the prompts whose whole group failed, until they are sampled again.

Every rank holds the same buffer of (prompt_id, attempt) pairs and takes the same decisions. Nothing
is communicated.

Invariants (``assert_invariants`` in tests/unit/rollout/test_reroll_buffer.py):

1. At most ``reroll.capacity_prompts`` prompts wait, each once. If there are more, the prompt that
   waited longest is dropped.
2. A prompt whose attempt has reached ``reroll.max_attempts`` does not wait. So ``take`` returns no
   higher attempt.
3. ``take`` returns the longest-waiting prompts first, at most ``reroll.max_groups`` and at most
   ``room`` of them. It returns none before the fraction ``reroll.start_fraction`` of the training
   is done. The returned prompts no longer wait.
4. A prompt that is added again while it waits still waits only once. It keeps its position in the
   order and the higher attempt number. So ``take`` returns each attempt at a prompt at most once,
   if each failure is added once.
5. ``num_buffered`` counts the prompts that began to wait, ``num_issued`` the prompts that ``take``
   returned.
6. A buffer that is restored from a state that went through JSON behaves like the saved buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_rl.config import RerollConfig


def failed_groups(totals: np.ndarray, groups: np.ndarray, threshold: float) -> np.ndarray:
    """Return the numbers (int64, sorted) of groups whose included samples all have a reward of at most ``threshold``.

    A group without an included sample is not returned.

    totals: float64 [S], the total reward of each sample; NaN: the sample is excluded.
    groups: int64 [S], each sample's group number.

    Example: totals (0, NaN, 0, 1, NaN) in groups (4, 4, 7, 7, 9) at threshold 0 → (4). Group 7 has
    a reward of 1, and group 9 has no included sample.
    """
    included = ~np.isnan(totals)
    above = groups[included & (totals > threshold)]
    return np.setdiff1d(groups[included], above).astype(np.int64)


class RerollBuffer:
    """Holds the prompts that wait to be sampled again.

    num_buffered: total number of prompts that began to wait.
    num_issued: total number of prompts that ``take`` returned.

    Example: two prompts fail: ``note([("3@0", 0), ("8@0", 0)])``, as (prompt id, attempt). With
    ``max_groups=1``, ``take`` then returns only the longest-waiting prompt, with its next attempt:
    ``[("3@0", 1)]``.
    """

    def __init__(self, config: RerollConfig) -> None:
        self._config = config
        self._waiting: dict[str, int] = {}  # prompt_id → its failed attempt; the longest-waiting prompt comes first
        self.num_buffered = 0
        self.num_issued = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def note(self, failed: Sequence[tuple[str, int]]) -> None:
        """Add the prompts of groups that just failed. ``failed``: (prompt_id, attempt) of each group.

        A prompt that already waits keeps its position in the order and the higher attempt number.
        If its attempt has reached ``reroll.max_attempts``, a prompt is not added, and is removed if
        it waits. Beyond ``reroll.capacity_prompts`` the prompt that waited longest is dropped.
        """
        for prompt_id, attempt in failed:
            latest = max(attempt, self._waiting.get(prompt_id, attempt))
            if latest >= self._config.max_attempts:
                self._waiting.pop(prompt_id, None)
                continue
            self.num_buffered += prompt_id not in self._waiting
            self._waiting[prompt_id] = latest
            if len(self._waiting) > self._config.capacity_prompts:
                del self._waiting[next(iter(self._waiting))]

    def take(self, fraction: float, room: int) -> list[tuple[str, int]]:
        """Remove from the buffer the prompts that are sampled again now; return (prompt_id, attempt) of each.

        The attempt is the failed attempt plus one.

        fraction: the fraction of the training that is done, 0 to 1. Below ``reroll.start_fraction``
            no prompt is taken.
        room: the maximum number of prompts to take; ``reroll.max_groups`` is a second maximum.
        """
        if fraction < self._config.start_fraction:
            return []
        due = list(self._waiting.items())[: max(0, min(self._config.max_groups, room))]
        for prompt_id, _ in due:
            del self._waiting[prompt_id]
        self.num_issued += len(due)
        return [(prompt_id, attempt + 1) for prompt_id, attempt in due]

    def state(self) -> dict:
        """Return the buffer as JSON-able values."""
        waiting = [[prompt_id, int(attempt)] for prompt_id, attempt in self._waiting.items()]
        return {"waiting": waiting, "num_buffered": self.num_buffered, "num_issued": self.num_issued}

    def load_state(self, state: Mapping) -> None:
        """Replace the waiting prompts and the counters by saved ones.

        If ``reroll.capacity_prompts`` is smaller than in the saving run, the longest-waiting
        prompts may be dropped. Prompts that have reached this run's ``reroll.max_attempts`` are
        dropped.
        """
        self._waiting = {}
        self.note([(prompt_id, attempt) for prompt_id, attempt in state["waiting"]])
        self.num_buffered, self.num_issued = state["num_buffered"], state["num_issued"]
