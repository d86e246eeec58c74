"""The exports of a run's policy as Hugging Face directories, in its folder or its object store."""

from __future__ import annotations

import logging
import pathlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.backend.trainable_model import TrainableModel
from megatron_rl.config import TrainConfig
from megatron_rl.observability.timer import StepTimer
from megatron_rl.rollout.queue import RolloutQueue

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exports:
    """Writes the policy as a Hugging Face directory ``<root>/step_<n>/hf``; n is the number of optimizer steps.

    root:     the folder ``checkpoints`` of the run's folder, or ``checkpoint.dir`` if that is a
              URL.
    settings: ``export_every_rollouts`` and ``export_last`` of the section ``train``.
    queue:    the queue of rollouts, which knows whether another one follows.
    """

    backend: TrainableModel
    tokenizer: object
    root: pathlib.Path | RemotePath
    settings: TrainConfig
    queue: RolloutQueue
    timer: StepTimer

    def write_if_due(self, num_rollouts: int) -> None:
        """Write the policy if the settings ask for an export after ``num_rollouts`` rollouts. A collective."""
        is_last, every = not self.queue.has(num_rollouts), self.settings.export_every_rollouts
        if not ((is_last and self.settings.export_last) or (every and num_rollouts % every == 0)):
            return
        path = self.root / f"step_{self.backend.step_index}" / "hf"
        with self.timer.follow("export"):
            self.backend.save_hugging_face(path, self.tokenizer)
        log.info("policy written to %s", path)
