"""The writing of a run's checkpoints and the removal of old ones: threads write the files while the run goes on."""

from __future__ import annotations

import json
import logging
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megatron_rl.checkpoint import model_state
from megatron_rl.checkpoint.folder import STATE, name_of, prune, remove, remove_if_empty, whole_checkpoints
from megatron_rl.checkpoint.random_state import random_state
from megatron_rl.checkpoint.resume import CRITIC, SUPERVISED
from megatron_rl.checkpoint.run_state import APPENDED, RunState, own_file
from megatron_rl.checkpoint.writer import PendingSave
from megatron_rl.config.run import CheckpointConfig
from megatron_rl.distributed.collectives import gather_json
from megatron_rl.errors import CheckpointError, StoreError

if TYPE_CHECKING:
    from megatron_rl.storage.remote import RemotePath

log = logging.getLogger(__name__)


class CheckpointSaver:
    """Writes a run's checkpoints. Methods are collectives unless they say otherwise.

    written_config: the run's settings, as ``config_to_dict`` gives them.
    pending: the checkpoints that are being written, in the order in which they will be completed.
    waited_s: seconds that the training loop waited for the last checkpoint.
    saved_at: when the last checkpoint was completed, in seconds since 1970; None before the first.
    """

    def __init__(
        self,
        backend,
        critic,
        settings: CheckpointConfig,
        *,
        run_path: pathlib.Path,
        written_config: Mapping[str, object],
    ) -> None:
        self.backend, self.critic, self.settings = backend, critic, settings
        self.run_path, self.written_config = run_path, written_config
        self.root = settings.root(run_path)
        self.critic_root, self.supervised_root = self.root / CRITIC, self.root / SUPERVISED
        self.is_main = backend.topology.is_main
        self.pending: list[PendingSave] = []
        self.waited_s = 0.0
        self.saved_at: float | None = None

    @property
    def is_written(self) -> bool:
        """Return whether this rank has written its files of all pending checkpoints. Not a collective."""
        return all(pending.is_written for pending in self.pending)

    def save(
        self,
        root: pathlib.Path | RemotePath,
        iteration: int,
        take_state: Callable[[], RunState],
        progress: Mapping[str, int],
    ) -> None:
        """Begin a checkpoint under ``root``: copy its tensors to the host, and start the threads that write its files.

        iteration: the checkpoint's number.
        take_state: a function that returns the run's state, without tensors.
        progress: the fields of state.json that say how far the run is.
        """
        started = time.perf_counter()
        # The state that is no tensor.
        run = take_state()
        state = {
            "feed": run.queue,
            "world_size": self.backend.topology.world_size,
            **progress,
            "model": model_state.identity(self.backend),
            "backend": model_state.numbers(self.backend),
            "prompts": run.prompts,
            "trace_rollouts": run.trace_rollouts,
            "metrics": run.metrics,
            "reference": run.reference,
            "bytes": self._appended(),
            "random": gather_json(random_state()),
            "degrees": self.backend.topology.degrees,
            "config": self.written_config,
        }
        # The critic's checkpoint comes first, so that it is whole before the policy's.
        try:
            own_files = {own_file(self.backend.topology.rank): run.queue_rows}
            if self.critic is not None and root == self.root:
                self.pending.append(self.critic.save(self.critic_root, iteration))
            self.pending.append(
                model_state.save(
                    *(self.backend, root, iteration, {STATE: json.dumps(state) + "\n"}, own_files),
                    prefixes=self._records(state["bytes"]),
                )
            )
        except CheckpointError as error:
            self._give_up()
            self._failed(error)
        self.waited_s = time.perf_counter() - started

    def _appended(self) -> dict[str, int]:
        """Return {name: size in bytes} of the run's log files on the main rank, and {} on the others.

        The files are metrics.jsonl, trace.jsonl and completions.jsonl. A missing file has the size
        0. If the run writes it later, a resume empties it.
        """
        paths = [self.run_path / name for name in APPENDED if self.is_main]
        return {path.name: path.stat().st_size if path.exists() else 0 for path in paths}

    def _records(self, sizes: Mapping[str, int]) -> dict[str, tuple[pathlib.Path, int]]:
        """Return {name: (path, bytes to copy)} of the run's log files that go into a checkpoint in an object store.

        They are copied since the run may resume on another host. For a checkpoint on a disk the
        result is {}.

        sizes: name → size in bytes, as ``_appended`` returns it.
        """
        if isinstance(self.root, pathlib.Path):
            return {}
        return {name: (self.run_path / name, size) for name, size in sizes.items() if size}

    def finish(self) -> None:
        """Wait until the pending checkpoints are complete; then remove old ones, as ``checkpoint.keep_last`` says."""
        if not self.pending:
            return
        started = time.perf_counter()
        written_s = 0.0
        try:
            while self.pending:
                pending = self.pending.pop(0)
                folder = pending.finish()
                written_s = max(written_s, pending.written_s)
        except CheckpointError as error:
            self._give_up()
            self._failed(error)
            return
        self.saved_at = time.time()
        if self.is_main:
            try:
                self._prune()
            except StoreError as error:  # the new checkpoint is whole; the next save tries again
                log.error("%s: older checkpoints stay until the next save", error)
            self.waited_s += time.perf_counter() - started
            log.info(
                "checkpoint %s (the run waited %.2f s for it, writing took %.2f s)", folder, self.waited_s, written_s
            )

    def _prune(self) -> None:
        """Remove all but the newest ``checkpoint.keep_last`` checkpoints.

        Those of the supervised start are older than all others. Only the main rank calls it.
        """
        keep_last = self.settings.keep_last
        prune(self.root, keep_last)
        if keep_last is not None:
            left = keep_last - len(whole_checkpoints(self.root))
            for steps in whole_checkpoints(self.supervised_root)[: -left or None]:
                remove(self.supervised_root / name_of(steps))
            remove_if_empty(self.supervised_root)
        for iteration in set(whole_checkpoints(self.critic_root)) - set(whole_checkpoints(self.root)):
            remove(self.critic_root / name_of(iteration))

    def _give_up(self) -> None:
        """Abandon the pending checkpoints: wait for their threads and remove their unfinished folders."""
        for pending in self.pending:
            pending.abandon()
        self.pending = []

    def _failed(self, error: CheckpointError) -> None:
        if self.settings.on_error == "fail":
            raise CheckpointError(
                f"{error}; the last good checkpoint stays, and checkpoint.on_error=continue goes on without"
            ) from error
        log.error("%s; THE RUN GOES ON (checkpoint.on_error=continue), and the last good checkpoint stays", error)
