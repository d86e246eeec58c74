"""Run train.py's loop over one given rollout: all is real but engine, reward and files, which are not there."""

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import torch

from megatron_rl.algorithm.objective import Objective
from megatron_rl.algorithm.signal import signal_rule
from megatron_rl.backend.reference_weights import overwrite
from megatron_rl.config import Config, load_config
from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout.scored_batch import Scoring, scored_batch
from megatron_rl.rollout.training_batch import KnownLogProbs, TrainingBatch
from megatron_rl.train import train_on_rollout
from megatron_rl.trainer.advantages.source import AdvantageResult
from megatron_rl.trainer.critic_part import NoCritic
from megatron_rl.trainer.parts import PartChooser
from megatron_rl.trainer.passes.old_logprobs import OldLogProbPass
from megatron_rl.trainer.passes.passes import OldLogProbs, PassesOfAdvantages
from megatron_rl.trainer.records import Records
from megatron_rl.trainer.run import Run
from megatron_rl.trainer.update import Update
from megatron_rl.types import Advantages, BatchPlan, StepResult
from tests.equality.rig import DEFAULTS, Rig


class GivenRun(Run):
    """A run over a rig's batch, which keeps what the loop did. fresh: the engine had the trainer's weights."""

    def __init__(self, rig: Rig, config: Config, advantages: np.ndarray, *, fresh: bool = False) -> None:
        self.config, self.rule = config, signal_rule(config)
        timer = StepTimer(lambda stage: contextlib.nullcontext())
        parts = PartChooser(config=config, backend=rig.backend, rule=self.rule, timer=timer, watchdog=None)
        reference = parts.reference()
        planner = parts.planner(reference)
        planner.old = CountingPass(planner.old.backend, planner.old.rules, planner.old.gap)
        given = AdvantageResult(advantages=Advantages(of_sample=advantages), plain=advantages)
        count, tokens = rig.batch.facts.num_samples, int(rig.batch.facts.response_offsets[-1])
        nothing = np.zeros(count, dtype=bool)
        scoring = Scoring.of(config.reward, config.advantage, config.rollout, config.loss)
        taken = TrainingBatch(
            scored=scored_batch(scoring, rig.batch, np.zeros(count), np.zeros((count, 1))),
            known=KnownLogProbs(values=np.zeros(tokens, dtype=np.float32), covered=nothing),
            replayed=nothing,
            trained_version=0 if fresh else -1,  # the gap to the engine's log-probs, which is meant, is no error
        )
        named = dict(take=lambda index: taken, start_ahead=lambda index: None, has=lambda index: False)
        super().__init__(
            backend=rig.backend,
            queue=SimpleNamespace(**named),
            passes=PassesOfAdvantages(),
            advantages=lambda scored, passes: given,
            planner=planner,
            critic=NoCritic(),
            reference=reference,
            records=KeptRecords(rig.backend, reference, None),
            timer=timer,
            exports=None,
        )

    @property
    def num_passes(self) -> int:
        return self.planner.old.passes

    @property
    def results(self) -> list[StepResult]:
        return self.records.results

    @property
    def rows(self) -> list[dict[str, float]]:
        return self.records.rows

    @property
    def plan(self) -> BatchPlan:
        return self.records.plan


class KeptRecords(Records):
    """Keeps the rows in place of writing them, and the plan."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.results: list[StepResult] = []
        self.rows: list[dict[str, float]] = []
        self.plan: BatchPlan | None = None

    def update(self, update: Update) -> None:
        super().update(update)
        self.plan = update.decision.plan

    def write(self, phase: str, result: StepResult, values: Mapping[str, float]) -> None:
        self.results.append(result)
        self.rows.append({**self._next_row, **values})
        self._next_row = {}


class CountingPass(OldLogProbPass):
    """Counts the passes for old log-probs."""

    passes = 0

    def of(self, *given, **named) -> OldLogProbs:
        self.passes += 1
        return super().of(*given, **named)


def fresh_run(rig: Rig, advantages: np.ndarray, *overrides: str, fresh: bool = False) -> GivenRun:
    """Return a run on the rig's backend under other loss, skip and optimizer settings, at its first weights."""
    backend, config = rig.backend, load_config(None, [*DEFAULTS, "metrics.dense_every_rollouts=0", *overrides])
    if backend.reference is None:
        backend.keep_reference()
    with torch.no_grad():
        overwrite(backend.parameters(), backend.reference.tensors)
    backend.config, backend.objective = config, Objective(config.loss, backend._sum_over_context)
    backend.reset_optimizer(total_steps=1)
    return GivenRun(rig, config, advantages, fresh=fresh)


def train_once(run: GivenRun) -> GivenRun:
    """Take all optimizer steps of the rollout."""
    train_on_rollout(run, 0)
    return run
