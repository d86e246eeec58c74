"""A separate critic (``critic.placement=separate``), as the policy's ranks call it.

RemoteCritic has the methods of ``Critic``. Each method sends a request to the critic's ranks, where
critic/server.py answers it. Every method is a collective over the policy's ranks, unless its
docstring says otherwise.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping

import numpy as np

from megatron_rl.backend import batch_exchange
from megatron_rl.backend.batch import Batch
from megatron_rl.checkpoint.folder import DamagedCheckpoint, folder_of
from megatron_rl.critic.link import Arrays, PolicyCriticLink
from megatron_rl.distributed import topology
from megatron_rl.errors import CheckpointError
from megatron_rl.types import BatchFacts, Sample


class RemoteSave:
    """Stands for a checkpoint that the critic's ranks are writing; it has the methods of PendingSave."""

    def __init__(self, critic: RemoteCritic, root: pathlib.Path, iteration: int) -> None:
        """Tell the critic's ranks to begin the checkpoint. Raises CheckpointError on every rank if that fails.

        root: the folder of the critic's checkpoints.
        iteration: the checkpoint's number, as in the policy's checkpoint.
        """
        self.critic, self.is_written, self.written_s = critic, True, 0.0
        critic.ask_of_checkpoint("save", root=str(root), iteration=iteration)

    def finish(self) -> pathlib.Path:
        """Wait until the checkpoint is written, and return its folder.

        Raises CheckpointError on every rank if it could not be written.
        """
        answer = self.critic.ask_of_checkpoint("finish")
        self.written_s = answer["written_s"]
        return folder_of(answer["folder"])

    def abandon(self) -> None:
        self.critic.ask("abandon")


class RemoteCritic:
    """Has the methods of ``Critic``; each sends a request to the critic's ranks, which do the work.

    If the critic's ranks fail, a method raises PeerError.

    link: this rank's end of the link to the critic's ranks.
    total_steps: the optimizer steps until the critic's learning rate stops decaying.
    """

    def __init__(self, link: PolicyCriticLink, *, total_steps: int) -> None:
        self.link, self.place = link, topology.current()
        self.number = 0
        self.is_told_to_leave = False  # True after a signal reached the critic's ranks
        self.valued: BatchFacts | None = None  # facts of the batch whose samples the critic's ranks have
        self.ask("build", total_steps=total_steps)

    def ask(
        self, request: str, arrays: Callable[[], Arrays] | None = None, **given: object
    ) -> tuple[dict, dict[str, np.ndarray]]:
        """Send a request to the critic's ranks; return (the answer, {name: array}).

        Every rank waits for the answer in the job's key-value store, without a deadline as long as the
        critic's ranks show signs of life.

        request: the request's name, such as ``values``.
        arrays: a function that returns the request's arrays, called on the first rank alone; None
            for none.
        given: further fields of the request, JSON-able.
        """
        self.number += 1
        if self.link.is_first:
            self.link.tell(f"request/{self.number}", {"request": request, **given}, arrays() if arrays else None)
        answer = self.link.hear(f"answer/{self.number}")
        self.is_told_to_leave |= answer["is_told_to_leave"]
        return answer, self.link.arrays(answer)

    def ask_of_checkpoint(self, request: str, **given: object) -> dict:
        """Send a request about a checkpoint; return the answer, or raise the critic's CheckpointError on every rank."""
        answer, _ = self.ask(request, **given)
        if answer["refused"]:
            raise (DamagedCheckpoint if answer["damaged"] else CheckpointError)(answer["refused"])
        return answer

    # ---- a rollout -------------------------------------------------------------------------------------------------

    def values(self, batch: Batch) -> np.ndarray:
        """Return the critic's value at each response token of the batch, float32 [T] sample after sample.

        The critic's ranks keep the batch's samples for ``train``.
        """
        everything = np.arange(batch.facts.num_samples)
        needed = [everything if rank == 0 else everything[:0] for rank in range(self.place.world_size)]
        rows = batch_exchange.exchange_rows(batch.facts, batch.local, needed, self.place)
        self.valued = batch.facts
        _, arrays = self.ask("values", lambda: batch_arrays(batch, rows), sample_ids=list(batch.facts.sample_ids))
        return arrays["values"]

    def train(self, batch: Batch, returns: np.ndarray, old_values: np.ndarray) -> dict[str, float]:
        """Take the critic's optimizer steps on a rollout, and return their metrics.

        batch: the batch of the last call of ``values``.
        returns, old_values: [T], for each response token the value to learn, and the value that the
            critic predicted before its first step.
        """
        assert batch.facts is self.valued, "train() takes the batch of the last values()"
        answer, _ = self.ask("train", lambda: {"returns": returns, "old_values": old_values})
        return answer["metrics"]

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, root: pathlib.Path, iteration: int) -> RemoteSave:
        return RemoteSave(self, root, iteration)

    def check(self, folder: pathlib.Path) -> None:
        """Raise CheckpointError if the critic's checkpoint in ``folder`` is of another model or damaged."""
        self.ask_of_checkpoint("check", folder=str(folder))

    def load(self, folder: pathlib.Path) -> None:
        self.ask_of_checkpoint("load", folder=str(folder))

    def close(self, *, preempted: bool = False) -> None:
        """End the critic's ranks.

        preempted: whether the run was preempted, not finished.
        """
        self.ask("close", preempted=preempted)
        self.link.close()


def batch_arrays(batch: Batch, rows: Mapping[int, Sample]) -> dict[str, np.ndarray]:
    """Return {name: array} of a batch's S samples.

    ``groups``, ``prompt_tokens`` and ``response_tokens`` are [S]. ``token_ids`` and ``loss_mask``
    hold all samples end to end.

    rows: sample index → sample, for every sample of the batch.
    """
    facts = batch.facts
    ordered = [rows[i] for i in range(facts.num_samples)]
    return {
        "groups": facts.groups,
        "prompt_tokens": facts.prompt_tokens,
        "response_tokens": facts.response_tokens,
        "token_ids": np.concatenate([row.token_ids for row in ordered]).astype(np.int32),
        "loss_mask": np.concatenate([row.loss_mask for row in ordered]),
    }
