"""The command lines that `megatron-rl` turns its process into: Python, or torchrun's ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from megatron_rl.errors import ConfigError

FLAG = "--nproc"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# With the address: torchrun would take the host's name, and wait for minutes if the name has no address.
TORCHRUN = (sys.executable, "-m", "megatron_rl.commands.ranks", "--standalone", "--local-addr", "127.0.0.1")


def take_processes(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """Return the value of ``--nproc`` and the other arguments; the value is None if ``--nproc`` is absent.

    Raises ConfigError for a value that is no number of processes, and for two values.
    """
    processes, others, rest = None, [], list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name != FLAG:
            others.append(word)
            continue
        if not equals:
            if not rest:
                raise ConfigError("--nproc needs a number of processes, as in --nproc 8")
            value = rest.pop(0)
        if processes is not None:
            raise ConfigError(f"--nproc stands twice: {processes} and {value!r}; give it once")
        if not value.isascii() or not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"--nproc {value!r} is no number of processes; it is a whole number of at least 1")
        processes = int(value)
    return processes, others


def command_line(
    module: str, arguments: Sequence[str], processes: int | None, environment: Mapping[str, str]
) -> list[str]:
    """Return the command line of the process that runs ``module``.

    module: its name, as ``python -m`` and torchrun take it.
    processes: the number that torchrun starts on this host; None: one process without torchrun, or
        a rank of a launcher's world.

    Raises ConfigError for ``--nproc`` within a world that a launcher has already started.
    """
    if processes is None:
        return [sys.executable, "-m", module, *arguments]
    inside = [name for name in RANK_VARIABLES if name in environment]
    if inside:
        raise ConfigError(
            f"--nproc {processes} would start torchrun within a rank of another launcher "
            f"({', '.join(f'{name}={environment[name]}' for name in inside)} in the environment); leave --nproc out"
        )
    return [*TORCHRUN, "--nproc-per-node", str(processes), "-m", module, *arguments]


def become(words: Sequence[str]) -> None:
    """Replace this process by the command, so that signals and its exit code are the command's own."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun prints a long notice if it is missing
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(words[0], list(words))
