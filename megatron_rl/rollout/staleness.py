"""The staleness rule: decides whether a rollout may be started now, and with which weights.

``may_start`` is pure and reads only counters that are the same on every rank, so all ranks decide
alike. A weight version is the number of optimizer steps that changed a weight. ``between`` is the
number of rollouts still to be trained before the rollout that is to be started. So training on that
rollout begins at most ``between · steps_per_rollout`` versions from now.

Invariants (``assert_invariants`` in tests/unit/rollout/test_staleness.py):

1. A rollout is trained at most ``max_staleness_steps`` versions after the weights that it is
   started with.
2. The rollout that is trained next (``between`` 0) may always be started.
3. Weights are sent in four cases only: the engines are ``interval`` versions behind, they have no
   weights, a checkpoint was written (``renew``), or the rollout could not be started otherwise.
4. If a rollout may be started, so may each rollout that is trained before it.
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
    """Return whether a rollout may be started now (NOW), after weights are sent (AFTER_SYNC), or only LATER.

    trained: the trainer's weight version.
    engine: the engines' weight version.
    between: the number of rollouts still to be trained before this rollout.
    steps_per_rollout: the number of optimizer steps on each rollout.
    max_staleness_steps: the maximum of versions between the weights that sample a rollout and the
        weights that are trained on it. None: no limit.
    interval: the number of versions by which the engines may fall behind before weights are sent.
    renew: whether weights must be sent before the rollout is started, as after a checkpoint.

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
