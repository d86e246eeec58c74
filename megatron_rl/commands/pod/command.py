"""The process of one pod: it meets the other pods, starts torchrun, asks the ranks to leave, and sets the exit code.

    megatron-rl pod --config run.yaml section.key=value ...     # the arguments go to megatron_rl.train

As the container's first process it gets Kubernetes' SIGTERM, and orphaned processes become its
children. Once told to leave, it sends SIGUSR1 to the ranks every second. Each rank finishes its
step, saves a checkpoint and leaves. torchrun gets no signal, since it would end the ranks after 30
seconds.

| exit code | when |
|---|---|
| 0 | the run has ended |
| the variable EXIT_AGAIN, by default 75 | the ranks were asked to leave, or failed after they saved a checkpoint |
| 2 | a setting cannot work: the manifest lets the whole job fail |
| 1 and others | the ranks failed and saved no checkpoint: this counts towards the job's limit of failures |
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from megatron_rl.checkpoint.folder import whole_checkpoints
from megatron_rl.cli import EXIT_CONFIG, EXIT_FAILED, EXIT_PREEMPTED, TRAINER, read_arguments
from megatron_rl.commands.launch import become
from megatron_rl.commands.pod import request
from megatron_rl.commands.pod.meeting import Left, meet
from megatron_rl.commands.pod.place import Place, place_of
from megatron_rl.config import Config
from megatron_rl.distributed.child_process import adopt_orphans, environment
from megatron_rl.errors import ConfigError, RunError

MODULE = "megatron_rl.train"
SHUTDOWN_S = 600  # after one rank has left, torchrun gives a pod's other ranks so many seconds
LOOK_S, ASK_S = 0.2, 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this pod's ranks of the job; return the pod's exit code.

    arguments: the trainer's arguments; None for ``sys.argv``. With ``--dry-run`` no rank starts:
        a forecast of the whole job runs in place of this process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        place = place_of(os.environ)
        words = trainer_words(place, given)
        config, options = read_arguments(words, TRAINER)  # a mistake in them ends the job before a rank starts
    except (ConfigError, FileNotFoundError) as error:
        print(f"megatron_rl: {error}", file=sys.stderr)
        return EXIT_CONFIG
    if options.dry_run:
        become(dry_run_line(place, words))
    return Pod(place, config).run(words)


def trainer_words(place: Place, given: Sequence[str]) -> list[str]:
    """Return the trainer's arguments: the run folder and checkpoint interval that ``place`` holds, then ``given``.

    given: the arguments of `megatron-rl pod`. They come last, and so override the others.
    """
    folder = ["--run-dir", place.run_dir] if place.run_dir else []
    return [*folder, f"checkpoint.save_every_rollouts={place.save_every}", *given]


def dry_run_line(place: Place, words: Sequence[str]) -> list[str]:
    """Return the command line that forecasts the whole job without starting it.

    words: the trainer's arguments.
    """
    job = ["--nodes", str(place.num_nodes), "--gpus-per-node", str(place.processes)]
    return [sys.executable, "-m", MODULE, *job, *words]


def torchrun_line(place: Place, head: str, words: Sequence[str]) -> list[str]:
    """Return the command line of torchrun on this pod.

    head: pod 0's address, which all pods reach; unused if the job has one pod.
    words: the trainer's arguments.
    """
    start = [sys.executable, "-m", "megatron_rl.commands.ranks", "--nproc-per-node", str(place.processes)]
    if place.num_nodes == 1:
        where = ["--standalone", "--local-addr", "127.0.0.1"]
    else:
        where = [*("--nnodes", str(place.num_nodes), "--node-rank", str(place.node)),
                 *("--master-addr", head, "--master-port", str(place.port))]  # fmt: skip
        where += ["--local-addr", place.address] if place.address else []
    return [*start, *where, "-m", MODULE, *words]


class Pod:
    """Runs this pod's ranks once: waits for the other pods, starts torchrun, and returns the pod's exit code.

    place: this pod's position in the job.
    config: the run's settings, from the command line and its configuration file.
    """

    def __init__(self, place: Place, config: Config) -> None:
        self.place = place
        self._root = config.run.path / "checkpoints"
        # A run that saves no checkpoints does not catch SIGUSR1: its ranks leave by SIGTERM with nothing saved.
        saves = config.checkpoint.save_every_rollouts > 0
        self._number = signal.SIGUSR1 if saves else signal.SIGTERM
        self._before = self._newest()

    def run(self, words: Sequence[str]) -> int:
        """Wait for the other pods, run the ranks to their end, and return the pod's exit code.

        words: the trainer's arguments.
        """
        adopt_orphans()
        place = self.place
        self._say(f"pod {place.node} of {place.num_nodes}, {place.processes} ranks; {self._checkpoint(self._before)}")
        try:
            head = meet(place, lambda: request.asked() is not None, self._say)
        except Left:
            self._say(f"told to leave ({request.asked().name}) before the ranks had started: {place.exit_again}")
            return place.exit_again
        except (RunError, OSError) as error:  # OSError: of the port at which the pods meet
            print(f"megatron_rl: {error}", file=sys.stderr)
            return EXIT_FAILED
        code = self._end_of(self._start(torchrun_line(place, head, words)))
        return self._exit_code(code)

    def _start(self, line: Sequence[str]) -> int:
        """Start torchrun by the command line ``line``; return its process id.

        SIGUSR1 is ignored in torchrun, and in its ranks until they install a handler.
        """
        own = {name: value for name, value in environment(os.environ).items() if not name.startswith("PET_")}
        own.setdefault("OMP_NUM_THREADS", "1")
        own.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        try:
            return subprocess.Popen(line, env=own).pid
        finally:
            signal.signal(signal.SIGUSR1, request.note)

    def _end_of(self, torchrun: int) -> int:
        """Wait for the process ``torchrun`` to end; return its exit code.

        If this pod is told to leave meanwhile, its ranks are asked to leave by a signal, every
        second.
        """
        asked_at = 0.0
        while True:
            while (ended := _reaped()) is not None:
                if ended[0] == torchrun:
                    return ended[1]
            if request.asked() is not None and time.monotonic() - asked_at >= ASK_S:
                asked_at = time.monotonic()
                for rank in _children(torchrun):
                    _tell(rank, self._number)
            time.sleep(LOOK_S)

    def _exit_code(self, code: int) -> int:
        """Return the pod's exit code for torchrun's exit code; print the reason for any code but 0 and 2."""
        if code in (0, EXIT_CONFIG):
            return code
        again, newest = self.place.exit_again, self._newest()
        asked = request.asked()
        if code == EXIT_PREEMPTED or asked is not None:
            told = f"told to leave ({asked.name})" if asked is not None else "another pod was told to leave"
            self._say(f"{told}, and the ranks have left with {code}; {self._checkpoint(newest)}: {again}")
            return again
        if newest > self._before:
            self._say(f"the ranks failed with {code}, past where they began: {self._checkpoint(newest)}: {again}")
            return again
        self._say(f"the ranks failed with {code}, and saved nothing new: {self._checkpoint(newest)}")
        return code

    def _newest(self) -> tuple[int, int]:
        """Return the iterations of the newest checkpoints, as (of RL, of supervised steps); -1 for none.

        A checkpoint that was not written to its end does not count.
        """
        return (_newest(self._root), _newest(self._root / "supervised"))

    def _checkpoint(self, newest: tuple[int, int]) -> str:
        rl, supervised = newest
        if rl < 0 and supervised >= 0:
            return f"checkpoint: supervised step {supervised}"
        return f"checkpoint: {rl if rl >= 0 else 'none'}"

    def _say(self, text: str) -> None:
        print(f"megatron-rl pod: {text}", file=sys.stderr, flush=True)


def _newest(root: pathlib.Path) -> int:
    return max(whole_checkpoints(root), default=-1)


def _reaped() -> tuple[int, int] | None:
    """Return (process id, exit code) of a child process that has ended; None if none has.

    The exit code is 128 + N for a process that signal N ended.
    """
    process, status = os.waitpid(-1, os.WNOHANG)
    if process == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    return process, code if code >= 0 else 128 - code


def _children(process: int) -> list[int]:
    """Return the ids of the child processes of ``process``. Linux only."""
    tasks = pathlib.Path(f"/proc/{process}/task").glob("*/children")
    found: list[int] = []
    for path in tasks:
        try:
            found += map(int, path.read_text().split())
        except OSError:  # the thread has ended
            continue
    return found


def _tell(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:  # it has left meanwhile
        return
