"""The decision on each sample of a rollout: whether it has signal, is trained, and runs; and the plan of the steps.

A sample has signal if its advantage, times its importance weights, is not 0 and a token carries
loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.types import BatchPlan, StepKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """Holds the decision on each sample of a rollout, and the plan of its optimizer steps.

    signal:  bool [S], the samples whose advantage, times importance weights, is not 0. In a
             critic's warm-up it is set too, though no sample is trained.
    trained: bool [S], the samples whose gradient is computed. It equals ``signal``, except in a
             critic's warm-up: then no sample trains the policy.
    runs:    bool [S], the samples that the plan runs. Without ``plan.repack`` they include samples
             without signal that share a micro-batch with a sample that has signal; their KL term
             needs true log-probs.

    Example: four samples, two to a micro-batch, without repack: signal (T, F, F, F), trained (T, F,
    F, F), runs (T, T, F, F).
    """

    signal: np.ndarray
    trained: np.ndarray
    runs: np.ndarray
    plan: BatchPlan


def decide(backend: MegatronBackend, batch: Batch, signal: np.ndarray, kind: StepKind, *, drops: bool) -> Decision:
    """Plan a rollout's optimizer steps over the samples with signal. A collective.

    signal: bool [S], the samples with signal: those with a loss token whose advantage is not 0.
    kind: HELD while a critic warms up, so that no sample trains the policy; else REAL.
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
