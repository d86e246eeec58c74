"""One rank of a run that notes what it is doing, where a SIGKILL leaves the note.

``main`` takes NOTES ARGUMENT… A process of its own with RANK, WORLD_SIZE and MASTER_* in its environment, as under
torchrun. NOTES is a folder; in it ``phase.<rank>`` holds the main thread's phase and whether a checkpoint is being
written, in one mapped page.

Phases that take no time on a run of toy size are widened by sleeps within them (SLEEPS): the rollout, the reward, the
log-prob pass, the update, the ghost step, the thread that writes a checkpoint (before, between and after its files) and
the checkpoint's end (before every file that is synced, before the rename and after it). Nothing else is changed.
"""

import contextlib
import json
import mmap
import os
import pathlib
import threading
import time

from megatron_rl import train
from tests.reward_functions import parity

SECONDS = dict(rollout=0.10, reward=0.20, logprob=0.20, update=0.025, thread=0.15, save=0.06)
SLEEPS = SECONDS | {"ghost step": 0.035}
NOTE_BYTES = 128
STAGES = ("rollout", "reward", "logprob", "update", "ghost step", "save")  # of the table; every other stage is "other"


def even_is_silent(prompts, completions, completion_ids, answer, **columns) -> list[float]:
    """Reward as ``parity`` does, and prompts of an even answer with 1: their groups have no signal."""
    nap("reward")
    mixed = parity(prompts, completions, completion_ids)
    return [1.0 if int(a) % 2 == 0 else value for a, value in zip(answer, mixed, strict=True)]


def nap(place: str) -> None:
    time.sleep(SLEEPS[place])


class Note:
    """A page of a file that is mapped: its contents are kept after SIGKILL."""

    def __init__(self, path: pathlib.Path) -> None:
        path.write_bytes(b" " * NOTE_BYTES)
        with path.open("r+b") as file:
            self.page = mmap.mmap(file.fileno(), NOTE_BYTES)
        self.phase, self.writing = "other", False
        self.lock = threading.Lock()  # the thread that writes a checkpoint notes that too

    def write(self, *, phase: str | None = None, writing: bool | None = None) -> None:
        with self.lock:
            self.phase = self.phase if phase is None else phase
            self.writing = self.writing if writing is None else writing
            self.page[:] = json.dumps([self.phase, self.writing]).encode().ljust(NOTE_BYTES)

    @contextlib.contextmanager
    def within(self, phase: str):
        outer = self.phase
        self.write(phase=phase)
        yield
        self.write(phase=outer)


def read_note(notes: pathlib.Path, rank: int) -> tuple[str, bool] | None:
    """Return (phase, a checkpoint is being written) of a rank; None where it has not come to its run."""
    path = notes / f"phase.{rank}"
    text = path.read_bytes().strip() if path.exists() else b""
    return tuple(json.loads(text)) if text else None


def note_stages(note: Note) -> None:
    """Note the loop's own stages, as it tells them to its watch; rollout and ghost steps are told apart here."""
    from megatron_rl.backend.optimizer import Optimizer
    from megatron_rl.distributed.watchdog import Watchdog
    from megatron_rl.types import StepKind

    enter, step = Watchdog._enter, Optimizer.step

    def noted_enter(self, name):
        note.write(phase=name if name in STAGES else "other")
        if name in ("rollout", "logprob", "update"):
            nap(name)
        return enter(self, name)

    def noted_step(self, kind, *adam):
        if kind is not StepKind.GHOST:
            return step(self, kind, *adam)
        with note.within("ghost step"):
            nap("ghost step")
            return step(self, kind, *adam)

    Watchdog._enter, Optimizer.step = noted_enter, noted_step


def note_saves(note: Note) -> None:
    """Note the main thread's share of a save (planning, ending, pruning), and the thread that writes."""
    from megatron_rl.checkpoint import folder, saver, writer

    checkpoints, pending = saver.CheckpointSaver, writer.PendingSave
    save, finish, write, sync = checkpoints.save, checkpoints.finish, pending._write, folder._sync
    write_bucket = writer.FileSystemWriterAsync.write_preloaded_data

    def noted(whole):
        def call(self, *args, **kwargs):
            if whole is finish and self.pending is None:
                return None
            with note.within("save"):
                return whole(self, *args, **kwargs)

        return call

    def noted_write(self):
        note.write(writing=True)
        nap("thread")
        write(self)
        note.write(writing=False)

    def slow_bucket(*args, **kwargs):
        write_bucket(*args, **kwargs)
        nap("thread")

    def slow_sync(path):
        nap("save")
        sync(path)

    checkpoints.save, checkpoints.finish, pending._write = noted(save), noted(finish), noted_write
    writer.FileSystemWriterAsync.write_preloaded_data, folder._sync = staticmethod(slow_bucket), slow_sync


def main(arguments: list[str]) -> int:
    notes, rank = pathlib.Path(arguments[0]), int(os.environ["RANK"])
    note = Note(notes / f"phase.{rank}")
    note_stages(note)
    note_saves(note)
    note.write(phase="other")
    return train.main(arguments[1:])
