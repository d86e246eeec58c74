"""A run's checkpoints: it saves every ``checkpoint.save_every_rollouts``, at its end and when preempted, and resumes.

A run resumes from the newest good checkpoint. One is taken between rollouts, where nothing is half done: no gradient is
accumulated, and rollouts generated ahead are waited for. Its iteration is the number of rollouts trained so far; 0 is
the state after the supervised warm-up. ``state.json`` holds the state that every rank knows and that is not a tensor;
``rollouts_<rank>.npz`` holds a rank's rollouts that are not trained yet, and its replayed ones.

A critic has checkpoints of its own, of the same iterations, under ``critic/``: one is whole before the policy's of that
iteration is, and a run never resumes from a policy's checkpoint without its critic's.

Checkpoints within the supervised start lie under ``supervised/``, and their iteration is the number of its steps. They
hold no critic, which that start does not train, and go as soon as there are ``checkpoint.keep_last`` later ones.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import signal
import time
from collections.abc import Callable, Mapping

from megatron_rl.checkpoint import model_state
from megatron_rl.checkpoint.exports import exported_steps, set_exports_aside, start_anew
from megatron_rl.checkpoint.folder import (
    STATE,
    DamagedCheckpoint,
    name_of,
    prune,
    remove,
    remove_if_empty,
    verify,
    whole_checkpoints,
)
from megatron_rl.checkpoint.pickled import check_torch_files
from megatron_rl.checkpoint.random_state import random_state, set_random_state
from megatron_rl.checkpoint.resume import CRITIC, ROOT, SUPERVISED, damaged_words, none_good_words, resumable
from megatron_rl.checkpoint.run_state import RestoredRun, ResumePoint, RunState
from megatron_rl.checkpoint.state_file import read_model_state, read_state
from megatron_rl.checkpoint.writer import PendingSave
from megatron_rl.config import Config, config_to_dict
from megatron_rl.distributed.collectives import gather_json
from megatron_rl.errors import CheckpointError, shortened

log = logging.getLogger(__name__)
# in the run's folder; cut back to the sizes that they had when the checkpoint was taken
APPENDED = ("metrics.jsonl", "trace.jsonl", "completions.jsonl")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class CheckpointManager:
    """Saves and restores a run's checkpoints. Methods are collectives unless they say otherwise."""

    def __init__(self, config: Config, backend, critic=None) -> None:
        self.config, self.backend, self.critic = config, backend, critic
        self.settings = config.checkpoint
        self.root = config.run.path / ROOT
        self.supervised_root = self.root / SUPERVISED
        self.is_main = backend.topology.is_main
        self.pending: list[PendingSave] = []  # in the order in which they are to be whole
        self.waited_s = 0.0  # seconds that the loop waited for the last checkpoint
        self.preempted = False
        self.leaves = False  # all ranks decided it together
        self.resumes = False  # the run goes on from a checkpoint
        if config.saves_checkpoints:
            for number in SIGNALS:
                signal.signal(number, self._ask_to_leave)

    def _ask_to_leave(self, number: int, _frame: object) -> None:
        """Note the signal; log by ``os.write``, since in a handler a print that interrupts another print raises."""
        if number == signal.SIGINT and self.preempted:
            return  # torchrun passes on the Ctrl-C that the terminal has sent to every rank already
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
        """Load model and critic from the newest good checkpoint; return it, ``restore`` returns the rest of the run.

        None where there is none, or under ``checkpoint.resume=never``. Raises CheckpointError where one is damaged
        under ``checkpoint.on_damage=fail``, where all are, for an unknown format and for another model.

        prepare: called before a load with the checkpoint, and with True if a load before it broke off.
        check_rows: raises an exception for a ``rollouts_<rank>.npz`` that is damaged.
        """
        folders, broke_off = self._folders(), False
        for folder in folders:  # the newest first
            has_critic = self.critic is not None and folder.parent == self.root
            try:
                state = self._verify(folder, check_rows)
                if has_critic:
                    self._verify(self.critic_root / folder.name, None)
                model_state.check_model(self.backend, folder, state["model"])
                if has_critic:
                    self.critic.check(self.critic_root / folder.name)
                point = ResumePoint(folder=folder, state=state)
                prepare(point, broke_off)
                broke_off = True
                model_state.load(self.backend, folder, state["backend"], state["model"])
                if has_critic:
                    self.critic.load(self.critic_root / folder.name)
            except DamagedCheckpoint as error:
                if self.settings.on_damage == "fail":
                    raise DamagedCheckpoint(damaged_words(error)) from error
                log.error("%s; THE CHECKPOINT BEFORE IT IS USED", error)
                continue
            self.resumes = True
            return point
        if not folders:
            return None
        raise CheckpointError(none_good_words(folders, self.root))

    def _folders(self) -> list[pathlib.Path]:
        """Return the checkpoints to choose from, the newest first; set them aside under ``checkpoint.resume=never``."""
        roots = (self.root, self.critic_root, self.supervised_root)
        first, *others = gather_json([*(whole_checkpoints(root) for root in roots), exported_steps(self.root)])
        if any(theirs != first for theirs in others):
            raise CheckpointError(
                f"ranks see different checkpoints in {self.root}; run.dir must lie on a file system that all hosts "
                "share"
            )
        iterations, of_critic, supervised, exports = first
        if not (iterations or supervised) or self.settings.resume == "never":
            if iterations or supervised or exports:
                start_anew(self.root, self.config.model.hf_path, is_main=self.is_main)
            return []
        return resumable(self.root, iterations, None if self.critic is None else of_critic, supervised)

    @property
    def critic_root(self) -> pathlib.Path:
        return self.root / CRITIC

    def _verify(self, folder: pathlib.Path, check_rows: Callable[[bytes], None] | None) -> dict:
        """Verify a checkpoint and return its state.json; ``check_rows`` is None for a critic's.

        Each rank digests its share of the files, and the main rank looks into torch's.
        """
        topology, error, state = self.backend.topology, None, {}
        try:
            verify(folder, share=(topology.rank, topology.world_size))
            state = read_model_state(folder) if check_rows is None else read_state(folder)
            if self.is_main:
                check_torch_files(folder)
            if check_rows is not None:
                self._check_rows(folder, state, check_rows)
        except CheckpointError as raised:
            error = raised
        damaged = isinstance(error, DamagedCheckpoint)
        errors = [x for x in gather_json([str(error), damaged] if error else None) if x]
        if errors:
            message, damaged = errors[0]
            raise (DamagedCheckpoint if damaged else CheckpointError)(message) from error
        return state

    def _own_files(self, folder: pathlib.Path, state: Mapping) -> list[pathlib.Path]:
        """Return the files of the saved ranks whose rollouts this rank takes over."""
        topology = self.backend.topology
        return [folder / own_file(rank) for rank in range(topology.rank, state["world_size"], topology.world_size)]

    def _check_rows(self, folder: pathlib.Path, state: Mapping, check_rows: Callable[[bytes], None]) -> None:
        for path in self._own_files(folder, state):
            try:
                check_rows(path.read_bytes())
            except Exception as error:
                raise DamagedCheckpoint(
                    f"{path} cannot be read: {type(error).__name__}: {shortened(str(error), 500)}"
                ) from error

    def cut_back(self, found: ResumePoint | None) -> None:
        """Cut the run's files to their sizes in the checkpoint, on the main rank, and set later exports aside."""
        if found is None or not self.is_main:
            return
        set_exports_aside(self.root, found.state["backend"]["step_index"])
        for name in APPENDED:
            path, size = self.config.run.path / name, found.state["bytes"].get(name, 0)  # a file of a later release: 0
            current = path.stat().st_size if path.exists() else 0
            if current < size:
                log.error(
                    "%s has %d bytes and had %d when %s was taken: the record of the steps between is lost",
                    path,
                    current,
                    size,
                    found.folder,
                )
            elif current > size:
                with path.open("r+b") as file:
                    file.truncate(size)

    def restore(self, found: ResumePoint) -> RestoredRun:
        """Restore the random states of a checkpoint that is loaded, and return the rest of the run."""
        state = found.state
        self._restore_random(state)
        for key, (before, now) in changed_settings(state["config"], config_to_dict(self.config)).items():
            log.warning("resumed with %s=%s; it was %s when the checkpoint was taken", key, now, before)
        log.info(
            "resumed from %s: %d rollouts trained, %d optimizer steps",
            found.folder,
            found.rollouts,
            self.backend.step_index,
        )
        return RestoredRun(
            rollouts=found.rollouts if found.supervised_steps is None else None,
            supervised_steps=found.supervised_steps,
            queue=state["feed"],
            queue_rows=[path.read_bytes() for path in self._own_files(found.folder, state)],
            prompts=state["prompts"],
            reference=state.get("reference", {"coefficient": None}),  # checkpoints from before it: β was fixed
            trace_rollouts=state["trace_rollouts"],
        )

    def _restore_random(self, state: Mapping) -> None:
        topology = self.backend.topology
        if len(state["random"]) != topology.world_size:
            log.warning(
                "the checkpoint's random states are of %d ranks and there are %d: left as they are",
                len(state["random"]),
                topology.world_size,
            )
            return
        set_random_state(state["random"][topology.rank])

    # ---- in the run ------------------------------------------------------------------------------------------------

    def save_if_due(self, rollouts: int, take_state: Callable[[], RunState], *, last: bool = False) -> bool:
        """Save between rollouts where it is due; return whether the run is to leave, by a SIGTERM or SIGUSR1 to a rank.

        It is for runs that save checkpoints (``Config.saves_checkpoints``).

        rollouts: the number trained so far.
        take_state: gives the run's state if it is saved; a collective.
        """
        every = self.settings.save_every_rollouts
        due = last or rollouts == 0 or (every > 0 and rollouts % every == 0)
        return self._save_and_vote(self.root, rollouts, take_state, due=due, last=last, progress={"rollouts": rollouts})

    def save_supervised_if_due(self, steps: int, take_state: Callable[[], RunState]) -> bool:
        """Save between steps of the supervised start as ``save_if_due`` does between rollouts.

        steps: the supervised steps taken so far.
        """
        every = self.config.sft.save_every_steps
        due, progress = every > 0 and steps % every == 0, {"rollouts": 0, "supervised_steps": steps}
        return self._save_and_vote(self.supervised_root, steps, take_state, due=due, last=False, progress=progress)

    def _save_and_vote(
        self,
        root: pathlib.Path,
        iteration: int,
        take_state: Callable[[], RunState],
        *,
        due: bool,
        last: bool,
        progress: Mapping[str, int],
    ) -> bool:
        """Save if one is due or any rank was told to leave; return whether the run is to leave.

        progress: the state's fields that say how far the run is.
        """
        ended = all(pending.is_written for pending in self.pending)
        votes = gather_json([ended, self.preempted or (self.critic is not None and self.critic.is_told_to_leave)])
        leave = any(preempted for _, preempted in votes)
        if self.pending and all(ended for ended, _ in votes):
            self._finish()
        if leave or due:
            self._finish()
            self._save(root, iteration, take_state, progress)
            if leave or last or not self.settings.asynchronous:
                self._finish()
        self.leaves = leave and not last
        return self.leaves

    def close(self) -> None:
        """Finish the checkpoints that are still being written."""
        self._finish()

    def _save(
        self, root: pathlib.Path, iteration: int, take_state: Callable[[], RunState], progress: Mapping[str, int]
    ) -> None:
        started = time.perf_counter()
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
            "config": config_to_dict(self.config),
        }
        try:
            own_files = {own_file(self.backend.topology.rank): run.queue_rows}
            if self.critic is not None and root == self.root:
                self.pending.append(self.critic.save(self.critic_root, iteration))
            self.pending.append(
                model_state.save(self.backend, root, iteration, {STATE: json.dumps(state) + "\n"}, own_files)
            )
        except CheckpointError as error:
            self._give_up()
            self._failed(error)
        self.waited_s = time.perf_counter() - started

    def _appended(self) -> dict[str, int]:
        """Return the bytes of the main rank's files; a missing one has 0, so later lines in it are cut back too."""
        paths = [self.config.run.path / name for name in APPENDED if self.is_main]
        return {path.name: path.stat().st_size if path.exists() else 0 for path in paths}

    def _finish(self) -> None:
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
        if self.is_main:
            self._prune()
            for iteration in set(whole_checkpoints(self.critic_root)) - set(whole_checkpoints(self.root)):
                remove(self.critic_root / name_of(iteration))
            self.waited_s += time.perf_counter() - started
            log.info(
                "checkpoint %s (the run waited %.2f s for it, writing took %.2f s)", folder, self.waited_s, written_s
            )

    def _prune(self) -> None:
        """Remove all but the newest ``checkpoint.keep_last``, those of the supervised start first. On the main rank."""
        keep_last = self.settings.keep_last
        prune(self.root, keep_last)
        if keep_last is not None:
            left = keep_last - len(whole_checkpoints(self.root))
            for steps in whole_checkpoints(self.supervised_root)[: -left or None]:
                remove(self.supervised_root / name_of(steps))
            remove_if_empty(self.supervised_root)

    def _give_up(self) -> None:
        """Abandon the parts still being written, whose checkpoint will never be whole."""
        for pending in self.pending:
            pending.abandon()
        self.pending = []

    def _failed(self, error: CheckpointError) -> None:
        if self.settings.on_error == "fail":
            raise CheckpointError(
                f"{error}; the last good checkpoint stays, and checkpoint.on_error=continue goes on without"
            ) from error
        log.error("%s; THE RUN GOES ON (checkpoint.on_error=continue), and the last good checkpoint stays", error)


def own_file(rank: int) -> str:
    return f"rollouts_{rank}.npz"


def changed_settings(before: Mapping, now: Mapping, prefix: str = "") -> dict[str, tuple]:
    """Return the dotted keys whose values differ, with both values."""
    changes: dict[str, tuple] = {}
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes |= changed_settings(old, new, f"{prefix}{key}.")
        elif old != new:
            changes[prefix + key] = (old, new)
    return changes
