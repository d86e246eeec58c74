"""The replacement of the `megatron-rl` process by a program: one Python process, or torchrun if --nproc is given."""

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
    """Return (number that ``--nproc`` gives, other arguments); the number is None if ``--nproc`` is absent.

    Raises ConfigError if the value is no whole number of at least 1, or if ``--nproc`` is given
    twice.
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

    module: the name that ``python -m`` or torchrun gets.
    arguments: the arguments of that module.
    processes: the number of ranks that torchrun starts on this host; None to run without torchrun,
        as one process or as a rank that another launcher has started.
    environment: this process's environment variables.

    Raises ConfigError if ``--nproc`` is given within a rank of another launcher.
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
    """Replace this process by a command, so that signals reach the command and its exit code is this process's.

    words: the program's path and its arguments.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun prints a long notice if it is missing
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(words[0], list(words))
