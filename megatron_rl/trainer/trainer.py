"""A run: its standing parts, and the stages of a rollout that the loop in train.py calls by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_rl.algorithm.signal import SignalRule
from megatron_rl.backend.backend import MegatronBackend
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.run_state import RestoredRun, RunState
from megatron_rl.config import Config
from megatron_rl.critic import Critic, RemoteCritic, RewardModel
from megatron_rl.data.prompt_dataset import PromptDataset, Solution
from megatron_rl.distributed.watchdog import Watchdog
from megatron_rl.observability.completions import Completion
from megatron_rl.observability.metrics import MetricsWriter, read_metrics, skip_metrics, step_metrics
from megatron_rl.observability.progress_bar import ProgressBar
from megatron_rl.observability.saved_rollouts import forget_after
from megatron_rl.observability.throughput import performance
from megatron_rl.observability.timer import StepTimer
from megatron_rl.observability.untrained import TrainingWatch
from megatron_rl.reward import Reward
from megatron_rl.rollout import queue_state
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.queue import RolloutQueue
from megatron_rl.rollout.training_batch import TrainingBatch
from megatron_rl.simulator.record import Recorder
from megatron_rl.trainer.advantages import (
    AdvantageResult,
    KLPenalty,
    critic_advantages,
    group_advantages,
    kl_penalty,
    teacher_advantages,
)
from megatron_rl.trainer.completions import of_training, save_rollout
from megatron_rl.trainer.evaluation import Evaluation
from megatron_rl.trainer.reference_policy import ReferencePolicy
from megatron_rl.trainer.teacher import Teacher
from megatron_rl.trainer.update import Update, UpdatePlanner
from megatron_rl.types import StepResult

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Holds all parts of a run (``trainer.build.build_trainer``). Methods are collectives unless they say otherwise.

    rollouts_done: rollouts that a checkpoint has trained; None where the run did not resume, or within the supervised
                   start.
    supervised_steps_done: supervised steps that a checkpoint within the supervised start has taken; else 0.
    held_out:      responses that the supervised start evaluates: solutions, or chosen and rejected ones in turns.
    total_steps:   optimizer steps of RL that may move the policy; its learning rate's schedule ends after them.
    next_row:      metrics that join the next row of metrics.jsonl.
    sampled:       completions that are recorded with that row; none but on the main rank.
    """

    config: Config
    backend: MegatronBackend | RewardModel
    critic: Critic | RemoteCritic | None
    tokenizer: object
    prompts: PromptDataset
    reward: Reward | None
    manager: RolloutManager
    rollouts: RolloutQueue
    rule: SignalRule
    reference: ReferencePolicy
    teacher: Teacher | None
    planner: UpdatePlanner
    evaluation: Evaluation
    held_out: Sequence[Solution]
    checkpoints: CheckpointManager
    recorder: Recorder
    watchdog: Watchdog
    timer: StepTimer
    writer: MetricsWriter
    progress: ProgressBar
    watch: TrainingWatch
    total_steps: int
    rollouts_done: int | None = None
    supervised_steps_done: int = 0
    next_row: dict[str, float] = field(default_factory=dict)
    sampled: list[Completion] = field(default_factory=list)

    def resume(self, restored: RestoredRun) -> None:
        """Restore the run's parts from a checkpoint; model, critic and random states are restored already."""
        self.reference.load_state(restored.reference)
        self.prompts.load_state(restored.prompts)
        queue_state.restore(self.rollouts, restored.queue, restored.queue_rows)
        self.recorder.num_rollouts = restored.trace_rollouts
        if self.backend.topology.is_main:  # which alone has the file, and alone warns
            self.watch.resume(read_metrics(self.config.run.path / "metrics.jsonl"))
            forget_after(self.config.run.path, restored.rollouts or 0)
        self.rollouts_done = restored.rollouts
        self.supervised_steps_done = restored.supervised_steps or 0

    def begin_rl(self) -> None:
        """Give the critic the policy's weights if it starts from them, and make the current policy the reference."""
        if self.critic is not None and self.config.critic.init == "policy":
            self.critic.take_weights(self.backend.export())
        self.reference.keep()

    def close(self) -> None:
        """Close reward workers and engines, and warn of a run that trained nothing. Not a collective."""
        self.watch.end()
        if self.reward is not None:
            self.reward.close()
        self.manager.close()

    # ---- a rollout --------------------------------------------------------------------------------------------------

    def take_rollout(self, index: int) -> TrainingBatch:
        """Wait for rollout ``index``, start later ones, and record its facts and rewards."""
        self.timer.restart()
        taken = self.rollouts.take(index)
        self.rollouts.start_ahead(index)
        self.recorder.rollout(taken.facts, taken.scored.rewards.totals, taken.scored.by_function)
        self.next_row |= taken.metrics
        return taken

    def compute_advantages(self, taken: TrainingBatch, index: int) -> AdvantageResult:
        """Return a rollout's advantages, by an estimator or GAE, with a KL in the reward and noise where configured."""
        penalty, mask = None, None
        if self.critic is not None or self.teacher is not None or self.config.kl_in_reward:
            mask = self.backend.gather_loss_mask(taken.batch)
        if self.config.kl_in_reward:
            penalty = self._kl_penalty(taken, mask, index)
        if self.critic is not None:
            with self.timer.measure("critic"):
                values = self.critic.values(taken.batch)
            result = critic_advantages(self.config, taken.scored, values, penalty, mask)
        elif self.teacher is not None:
            result = self._against_teacher(taken, mask, index)
        else:
            rl_step = self.backend.step_index - self.config.sft.steps
            with self.watchdog.own_code("advantage"):
                result = group_advantages(self.config, taken.scored, penalty, mask, rl_step=rl_step)
        self.next_row |= self.rollouts.remember(taken, result.plain)
        if self.backend.topology.is_main:
            self.sampled += of_training(self.config, taken, result.advantages.of_sample, index)
        rank = self.backend.topology.rank
        save_rollout(self.config, taken, result.advantages, index, tokenizer=self.tokenizer, rank=rank)
        return result

    def _against_teacher(self, taken: TrainingBatch, mask: np.ndarray, index: int) -> AdvantageResult:
        """Pass every sample under policy and teacher, and return the gaps as advantages."""
        with self.timer.measure("logprob"):
            old = self.planner.old_logprobs(taken, np.ones(taken.facts.num_samples, dtype=bool), index)
        with self.timer.measure("teacher"):
            teacher = self.teacher.logprobs(taken.batch)
        return teacher_advantages(self.config, taken.scored, old.flat, teacher, mask, old.metrics, old.experts)

    def _kl_penalty(self, taken: TrainingBatch, mask: np.ndarray, index: int) -> KLPenalty:
        """Pass every sample under policy and reference, and return β times their KL."""
        everything = np.ones(taken.facts.num_samples, dtype=bool)
        with self.timer.measure("logprob"):
            old = self.planner.old_logprobs(taken, everything, index)
            reference = self.reference.logprobs(taken.batch, everything)
        penalty = kl_penalty(
            old.flat,
            reference,
            mask,
            estimator=self.config.loss.kl_estimator,
            coefficient=self.reference.coefficient,
            num_samples=len(everything),
            metrics=old.metrics,
            experts=old.experts,
        )
        if not self.holds_policy(index):  # β moves by rollouts that train the policy
            self.reference.count(penalty.kl, penalty.tokens)
        return penalty

    def prepare_update(self, taken: TrainingBatch, result: AdvantageResult, index: int) -> Update:
        """Decide signal, log-probs, importance weights and the plan of all optimizer steps (trainer/update.py)."""
        update = self.planner.prepare(taken, result, index=index, holds=self.holds_policy(index))
        self.next_row |= {**update.metrics, **self.manager.take_metrics()}
        self._save_plan(update, index)
        return update

    def holds_policy(self, index: int) -> bool:
        """Return whether rollout ``index`` trains the critic alone. Not a collective."""
        return self.critic is not None and index < self.config.critic.warmup_rollouts

    def train_critic(self, update: Update, result: AdvantageResult) -> None:
        """Take the critic's steps of a rollout, where there is a critic."""
        if self.critic is not None:
            with self.timer.measure("critic"):
                returns = result.returns.astype(np.float32)
                self.next_row |= self.critic.train(update.batch, returns, result.values)

    def end_rollout(self, index: int, update: Update) -> None:
        """Move the KL's coefficient by this rollout, and renew the reference if that is due."""
        self.reference.after_rollout(index, update.batch.facts.num_samples)

    # ---- evaluation, export, checkpoints ----------------------------------------------------------------------------

    def evaluate(self, *, suffix: str = "") -> dict[str, float]:
        """Return the metrics of the held-out sets under the current weights; {} without a set, or without rewards."""
        if not self.evaluation.sets or self.reward is None:
            return {}
        with self.watchdog.stage("eval"):
            result = self.evaluation.run(self.manager, step=self.backend.step_index, suffix=suffix)
        self.timer.report("eval", result.metrics["time/eval_s"])
        if self.backend.topology.is_main:
            self.sampled += result.completions
        return dict(result.metrics)

    def evaluate_at_start(self) -> None:
        """Evaluate before the first rollout, unless the run resumes or a supervised start has evaluated already."""
        if self.evaluation.due_at_start() and not (self.config.sft.steps or self.rollouts_done):
            self.next_row |= self.evaluate(suffix="_before")

    def export_if_due(self, num_rollouts: int) -> None:
        """Write the policy as a Hugging Face directory, checkpoints/step_<n>/hf, if the configuration asks for it."""
        train, last = self.config.train, not self.rollouts.has(num_rollouts)
        every = train.export_every_rollouts
        if (last and train.export_last) or (every and num_rollouts % every == 0):
            path = self.config.run.path / "checkpoints" / f"step_{self.backend.step_index}" / "hf"
            with self.timer.follow("export"):
                self.backend.save_hugging_face(path, self.tokenizer)
            log.info("policy written to %s", path)

    def save_if_due(self, num_rollouts: int) -> bool:
        """Save a checkpoint if one is due; return whether the run was told to leave, with everything saved."""
        last = num_rollouts > 0 and not self.rollouts.has(num_rollouts)
        if not self.config.saves_checkpoints:
            return False
        with self.timer.follow("checkpoint"):
            return self.checkpoints.save_if_due(num_rollouts, self._state, last=last)

    def save_supervised_if_due(self, num_steps: int) -> bool:
        """Save a checkpoint between supervised steps if one is due; return whether the run was told to leave."""
        if not self.config.saves_checkpoints:
            return False
        with self.timer.follow("checkpoint"):
            return self.checkpoints.save_supervised_if_due(num_steps, self._state)

    def _state(self) -> RunState:
        queue, rows = queue_state.save(self.rollouts)
        return RunState(
            queue=queue,
            queue_rows=rows,
            prompts=self.prompts.state(),
            reference=self.reference.state(),
            metrics=self.writer.state(),
            trace_rollouts=self.recorder.num_rollouts,
        )

    # ---- records ----------------------------------------------------------------------------------------------------

    def log_step(self, index: int, update: Update, number: int, result: StepResult) -> None:
        """Write the row of the rollout's ``number``-th optimizer step; after its last one evaluate if that is due."""
        step, _ = update.steps[number]
        self.reference.measure(result)
        facts = update.batch.facts
        self.next_row |= self.planner.own_gap_metrics(update, number, result)
        values = {**skip_metrics(step, facts, update.signal, share_prompts=self.backend.rules.share_prompts)}
        values |= performance(self.backend, facts, step, self.timer.seconds["update"]) | self.timer.take()
        is_last = number == len(update.steps) - 1
        if is_last and self.evaluation.due(index + 1, last=not self.rollouts.has(index + 1)):
            values |= self.evaluate()
        self.write("rl", result, {**values, "rollout": index + 1})

    def write(self, phase: str, result: StepResult, values: Mapping[str, float]) -> None:
        """Write one optimizer step's row of metrics.jsonl, and fit the simulator's coefficients anew."""
        row = {"step": self.backend.step_index, "step_kind": result.kind, "phase": phase, **step_metrics(result)}
        row |= {**self.next_row, **values, "weight_version": self.backend.weight_version}
        sampled, self.next_row, self.sampled = self.sampled, {}, []
        if self.reference.is_needed:
            row["train/kl_coefficient"] = self.reference.coefficient
        unmeasured = {"train/clip_ratio", "train/ratio", "train/kl", "train/kl_coefficient"} if phase != "rl" else set()
        if not self.reference.is_needed:
            unmeasured.add("train/kl")
        row = {name: value for name, value in row.items() if name not in unmeasured}
        written = self.writer.write(row, sampled)
        self.watch.observe(written)
        self.progress.update(written)
        self.recorder.fit()

    def _save_plan(self, update: Update, index: int) -> None:
        if self.config.metrics.save_plans and self.backend.topology.is_main:
            folder = self.config.run.path / "plans"
            folder.mkdir(exist_ok=True)
            (folder / f"rollout_{index + 1}.json").write_text(update.plan.to_json())
