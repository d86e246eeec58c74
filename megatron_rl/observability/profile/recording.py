"""The recording of one process's work between ``start`` and ``stop``, by torch.profiler or for Nsight Systems."""

from __future__ import annotations

import gzip
import json
import logging
import os
import pathlib
import threading

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_rl.config import ProfileConfig
from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.distributed.platform import HOST
from megatron_rl.observability.profile.ranges import Mark, mark_for
from megatron_rl.observability.profile.summary import summarize
from megatron_rl.observability.profile.table import table_of

log = logging.getLogger(__name__)

MOST_ALLOCATIONS = 50_000  # a memory snapshot keeps so many newest entries; each may take kilobytes
MOST_READ_BYTES = 2**29  # the largest trace that is summed up; this takes six times as much memory
WHOLE = "profiled"  # the range over which the summary is made


class Recording:
    """Records this process's work from ``start`` to ``stop``, any number of times. No method is a collective.

    folder: the folder of the files, whose names begin with ``rank<rank>.<first step>``.
    who: a description of this rank, for the log.
    """

    def __init__(self, settings: ProfileConfig, folder: pathlib.Path, rank: int, who: str) -> None:
        self._settings, self._folder, self._rank, self._who = settings, folder, rank, who
        self._profiler: profile | None = None

    @property
    def mark(self) -> Mark:
        """Return the function that puts a named range around a block, for the tools that this recording uses."""
        return mark_for(traces=self._settings.tool == "torch", nvtx=HOST.is_cuda)

    def start(self) -> None:
        """Begin to record this process's work."""
        settings = self._settings
        if settings.memory and HOST.is_cuda:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS, stacks="python")
        if settings.tool == "torch":
            profiler = _profiler(settings)
            profiler.start()
            self._profiler = profiler
        else:
            torch.cuda.profiler.start()

    def stop(self, first_step: int, last_step: int) -> None:
        """End the recording, write its files, and log its summary.

        first_step, last_step: the optimizer steps that were recorded. ``last_step`` below
            ``first_step`` means that no step was recorded, only work before ``first_step``.

        If the files cannot be written, a warning is logged, and the run goes on.
        """
        stem = self._folder / f"rank{self._rank}.{first_step}"
        try:
            profiler = self._end()
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._settings.memory and HOST.is_cuda:
                snapshot = stem.with_name(f"{stem.name}.memory.pickle")
                torch.cuda.memory._dump_snapshot(str(snapshot))
                log.info("allocations of %s: %s (https://pytorch.org/memory_viz reads it)", self._who, snapshot)
            if profiler is not None:
                self._write(profiler, stem, first_step, last_step)
        except (OSError, RuntimeError, ValueError) as error:  # of the disk, of CUDA, of a trace that broke off
            log.warning("the profile %s.* cannot be written, and the run goes on without it: %s", stem, error)
        finally:
            if self._settings.memory and HOST.is_cuda:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _end(self) -> profile | None:
        """Stop recording; return torch's profiler, None if Nsight Systems recorded."""
        profiler, self._profiler = self._profiler, None
        HOST.synchronize()
        if self._settings.tool == "nsys":
            torch.cuda.profiler.stop()
        if profiler is not None:
            profiler.stop()
        return profiler

    def _write(self, profiler: profile, stem: pathlib.Path, first_step: int, last_step: int) -> None:
        """Write the trace and its summary to files that begin with ``stem``, and log the summary as a table."""
        trace = stem.with_name(f"{stem.name}.pt.trace.json.gz")
        plain = stem.with_name(f"{stem.name}.unfinished.json")
        try:
            profiler.export_chrome_trace(str(plain))
            if not plain.is_file() or plain.stat().st_size == 0:
                raise OSError(f"torch.profiler wrote nothing to {plain}")
            summary = None
            if plain.stat().st_size <= MOST_READ_BYTES:
                content = json.loads(plain.read_bytes())
                name_threads(content["traceEvents"], self._who)
                summary = summarize(content["traceEvents"], WHOLE, threading.get_native_id())
                plain.write_text(json.dumps(content), encoding="utf-8")
            _compress(plain, trace)
        finally:
            for left in (plain, plain.with_name(f"{plain.name}.tmp")):  # the second is Kineto's, left if a disk is full
                left.unlink(missing_ok=True)
        steps = f"steps {first_step} to {last_step}" if last_step >= first_step else f"before step {first_step}"
        log.info("profile of %s, %s: %s", self._who, steps, trace)
        if summary is None:
            log.warning("%s is too large to be summed up; record fewer steps", trace)
            return
        replace_text(stem.with_name(f"{stem.name}.summary.json"), summary.to_json(self._rank, first_step, last_step))
        log.info("%s", table_of(summary))


def _profiler(settings: ProfileConfig) -> profile:
    """Return torch's profiler, which records all threads.

    If it records memory peaks on a CPU, it records the main thread alone.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if HOST.is_cuda else [])]
    peaks = settings.memory and not HOST.is_cuda
    # a profiler of all threads reports no allocation (torch 2.13)
    experimental = torch._C._profiler._ExperimentalConfig(profile_all_threads=not peaks)
    return profile(
        activities=activities, profile_memory=peaks, with_stack=settings.stacks, experimental_config=experimental
    )


def name_threads(events: list[dict], who: str) -> None:
    """Write ``who`` as the process's name, and the Python threads' names, into a trace's events, in place."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    names[threading.get_native_id()] = "main"
    for event in events:
        if event["ph"] != "M" or event["pid"] != os.getpid():
            continue
        if event["name"] == "process_name":
            event["args"]["name"] = who
        if event["name"] == "thread_name" and event["tid"] in names:
            event["args"]["name"] = names[event["tid"]]


def _compress(plain: pathlib.Path, path: pathlib.Path) -> None:
    """Write a gzipped copy of the file ``plain`` to ``path``, whole or not at all."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with plain.open("rb") as source, gzip.open(unfinished, "wb", compresslevel=3) as target:
            while part := source.read(2**20):
                target.write(part)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
