"""The manager of a run's checkpoints: it decides when the run saves, when it ends early, and where it resumes.

The run saves every ``checkpoint.save_every_rollouts`` rollouts, at its end, and if it is preempted.
It resumes from the newest good checkpoint. A checkpoint is taken between rollouts, when nothing is
half done: no gradient is accumulated, and rollouts generated ahead are complete. Its iteration is
the number of rollouts trained so far; 0 is the state after the supervised start. ``state.json``
holds the state that every rank knows and that is not a tensor. ``rollouts_<rank>.npz`` holds the
rollouts that a rank has not trained yet, and those that it keeps to train again (replay).

A critic has its own checkpoints, of the same iterations, under ``critic/``. The critic's checkpoint
is completed before the policy's of the same iteration. A run never resumes from a policy's
checkpoint without the critic's of the same iteration.

The supervised start is the fine-tuning before the first rollout. Its checkpoints lie under
``supervised/``, and their iteration is the number of supervised steps. They hold no critic, since
the supervised start does not train it. They are removed as soon as there are
``checkpoint.keep_last`` later checkpoints.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import shutil
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megatron_rl.checkpoint.exports import exported_steps, exports_root_of, set_exports_aside, start_anew
from megatron_rl.checkpoint.folder import whole_checkpoints
from megatron_rl.checkpoint.resume import CRITIC, SUPERVISED, resumable
from megatron_rl.checkpoint.run_state import APPENDED, RestoredRun, ResumePoint, RunState
from megatron_rl.config import CheckpointConfig
from megatron_rl.distributed.collectives import gather_json
from megatron_rl.errors import CheckpointError, StoreError

if TYPE_CHECKING:  # only a run that saves or resumes needs them
    from megatron_rl.checkpoint.loader import CheckpointLoader
    from megatron_rl.checkpoint.saver import CheckpointSaver
    from megatron_rl.storage.remote import RemotePath

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class CheckpointManager:
    """Decides when a run saves, ends early and resumes. Methods are collectives unless they say otherwise.

    leaves: whether the ranks have agreed to end the run early, because one of them got a signal.
    resumes: whether the run resumed from a checkpoint.
    """

    def __init__(
        self,
        backend,
        critic,
        settings: CheckpointConfig,
        *,
        run_path: pathlib.Path,
        hf_path: str,
        supervised_every: int,
        saves: bool,
        written_config: Mapping[str, object],
    ) -> None:
        """Keep the arguments; if the run saves checkpoints, install handlers for SIGTERM, SIGUSR1 and SIGINT.

        critic: the critic, which is saved and loaded too; None without one.
        hf_path: ``model.hf_path``.
        supervised_every: ``sft.save_every_steps``.
        saves: whether the run saves checkpoints.
        written_config: the run's settings, as ``config_to_dict`` gives them.
        """
        self.backend, self.critic, self.settings = backend, critic, settings
        self.run_path, self.hf_path, self.supervised_every = run_path, hf_path, supervised_every
        self.written_config = written_config
        self.root = settings.root(run_path)
        self.exports_root = exports_root_of(self.root, run_path)
        self.supervised_root = self.root / SUPERVISED
        self.is_main = backend.topology.is_main
        self.preempted = self.leaves = self.resumes = False
        self._loader: CheckpointLoader | None = None
        self._saver: CheckpointSaver | None = None
        if saves:
            from megatron_rl.checkpoint.saver import CheckpointSaver

            self._saver = CheckpointSaver(backend, critic, settings, run_path=run_path, written_config=written_config)
            for number in SIGNALS:
                signal.signal(number, self._ask_to_leave)

    def _ask_to_leave(self, number: int, _frame: object) -> None:
        """Note that a signal asked this process to end, and say so on stderr by ``os.write``.

        A print in a signal handler raises if it interrupts another print.
        """
        if number == signal.SIGINT and self.preempted:
            return  # torchrun repeats the terminal's Ctrl-C, which every rank has had already
        self.preempted = True
        message = (
            f"rank {self.backend.topology.rank}: {signal.Signals(number).name}: the step in progress is finished, a "
            "checkpoint saved, "
        )
        with contextlib.suppress(OSError):
            os.write(2, f"{message}and the run leaves\n".encode())

    # ---- on start --------------------------------------------------------------------------------------------------

    def load_newest(
        self, prepare: Callable[[ResumePoint, bool], None], check_rows: Callable[[bytes], None]
    ) -> ResumePoint | None:
        """Load model and critic from the newest good checkpoint and return the checkpoint; None if there is none.

        Under ``checkpoint.resume=never`` nothing is loaded, and None is returned. Call ``restore``
        next: it restores the run's other state. ``CheckpointLoader.load_newest`` documents the
        errors and the arguments.
        """
        folders = self._folders()
        if not folders:
            return None
        from megatron_rl.checkpoint.loader import CheckpointLoader

        self._loader = CheckpointLoader(self.backend, self.critic, self.root, on_damage=self.settings.on_damage)
        point = self._loader.load_newest(folders, prepare, check_rows)
        self.resumes = True
        return point

    def _folders(self) -> list[pathlib.Path | RemotePath]:
        """Return the folders of the checkpoints that the run may resume from, newest first.

        The result is [] if there is no checkpoint, or under ``checkpoint.resume=never``. In both cases
        the folders of checkpoints and exports that an earlier run left are renamed (``start_anew``).
        """
        roots = (self.root, self.root / CRITIC, self.supervised_root)
        on_disk = isinstance(self.root, pathlib.Path)
        seen: list | str
        try:
            seen = [*(whole_checkpoints(root) for root in roots), exported_steps(self.exports_root)]
        except StoreError as error:
            seen = str(error)
        first, *others = everyone = gather_json(seen)
        for rank, words in enumerate(everyone):
            if isinstance(words, str):
                raise CheckpointError(f"rank {rank}: the checkpoints cannot be listed: {words}")
        if any(theirs[: 4 if on_disk else 3] != first[: 4 if on_disk else 3] for theirs in others):
            raise CheckpointError(
                f"ranks see different checkpoints in {self.root}; run.dir must lie on a file system that all hosts "
                "share"
            )
        iterations, of_critic, supervised, exports = first
        if not (iterations or supervised) or self.settings.resume == "never":
            if iterations or supervised or exports:
                whole = [] if on_disk else [*iterations, *supervised]
                start_anew((self.root, self.exports_root), self.hf_path, remote=whole, is_main=self.is_main)
            return []
        return resumable(self.root, iterations, None if self.critic is None else of_critic, supervised)

    def cut_back(self, point: ResumePoint | None) -> None:
        """Truncate the run's log files to their sizes in the checkpoint, and rename the exports of later steps.

        The files are metrics.jsonl, trace.jsonl and completions.jsonl. Ranks other than the main
        rank do nothing.

        point: the checkpoint from which the run resumes; None does nothing.
        """
        if point is None or not self.is_main:
            return
        set_exports_aside(self.exports_root, point.state["backend"]["step_index"])
        for name in APPENDED:
            # 0 for a file that only a later release writes
            path, size = self.run_path / name, point.state["bytes"].get(name, 0)
            current = path.stat().st_size if path.exists() else 0
            if current < size and self._fetched(point.folder, name, path):
                log.warning("%s had %d bytes here: its first %d come from %s", path, current, size, point.folder)
            elif current < size:
                log.error(
                    "%s has %d bytes and had %d when %s was taken: the record of the steps between is lost",
                    path,
                    current,
                    size,
                    point.folder,
                )
            elif current > size:
                with path.open("r+b") as file:
                    file.truncate(size)

    def _fetched(self, folder: pathlib.Path | RemotePath, name: str, path: pathlib.Path) -> bool:
        """Replace a file of the run by its copy in an object store's checkpoint; return False if there is no copy.

        folder: the checkpoint's folder.
        name, path: the file's name, and its path in the run's folder.
        """
        if isinstance(folder, pathlib.Path) or not (folder / name).is_file():
            return False
        unfinished = path.with_name(f"{name}.tmp")
        with (folder / name).open("rb") as source, unfinished.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 22)
        os.replace(unfinished, path)
        return True

    def restore(self, point: ResumePoint) -> RestoredRun:
        """Set the random generators to the loaded checkpoint's states; return the run's other saved state."""
        assert self._loader is not None, f"{point.folder} is not loaded"
        return self._loader.restore(point, self.written_config)

    # ---- in the run ------------------------------------------------------------------------------------------------

    def save_if_due(self, rollouts: int, take_state: Callable[[], RunState], *, last: bool = False) -> bool:
        """Save a checkpoint between rollouts if one is due. Return whether the run must end early, after a signal.

        Only for runs that save checkpoints (``Config.saves_checkpoints``). A signal to any rank
        makes a checkpoint due.

        rollouts: the number of rollouts trained so far.
        take_state: a function that returns the run's state. It is a collective, called only if a
            checkpoint is saved.
        last: whether the run ends after this rollout anyway. It makes a checkpoint due.
        """
        every = self.settings.save_every_rollouts
        due = last or rollouts == 0 or (every > 0 and rollouts % every == 0)
        return self._save_and_vote(self.root, rollouts, take_state, due=due, last=last, progress={"rollouts": rollouts})

    def save_supervised_if_due(self, steps: int, take_state: Callable[[], RunState]) -> bool:
        """Save a checkpoint between steps of the supervised start, as ``save_if_due`` does between rollouts.

        steps: the number of supervised steps taken so far.
        take_state: as for ``save_if_due``.
        """
        every = self.supervised_every
        due, progress = every > 0 and steps % every == 0, {"rollouts": 0, "supervised_steps": steps}
        return self._save_and_vote(self.supervised_root, steps, take_state, due=due, last=False, progress=progress)

    def _save_and_vote(
        self,
        root: pathlib.Path | RemotePath,
        iteration: int,
        take_state: Callable[[], RunState],
        *,
        due: bool,
        last: bool,
        progress: Mapping[str, int],
    ) -> bool:
        """Save a checkpoint if one is due or a signal asked a rank to end. Return whether the run must end early.

        root, iteration: the folder of checkpoints, and the new checkpoint's number in it.
        take_state, last: as for ``save_if_due``.
        progress: the fields of state.json that say how far the run is.
        """
        saver = self._saver
        assert saver is not None, "this run saves no checkpoints"
        ended = saver.is_written
        votes = gather_json([ended, self.preempted or (self.critic is not None and self.critic.is_told_to_leave)])
        leave = any(preempted for _, preempted in votes)
        if saver.pending and all(ended for ended, _ in votes):
            saver.finish()
        if leave or due:
            saver.finish()
            saver.save(root, iteration, take_state, progress)
            if leave or last or not self.settings.asynchronous:
                saver.finish()
        self.leaves = leave and not last
        return self.leaves

    @property
    def saved_at(self) -> float | None:
        """Return when this process's last checkpoint was completed, in seconds since 1970; None before the first."""
        return None if self._saver is None else self._saver.saved_at

    def close(self) -> None:
        """Wait until the checkpoints that are being written are complete."""
        if self._saver is not None:
            self._saver.finish()
