"""Which rollout may be started now, and with which weights. Pure: counters in, a decision out, the same on every rank.

Versions count optimizer steps. A rollout that is started ``between`` rollouts before its turn is trained at most
``between · steps_per_rollout`` versions later than now; ghost steps that move nothing only make that less.

Invariants (``assert_invariants`` in tests/unit/rollout/test_staleness.py):

1. What is started is trained at most ``max_staleness_steps`` versions after the weights that it is started with.
2. The rollout whose turn it is (``between`` 0) may always be started.
3. Weights are sent only where they are ``interval`` behind, where the engine has none, where a checkpoint was just
   taken (``renew``), or where nothing could be started without.
4. What may be started later in line, may be started earlier in line.
"""

from __future__ import annotations

from enum import Enum

from megatron_rl.rollout.engine import NO_WEIGHTS


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
    """trained: the trainer's weight version · engine: that of the engines · max_staleness_steps: None for no bound.

    Example: one step per rollout, ``max_staleness_steps`` 1, both at version 5: the next rollout but one (``between``
    1) may start now, that after it (2) may not; at engine version 4 the first may start after a sync.
    """
    ahead = between * steps_per_rollout

    def fits(version: int) -> bool:
        return max_staleness_steps is None or trained + ahead - version <= max_staleness_steps

    stale = engine == NO_WEIGHTS or renew or trained - engine >= interval
    if not stale and fits(engine):
        return Start.NOW
    return Start.AFTER_SYNC if fits(trained) else Start.LATER
