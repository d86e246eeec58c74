"""A run: the object that holds everything which the loop in train.py calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.observability.metrics import skip_metrics
from megatron_rl.observability.throughput import performance
from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout.queue import RolloutQueue
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.trainer.advantages.source import AdvantageSource
from megatron_rl.trainer.critic_part import CriticPart
from megatron_rl.trainer.exports import Exports
from megatron_rl.trainer.passes.passes import PassesOfAdvantages
from megatron_rl.trainer.records import Records
from megatron_rl.trainer.reference import Reference
from megatron_rl.trainer.update import Update, UpdatePlanner, UpdateStep
from megatron_rl.types import StepResult

if TYPE_CHECKING:
    from megatron_rl.trainer.evaluation import Evaluation
    from megatron_rl.trainer.run_checkpoints import RunCheckpoints


class Start(Protocol):
    """Trains a run's model before RL, or in place of RL (trainer/supervised.py)."""

    def take(self, run: Run) -> bool:
        """Take the steps that are left; return whether the run must stop before they end. A collective.

        It must stop if a rank got SIGTERM, SIGUSR1 or SIGINT; a checkpoint is saved by then.
        """
        ...


@dataclass(kw_only=True, eq=False)
class Run:
    """Holds all objects of a run (``trainer.build.build_run``).

    Methods are collectives unless they say otherwise.

    passes:          the forward passes that run before the advantages.
    evaluation:      the evaluation of held-out prompts; None without held-out prompts or without
                     rewards.
    checkpoints:     None if the run neither saves a checkpoint nor resumes from one.
    start:           the supervised start, which trains the model before RL; None without one, and
                     after it.
    evaluates_first: whether ``evaluation`` runs before the first rollout.
    rollouts_done:   the rollouts trained before the checkpoint that the run resumed from; None if
                     the run did not resume, or resumed before RL.
    """

    backend: TrainableModel
    queue: RolloutQueue
    passes: PassesOfAdvantages
    advantages: AdvantageSource
    planner: UpdatePlanner
    critic: CriticPart
    reference: Reference
    records: Records
    timer: StepTimer
    exports: Exports
    evaluation: Evaluation | None = None
    checkpoints: RunCheckpoints | None = None
    start: Start | None = None
    evaluates_first: bool = False
    rollouts_done: int | None = None

    def begin(self) -> bool:
        """Do what remains before RL's first rollout: supervised steps, evaluation, critic and reference, checkpoint.

        Returns whether the run must stop now: a rank got SIGTERM, SIGUSR1 or SIGINT, and a
        checkpoint is saved.
        """
        if self.start is not None and self.start.take(self):
            return True
        if self.evaluates_first:
            self.records.add(self.evaluate(suffix="_before"))
        if self.rollouts_done is not None:
            return False
        self.begin_rl()
        return self.save_if_due(0)

    def begin_rl(self) -> None:
        """Copy the policy's weights into the critic if it starts from them; make the current policy the reference."""
        self.critic.begin(self.backend)
        self.reference.keep()

    def take(self, index: int) -> TrainingBatch:
        """Wait for rollout ``index`` and start later rollouts; return its scored samples, on every rank."""
        self.timer.restart()
        taken = self.queue.take(index)
        self.queue.start_ahead(index)
        return taken

    def end_step(self, update: Update, step: UpdateStep, result: StepResult) -> None:
        """Write an optimizer step's row of metrics.jsonl.

        If an evaluation is due and this is the rollout's last step, evaluate first; the row then has
        the evaluation's metrics too.
        """
        self.reference.measure(result)
        facts, backend = update.batch.facts, self.backend
        self.records.add(self.planner.gap_metrics(update, step, result))
        shares_prompts = backend.rules.share_prompts
        values = skip_metrics(step.plan, facts, update.decision.signal, share_prompts=shares_prompts)
        values |= performance(backend, facts, step.plan, self.timer.seconds["update"]) | self.timer.take()
        if step.is_last and self.evaluation is not None:
            num_rollouts = update.index + 1
            if self.evaluation.due(num_rollouts, last=not self.queue.has(num_rollouts)):
                values |= self.evaluate()
        self.records.write("rl", result, {**values, "rollout": update.index + 1})

    def evaluate(self, *, suffix: str = "") -> dict[str, float]:
        """Return the metrics of the held-out sets under the current weights.

        suffix: is appended to the metrics' names.
        """
        with self.timer.enter("eval"):
            result = self.evaluation.run(self.queue.manager, step=self.backend.step_index, suffix=suffix)
        self.timer.report("eval", result.metrics["time/eval_s"])
        self.records.show(result.completions)
        return dict(result.metrics)

    def save_if_due(self, num_rollouts: int) -> bool:
        """Save a checkpoint if one is due; return whether the run must stop now.

        It must stop if a rank got SIGTERM, SIGUSR1 or SIGINT; a checkpoint is saved by then.

        num_rollouts: the number of rollouts trained so far.
        """
        return self.checkpoints is not None and self.checkpoints.save_if_due(num_rollouts)
