"""The factory of the objects around a run's loop: evaluation, records, exports, checkpoints, supervised start."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.algorithm.signal import SignalRule
from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.run_state import ResumePoint
from megatron_rl.config import Config, MetricsConfig
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.observability.metrics import MetricsWriter
from megatron_rl.observability.progress_bar import ProgressBar
from megatron_rl.observability.stall_warning import StallWarning
from megatron_rl.observability.timer import StepTimer
from megatron_rl.observability.trace import Recorder
from megatron_rl.planning.num_steps import moving_rl_steps
from megatron_rl.reward import Reward
from megatron_rl.rollout.queue import RolloutQueue
from megatron_rl.trainer.exports import Exports
from megatron_rl.trainer.records import Record, Records
from megatron_rl.trainer.reference import Reference
from megatron_rl.trainer.run import Start
from megatron_rl.trainer.run_records import PlanRecord, ProgressRecord, QueueRecord, StallRecord, TraceRecord
from megatron_rl.trainer.training_data import context_tokens

if TYPE_CHECKING:
    from megatron_rl.distributed.watchdog import Watchdog
    from megatron_rl.trainer.evaluation import Evaluation
    from megatron_rl.trainer.live_run import LiveRun
    from megatron_rl.trainer.run_checkpoints import RunCheckpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingParts:
    """Holds the objects that a run has before its engines start, and builds further objects from them.

    resume_point: the checkpoint that the run resumes from; None if it starts at the beginning.
    """

    config: Config
    backend: TrainableModel
    tokenizer: object
    prompts: PromptDataset
    reward: Reward | None
    checkpoints: CheckpointManager
    resume_point: ResumePoint | None
    writer: MetricsWriter
    progress: ProgressBar

    @property
    def supervised_steps_done(self) -> int:
        """Return the number of supervised steps done, if the run resumes within the supervised start; else 0.

        A run that resumes from a later checkpoint has 0, too: no supervised step is left.
        """
        return self.resume_point.supervised_steps or 0 if self.resume_point is not None else 0

    @property
    def rollouts_done(self) -> int | None:
        """Return the number of rollouts trained before the checkpoint that the run resumes from.

        None without such a checkpoint, and if it was saved before RL began.
        """
        point = self.resume_point
        return None if point is None or point.supervised_steps is not None else point.rollouts

    @property
    def evaluates_first(self) -> bool:
        """Return whether the run may evaluate before its first rollout.

        False if supervised steps come first: the last of them evaluates the same weights. False also if
        the run resumes after a rollout.
        """
        return not (self.config.sft.steps or self.rollouts_done)

    def evaluation(self) -> Evaluation | None:
        """Return the evaluation of held-out prompts; None without held-out prompts, or without rewards.

        Raises ConfigError for a row that cannot be evaluated.
        """
        if not self.config.eval.named_sets:
            return None
        from megatron_rl.trainer.evaluation import Evaluation

        shape, required = self.backend.shape, self.reward.required_columns if self.reward else ()
        limits = shape.context_tokens, shape.vocab_size
        evaluation = Evaluation(self.config, self.tokenizer, *limits, required=required)
        return None if self.reward is None else evaluation

    def live(self, watchdog: Watchdog) -> LiveRun | None:
        """Return the reader of the run's current values, after giving it to the Prometheus server.

        None if no port for Prometheus is set, and on all ranks but the main rank.
        """
        if self.config.metrics.prometheus_port is None or not self.backend.topology.is_main:
            return None
        from megatron_rl.trainer.live_run import LiveRun

        live = LiveRun.of(self.config, self.backend, watchdog, self.checkpoints, self.resume_point)
        self.writer.follow(live)
        return live

    def records(self, queue: RolloutQueue, reference: Reference) -> Records:
        """Return the writer of metrics.jsonl together with the run's other records."""
        config, topology, folder = self.config, self.backend.topology, self.config.run.path
        records = Records(self.backend, reference, self.writer)
        chosen: list[Record] = [QueueRecord(queue=queue)]
        if topology.is_main and config.metrics.log_completions:
            from megatron_rl.trainer.completions import TrainedCompletions, completion_rules

            rules = completion_rules(config.metrics, config.reward.functions)
            chosen.append(TrainedCompletions(rules=rules, show=records.show))
        chosen += saved_rollouts(config.metrics, config.reward.functions, folder, self.tokenizer, topology.rank)
        if config.metrics.save_plans and topology.is_main:
            chosen.append(PlanRecord(folder=folder))
        watch = StallWarning(config.metrics.untrained_warning_steps)
        recorder = Recorder(self.backend, folder, config.reward.functions, resumed=self.checkpoints.resumes)
        chosen.append(StallRecord(watch=watch, folder=folder, is_main=topology.is_main))
        chosen += [ProgressRecord(progress=self.progress), TraceRecord(recorder=recorder)]
        records.others = tuple(chosen)
        return records

    def exports(self, queue: RolloutQueue, timer: StepTimer) -> Exports:
        """Return the object that exports the policy as Hugging Face directories."""
        run = self.config.run.path
        root = self.config.checkpoint.root(run)
        return Exports(
            backend=self.backend,
            tokenizer=self.tokenizer,
            root=run / "checkpoints" if isinstance(root, pathlib.Path) else root,
            settings=self.config.train,
            queue=queue,
            timer=timer,
        )

    def run_checkpoints(
        self, queue: RolloutQueue, reference: Reference, records: Records, timer: StepTimer
    ) -> RunCheckpoints | None:
        """Return the object that saves and restores the run's state; None if the run does neither."""
        if not self.config.saves_checkpoints and self.resume_point is None:
            return None
        from megatron_rl.trainer.run_checkpoints import RunCheckpoints

        return RunCheckpoints(
            manager=self.checkpoints,
            queue=queue,
            prompts=self.prompts,
            reference=reference,
            records=records,
            timer=timer,
            saves=self.config.saves_checkpoints,
            folder=self.config.run.path,
            is_main=self.backend.topology.is_main,
        )

    def start(self, rule: SignalRule, timer: StepTimer) -> Start | None:
        """Return the supervised start; None in a run without one, or in a run that resumes after it.

        Raises ConfigError for a held-out row that cannot be evaluated, even if the start has ended.
        """
        config, done = self.config, self.supervised_steps_done
        if not (config.sft.is_on or done):
            return None
        from megatron_rl.trainer.supervised import Imitation, Responses, SupervisedStart, held_out_responses

        # Even after the start the held-out rows are read, so that a bad row is an error.
        backend, pairs = self.backend, config.preference
        most_tokens = context_tokens(pairs, backend.hf_config)
        responses = Responses(
            prompts=self.prompts,
            size=config.sft.samples_per_step,
            pairs=pairs,
            held_out=held_out_responses(
                config.sft,
                pairs,
                config.data,
                config.run.seed,
                self.prompts,
                self.tokenizer,
                most_tokens,
                backend.shape.vocab_size,
            ),
        )
        if self.rollouts_done is not None:
            return None
        # The task of the steps that are left.
        if pairs.is_on:
            from megatron_rl.trainer.preference import Comparison

            task = Comparison(backend, responses, timer, rule)
        else:
            task = Imitation(backend, responses, timer, precedes_rl=config.train.num_rollouts != 0)
        return SupervisedStart(
            task=task,
            settings=config.sft,
            optimizer=config.optimizer,
            done=done,
            total_rl_steps=moving_rl_steps(
                config.train, config.rollout, config.skip, config.trained_critic, len(self.prompts)
            ),
            keeps_reference=pairs.needs_reference,
        )


def saved_rollouts(
    metrics: MetricsConfig, functions: Sequence[str], folder: pathlib.Path, tokenizer: object, rank: int
) -> list[Record]:
    """Return [the record that saves whole rollouts in the run's folder]; [] without ``metrics.save_rollouts``."""
    if not metrics.save_rollouts:
        return []
    from megatron_rl.trainer.saved_rollouts import SavedRollouts

    every = metrics.completions_every_rollouts
    return [SavedRollouts(folder=folder, functions=functions, every_rollouts=every, tokenizer=tokenizer, rank=rank)]
