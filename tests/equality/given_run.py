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
from megatron_rl.rollout.training_batch import KnownLogProbs, TrainingBatch, scored_batch
from megatron_rl.train import train_on_rollout
from megatron_rl.trainer.advantages import AdvantageResult
from megatron_rl.trainer.reference_policy import ReferencePolicy
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.trainer.update import OldLogProbs, Update, UpdatePlanner
from megatron_rl.types import Advantages, BatchPlan, StepResult
from tests.equality.rig import DEFAULTS, Rig


class GivenRun(Trainer):
    """A trainer over a rig's batch, which keeps what the loop did. fresh: the engine had the trainer's weights."""

    def __init__(self, rig: Rig, config: Config, advantages: np.ndarray, *, fresh: bool = False) -> None:
        self.config, self.backend, self.rule = config, rig.backend, signal_rule(config)
        self.timer, self.next_row = StepTimer(lambda stage: contextlib.nullcontext()), {}
        self.critic, self.reference = None, ReferencePolicy(config, rig.backend)
        self.planner = CountingPlanner(config, rig.backend, self.rule, self.reference, self.timer)
        self.given = AdvantageResult(advantages=Advantages(of_sample=advantages), plain=advantages)
        count, tokens = rig.batch.facts.num_samples, int(rig.batch.facts.response_offsets[-1])
        nothing = np.zeros(count, dtype=bool)
        taken = TrainingBatch(
            scored=scored_batch(config, rig.batch, np.zeros(count), np.zeros((count, 1))),
            known=KnownLogProbs(values=np.zeros(tokens, dtype=np.float32), covered=nothing),
            replayed=nothing,
            trained_version=0 if fresh else -1,  # the gap to the engine's log-probs, which is meant, is no error
        )
        named = dict(take=lambda index: taken, start_ahead=lambda index: None, has=lambda index: False)
        self.rollouts, self.recorder = SimpleNamespace(**named), SimpleNamespace(rollout=lambda *given: None)
        self.evaluation = SimpleNamespace(due=lambda *given, **named: False)
        self.manager = SimpleNamespace(take_metrics=dict)
        self.results: list[StepResult] = []
        self.rows: list[dict[str, float]] = []
        self.plan: BatchPlan | None = None

    @property
    def passes(self) -> int:
        return self.planner.passes

    def compute_advantages(self, taken: TrainingBatch, index: int) -> AdvantageResult:
        return self.given

    def prepare_update(self, taken: TrainingBatch, result: AdvantageResult, index: int) -> Update:
        update = super().prepare_update(taken, result, index)
        self.plan = update.plan
        return update

    def write(self, phase: str, result: StepResult, values: Mapping[str, float]) -> None:
        self.results.append(result)
        self.rows.append({**self.next_row, **values})
        self.next_row = {}


class CountingPlanner(UpdatePlanner):
    """Counts the passes for old log-probs."""

    passes = 0

    def old_logprobs(self, *given, **named) -> OldLogProbs:
        self.passes += 1
        return super().old_logprobs(*given, **named)


def fresh_run(rig: Rig, advantages: np.ndarray, *overrides: str, fresh: bool = False) -> GivenRun:
    """Return a run on the rig's backend under other loss, skip and optimizer settings, at its first weights."""
    backend, config = rig.backend, load_config(None, [*DEFAULTS, "metrics.dense_every_rollouts=0", *overrides])
    if backend.reference.tensors is None:
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
