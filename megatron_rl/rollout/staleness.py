"""The staleness rule: decides whether a rollout may be started now, and with which weights.

Pure: counters in, a decision out, the same on every rank. Versions count optimizer steps. A rollout
that is started ``between`` rollouts before its turn is trained at most ``between ·
steps_per_rollout`` versions later than now; ghost steps that move nothing only make that less.

Invariants (``assert_invariants`` in tests/unit/rollout/test_staleness.py):

1. A rollout is trained at most ``max_staleness_steps`` versions after the weights that it is
   started with.
2. The rollout whose turn it is (``between`` 0) may always be started.
3. Weights are sent only if the engines' are ``interval`` versions behind, if they have none, if a
   checkpoint was just taken (``renew``), or if the rollout could not be started without.
4. If a rollout may be started, so may each one whose turn is earlier.
"""

from __future__ import annotations

from enum import Enum

from megatron_rl.rollout.engines.engine import NO_WEIGHTS


class Start(Enum):
    NOW = "now"
    AFTER_SYNC = "after sync"
    LATER = "later"


def may_start(
    *,
    trained: int,
    engine: int,
    between: int,
    steps_per_rollout: int,
    max_staleness_steps: int | None,
    interval: int = 1,
    renew: bool = False,
) -> Start:
    """Decide whether a rollout may be started now, after weights are sent, or only later.

    trained: the trainer's weight version.
    engine: the engines' weight version.
    between: rollouts that are trained before it.
    max_staleness_steps: None for no bound.

    Example: one step per rollout, ``max_staleness_steps`` 1, both at version 5: the next rollout
    but one (``between`` 1) may start now, the one after it (2) may not; with the engines at version
    4, the former may start after a sync.
    """
    ahead = between * steps_per_rollout

    def fits(version: int) -> bool:
        return max_staleness_steps is None or trained + ahead - version <= max_staleness_steps

    stale = engine == NO_WEIGHTS or renew or trained - engine >= interval
    if not stale and fits(engine):
        return Start.NOW
    return Start.AFTER_SYNC if fits(trained) else Start.LATER
