"""train.py's loop over one rollout that is given: real plans, passes, schedules and steps; no engine, no reward, no file."""

from __future__ import annotations

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
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.train import train_on_rollout
from megatron_rl.trainer.reference_policy import ReferencePolicy
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.types import BatchPlan, StepResult
from tests.equality.rig import DEFAULTS, Rig


class GivenRun(Trainer):
    """A Run over a rig's batch. ``results`` and ``plan`` are what the loop did, ``passes`` how often it asked for old log-probs."""

    def __init__(self, rig: Rig, config: Config, advantages: np.ndarray) -> None:
        self.config, self.backend, self.rule = config, rig.backend, signal_rule(config)
        self.clock = StepTimer(lambda stage: contextlib.nullcontext())
        self.critic, self.reference = None, ReferencePolicy(config, rig.backend)
        count, tokens = rig.batch.facts.num_samples, int(rig.batch.facts.response_offsets[-1])
        intake = TrainingBatch(
            batch=rig.batch, totals=np.zeros(count), by_function=np.zeros((count, 1)), advantages=advantages,
            old=np.zeros(tokens, dtype=np.float32), known=np.zeros(count, dtype=bool), replayed=np.zeros(count, dtype=bool),
            trained_version=-1,  # so that the gap to the engine's log-probs, which is meant, is no error
        )  # fmt: skip
        self.feed = SimpleNamespace(take=lambda index, clock: intake, start=lambda index, clock: None, has=lambda index: False)
        self.recorder = SimpleNamespace(rollout=lambda *given: None)
        self.evaluation = SimpleNamespace(due=lambda *given, **named: False)
        self.generation = SimpleNamespace(take_metrics=dict)
        self.results: list[StepResult] = []
        self.plan: BatchPlan | None = None
        self.passes = 0

    def old_logprobs(self, *given) -> tuple[np.ndarray, dict[str, float]]:
        self.passes += 1
        return super().old_logprobs(*given)

    def save_plan(self, plan: BatchPlan, index: int) -> None:
        self.plan = plan

    def write(self, phase: str, result: StepResult, values: Mapping[str, float]) -> None:
        self.results.append(result)


def fresh_run(rig: Rig, advantages: np.ndarray, *overrides: str) -> GivenRun:
    """The rig's backend under another configuration of loss, skip and optimizer, back at the weights it was built with.

    The first call keeps those; layout, dtype and plan rules stay the backend's own.
    """
    backend, config = rig.backend, load_config(None, [*DEFAULTS, "metrics.dense_every_rollouts=0", *overrides])
    if backend.reference.tensors is None:
        backend.keep_reference()
    with torch.no_grad():
        overwrite(backend.parameters(), backend.reference.tensors)
    backend.config, backend.objective = config, Objective(config.loss, backend._sum_over_context)
    backend.reset_optimizer(total_steps=1)
    return GivenRun(rig, config, advantages)


def train_once(run: GivenRun) -> GivenRun:
    """Takes all optimizer steps of the rollout."""
    train_on_rollout(run, 0, {})
    return run
