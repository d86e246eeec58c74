"""The dispatch of `megatron-rl`: the command that the first argument names replaces this process.

Only `new` and `translate` run in this process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl import __version__
from megatron_rl.cli import SERVER, TRAINER, Program, read_arguments
from megatron_rl.commands.launch import become, command_line, take_processes
from megatron_rl.commands.new_run import new_command
from megatron_rl.commands.translate.command import translate_command
from megatron_rl.errors import ConfigError

EXIT_CONFIG = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """Describes one command of `megatron-rl`.

    does: the sentence that describes the command in the help.
    module: the Python module that ``python -m`` runs for the command, in place of this process.
    many: whether ``--nproc`` may start several processes of the command.
    reads: the Program whose command line and configuration are checked before several processes
        start; None if nothing is checked.
    """

    does: str
    module: str
    many: bool = False
    reads: Program | None = None


VERBS = {
    "train": Verb(does="Train a policy.", module="megatron_rl.train", many=True, reads=TRAINER),
    "serve": Verb(does="Serve Tinker's API on this backend.", module="megatron_rl.serve", many=True, reads=SERVER),
    "serve-vllm": Verb(
        does="Start vLLM servers for a run, and keep them running.", module="megatron_rl.commands.serve_vllm"
    ),
    "pod": Verb(does="Run this pod's ranks of a job on Kubernetes.", module="megatron_rl.commands.pod"),
    "watch": Verb(does="Follow a run in a browser on this host.", module="megatron_rl.watch"),
    "convert": Verb(does="Convert between Hugging Face and Megatron.", module="megatron_rl.commands.convert"),
    "verify": Verb(
        does="Compare a topology with one process, on a thin model.", module="megatron_rl.commands.verify", many=True
    ),
    "check": Verb(
        does="Try a loss or an estimator of your own against its contract.",
        module="megatron_rl.commands.check_own_parts",
    ),
    "check-decided": Verb(
        does="Replay a run's rollouts to check reward.decided.", module="megatron_rl.commands.check_decided"
    ),
    "simulate": Verb(does="Predict times, memory and gain on N nodes.", module="megatron_rl.simulator"),
    "doctor": Verb(does="Find faults of this installation and their mends.", module="megatron_rl.doctor"),
}
# The words that this process itself carries out.
HERE = {
    "new": ("Write a folder with a configuration, a reward function, prompts and a SLURM job.", new_command),
    "translate": ("Translate verl's, TRL's or axolotl's settings into a configuration.", translate_command),
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
            "megatron-rl --version says which release this is.",
            "example: megatron-rl train --nproc 8 --config my_run/run.yaml",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of `megatron-rl`: in this process, or by replacing this process with the command's program.

    arguments: the words after `megatron-rl`; None takes them from ``sys.argv``.

    Returns the exit code of a command that ran in this process. Returns 2, with the reason on
    stderr, if an argument is wrong.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else EXIT_CONFIG
    if words == ["--version"]:
        print(f"megatron-rl {__version__}")
        return 0
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
        if processes is not None and verb.reads is not None:
            read_arguments(others, verb.reads)  # a mistake in the arguments ends here, before any rank starts
        become(command_line(verb.module, others, processes, os.environ))
    except ConfigError as error:
        print(f"megatron_rl: {error}", file=sys.stderr)
        return EXIT_CONFIG
    raise AssertionError("os.execv does not return")
