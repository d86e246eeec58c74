"""The saving and restoring of a run's state without its models: rollouts, position in the data, KL's β and records."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

from megatron_rl.checkpoint.manager import CheckpointManager
from megatron_rl.checkpoint.run_state import RestoredRun, RunState
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.observability.saved_rollouts import forget_after
from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout.groups import queue_state
from megatron_rl.rollout.queue import RolloutQueue
from megatron_rl.trainer.records import Records
from megatron_rl.trainer.reference import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoints:
    """Saves a run's state in checkpoints, and restores it. Methods are collectives.

    saves:  whether checkpoints are saved; a run that resumes from one may save none.
    folder: the run's folder.
    """

    manager: CheckpointManager
    queue: RolloutQueue
    prompts: PromptDataset
    reference: Reference
    records: Records
    timer: StepTimer
    saves: bool
    folder: pathlib.Path
    is_main: bool

    def restore(self, restored: RestoredRun) -> None:
        """Restore the run's state from a checkpoint, after the models and the random states were restored."""
        self.reference.load_state(restored.reference)
        self.prompts.load_state(restored.prompts)
        queue_state.restore(self.queue, restored.queue, restored.queue_rows)
        self.records.resume(restored)
        if self.is_main:
            forget_after(self.folder, restored.rollouts or 0)

    def save_if_due(self, num_rollouts: int) -> bool:
        """Save a checkpoint if one is due; return whether the run must stop now.

        It must stop if a rank got SIGTERM, SIGUSR1 or SIGINT; a checkpoint is saved by then.

        num_rollouts: the number of rollouts trained so far.
        """
        if not self.saves:
            return False
        last = num_rollouts > 0 and not self.queue.has(num_rollouts)
        with self.timer.follow("checkpoint"):
            return self.manager.save_if_due(num_rollouts, self._state, last=last)

    def save_supervised_if_due(self, num_steps: int) -> bool:
        """Save a checkpoint between two supervised steps if one is due; return whether the run must stop now.

        It must stop if a rank got SIGTERM, SIGUSR1 or SIGINT; a checkpoint is saved by then.

        num_steps: the number of supervised steps taken so far.
        """
        if not self.saves:
            return False
        with self.timer.follow("checkpoint"):
            return self.manager.save_supervised_if_due(num_steps, self._state)

    def _state(self) -> RunState:
        queue, rows = queue_state.save(self.queue)
        return RunState(
            queue=queue,
            queue_rows=rows,
            prompts=self.prompts.state(),
            reference=self.reference.state(),
            metrics=self.records.writer.state(),
            trace_rollouts=self.records.num_rollouts,
        )
