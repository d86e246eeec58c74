"""Reads the first word of `megatron-rl` and hands the rest to the program that it names."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.commands.launch import become, command_line, take_processes
from megatron_rl.commands.new_run import new_command
from megatron_rl.commands.shipped import shipped
from megatron_rl.commands.translate.command import translate_command
from megatron_rl.errors import ConfigError

EXIT_CONFIG = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """Describes one word of the command.

    does: the sentence of the help.
    program: → ``-m MODULE`` or the path of a script; another process runs it.
    many: whether ``--nproc`` may start several of it.
    """

    does: str
    program: Callable[[], Sequence[str]]
    many: bool = False


def module(name: str) -> Callable[[], Sequence[str]]:
    return lambda: ("-m", name)


def tool(name: str) -> Callable[[], Sequence[str]]:
    return lambda: (str(shipped("tools", name)),)


VERBS = {
    "train": Verb(does="Train a policy.", program=module("megatron_rl.train"), many=True),
    "serve": Verb(does="Serve Tinker's API on this backend.", program=module("megatron_rl.serve"), many=True),
    "watch": Verb(does="Follow a run in a browser on this host.", program=module("megatron_rl.watch")),
    "convert": Verb(does="Convert between Hugging Face and Megatron.", program=tool("convert_checkpoint.py")),
    "verify": Verb(
        does="Compare a topology with one process, on a thin model.", program=tool("verify_topology.py"), many=True
    ),
    "simulate": Verb(does="Predict times, memory and gain on N nodes.", program=tool("simulate_cluster.py")),
    "doctor": Verb(does="Find faults of this installation and their mends.", program=module("megatron_rl.doctor")),
}
# The words that this process follows itself.
HERE = {
    "new": ("Write a folder with a configuration, a reward function, prompts and a SLURM job.", new_command),
    "translate": ("Translate verl's or TRL's settings into a configuration.", translate_command),
}


def usage() -> str:
    width = max(map(len, [*VERBS, *HERE])) + 2
    lines = [f"  {name:{width}}{verb.does}{' Takes --nproc.' if verb.many else ''}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: megatron-rl COMMAND [--nproc N] [arguments of the command ...]",
            "",
            *lines,
            *(f"  {name:{width}}{does}" for name, (does, _) in HERE.items()),
            "",
            "--nproc N starts N processes on this host by torchrun. megatron-rl COMMAND --help says more.",
            "example: megatron-rl train --nproc 8 --config my_run/run.yaml",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: become the program that the first word names, or write a new run's folder.

    Returns 0 where all is done here, and 2, with the reason on stderr, for words that cannot be followed.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else EXIT_CONFIG
    name, *rest = words
    try:
        if name in HERE:
            return HERE[name][1](rest)
        if name not in VERBS:
            raise ConfigError(f"{name!r} is no command; those are {', '.join([*VERBS, *HERE])}")
        verb = VERBS[name]
        processes, others = take_processes(rest)
        if processes is not None and not verb.many:
            raise ConfigError(f"megatron-rl {name} runs as one process; leave --nproc {processes} out")
        become(command_line(verb.program(), others, processes, os.environ))
    except ConfigError as error:
        print(f"megatron_rl: {error}", file=sys.stderr)
        return EXIT_CONFIG
    raise AssertionError("os.execv does not return")
