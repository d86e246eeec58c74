"""The choice of a rollout's samples to train on and to run, and the plan of its optimizer steps.

A sample has signal if |weight · advantage| is larger than ``skip.advantage_epsilon`` (0 by default)
at one of its loss tokens. The weight is the token's importance weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.types import BatchPlan, StepKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """Holds the choice of a rollout's samples to train on and to run, and the plan of its optimizer steps.

    signal:  bool [S], the samples with signal.
    trained: bool [S], the samples that train the policy. It equals ``signal``, except in a critic's
             warm-up: then it is all False.
    runs:    bool [S], the samples in the plan's micro-batches. Under ``plan.repack=false`` samples are
             packed before any is dropped. A micro-batch then runs whole if one of its samples is
             trained.

    Example under ``plan.repack=false``: of four samples, two to a micro-batch, the first has signal.
    ``signal`` and ``trained`` are (T, F, F, F), ``runs`` is (T, T, F, F).
    """

    signal: np.ndarray
    trained: np.ndarray
    runs: np.ndarray
    plan: BatchPlan


def decide(backend: MegatronBackend, batch: Batch, signal: np.ndarray, kind: StepKind, *, drops: bool) -> Decision:
    """Plan a rollout's optimizer steps over the samples with signal. A collective.

    signal: bool [S], the samples with signal: |weight · advantage| is above ``skip.advantage_epsilon``
        at a loss token, where weight is the importance weight.
    kind: HELD in a critic's warm-up, in which no sample trains the policy; else REAL.
    drops: whether samples without signal are dropped.
    """
    if kind is StepKind.HELD:
        trained = np.zeros_like(signal)
        plan = backend.plan_training(batch, trained, drops=True).held()
    else:
        trained, plan = signal, backend.plan_training(batch, signal, drops=drops)
    return Decision(signal=signal, trained=trained, runs=runs_S(plan, batch.facts.num_samples), plan=plan)


def runs_S(plan: BatchPlan, num_samples: int) -> np.ndarray:
    """Return bool [S]: whether each sample of the batch runs in one of the plan's optimizer steps."""
    runs = np.zeros(num_samples, dtype=bool)
    for step in plan.mini_batches:
        runs[step.ran] = True
    return runs
