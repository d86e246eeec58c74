"""The choice of a rollout's samples to train on and to run, and the plan of its optimizer steps.

A sample has signal if |weight · advantage| is larger than ``skip.advantage_epsilon`` (0 by default)
at one of its loss tokens. The weight is the token's importance weight. Of equal samples of a step one runs
(algorithm/repeats.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithm.repeats import copies_of, stand_ins
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.backend.batch import Batch
from megatron_rl.types import Advantages, BatchPlan, StepKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """Holds the choice of a rollout's samples to train on and to run, and the plan of its optimizer steps.

    signal:  bool [S], the samples with signal.
    trained: bool [S], the samples that train the policy. It equals ``signal``, except in a critic's
             warm-up: then it is all False.
    runs:    bool [S], the samples that the plan runs: those of ``trained`` less repeats, or all samples if
             drops are off. Under ``plan.repack=false`` samples are packed before any is dropped. Then the other
             samples of a micro-batch run too if one of them is trained.
    stand_in: int64 [S], the sample that runs in each one's place: the first that equals it in its step.
             None: every sample runs itself.

    Example under ``plan.repack=false``: of four samples, two to a micro-batch, the first has signal.
    ``signal`` and ``trained`` are (T, F, F, F), ``runs`` is (T, T, F, F).
    """

    signal: np.ndarray
    trained: np.ndarray
    runs: np.ndarray
    plan: BatchPlan
    stand_in: np.ndarray | None = None

    @property
    def passed(self) -> np.ndarray:
        """Return bool [S], the samples that run, or for which another runs."""
        return self.runs if self.stand_in is None else self.runs[self.stand_in]

    @property
    def copies(self) -> np.ndarray | None:
        """Return int64 [S], for how many samples each one stands in the loss; None: each for itself."""
        return None if self.stand_in is None else copies_of(self.stand_in, self.trained)


def decide(
    backend: MegatronBackend,
    batch: Batch,
    signal: np.ndarray,
    kind: StepKind,
    *,
    drops: bool,
    merged_by: Advantages | None = None,
) -> Decision:
    """Choose the samples that a rollout's optimizer steps train on and run, and plan the steps. A collective.

    signal: bool [S], the samples with signal: |weight · advantage| is above ``skip.advantage_epsilon``
        at a loss token, where weight is the importance weight.
    kind: HELD in a critic's warm-up, in which no sample trains the policy; else REAL, an ordinary step.
    drops: True: samples without signal are dropped. False: the steps run all samples.
    merged_by: the advantages by which equal samples are found, of which one runs. None: all run.
    """
    stand_in = None
    if kind is StepKind.HELD:
        trained = np.zeros_like(signal)
        plan = backend.plan_training(batch, trained, drops=True).held()
    else:
        trained = running = signal
        if drops and merged_by is not None:
            stand_in = stand_ins(batch.facts, merged_by, signal, backend.step_members(batch, drops=True))
            running = signal & (stand_in == np.arange(len(stand_in)))
        plan = backend.plan_training(batch, running, drops=drops)
    runs = runs_S(plan, batch.facts.num_samples)
    return Decision(signal=signal, trained=trained, runs=runs, plan=plan, stand_in=stand_in)


def runs_S(plan: BatchPlan, num_samples: int) -> np.ndarray:
    """Return bool [S]: whether each sample of the batch runs in one of the plan's optimizer steps."""
    runs = np.zeros(num_samples, dtype=bool)
    for step in plan.mini_batches:
        runs[step.ran] = True
    return runs
