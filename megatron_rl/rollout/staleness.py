"""The staleness rule: decides whether a rollout may be started now, and with which weights.

Pure: counters in, a decision out, the same on every rank. Versions count optimizer steps. If
``between`` rollouts are trained before a rollout, its training begins at most ``between ·
steps_per_rollout`` versions from now. Ghost steps that move nothing make it fewer.

Invariants (``assert_invariants`` in tests/unit/rollout/test_staleness.py):

1. A rollout is trained at most ``max_staleness_steps`` versions after the weights that it is
   started with.
2. The rollout whose turn it is (``between`` 0) may always be started.
3. Weights are sent only if the engines are ``interval`` versions behind, if they have no weights,
   after a checkpoint (``renew``), or if otherwise the rollout could not be started.
4. If a rollout may be started, so may each rollout whose turn is earlier.
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
    between: number of rollouts that are trained before this rollout.
    max_staleness_steps: None for no bound.
    interval: versions by which the engines may fall behind before weights are sent.
    renew: whether weights are sent in any case.

    Example: one step per rollout, ``max_staleness_steps`` 1, trainer and engines at version 5. A
    rollout with ``between`` 1 may start now, with ``between`` 2 only later. With the engines at
    version 4 and ``between`` 1, the rollout may start after a sync.
    """
    ahead = between * steps_per_rollout

    def fits(version: int) -> bool:
        return max_staleness_steps is None or trained + ahead - version <= max_staleness_steps

    stale = engine == NO_WEIGHTS or renew or trained - engine >= interval
    if not stale and fits(engine):
        return Start.NOW
    return Start.AFTER_SYNC if fits(trained) else Start.LATER
