"""The command ``megatron-rl translate``: it prints another framework's settings as a YAML of megatron_rl."""

from __future__ import annotations

import argparse
import pathlib
import re
from collections.abc import Mapping, Sequence

from megatron_rl.commands.translate import axolotl, trl, trl_pairs, verl
from megatron_rl.commands.translate.checking import checked
from megatron_rl.commands.translate.kinds import OF_TRL, Kind, refuse_trainer, require_kind
from megatron_rl.commands.translate.output import as_yaml
from megatron_rl.commands.translate.settings import read_settings
from megatron_rl.commands.translate.translation import Translation
from megatron_rl.commands.translate.yaml_settings import Settings
from megatron_rl.errors import ConfigError, quoted

FRAMEWORKS = {"verl": "verl", "trl": "TRL", "axolotl": "axolotl"}
OF_TRL_HERE = ("grpo", *trl_pairs.DEFAULTS)
OF_AXOLOTL_HERE = ("sft", "dpo", "ipo", "simpo", "grpo", "gdpo", "reward")


def translated(
    framework: str,
    path: pathlib.Path,
    *,
    processes: int | None = None,
    trainer: str | None = None,
    values: Mapping[str, str] | None = None,
) -> tuple[Translation, Settings]:
    """Return (the translation of another framework's file of settings, the settings that were read from it).

    framework: one of the keys of FRAMEWORKS: ``verl``, ``trl`` or ``axolotl``.
    path: a YAML file or a shell script.
    processes: the number of training processes, if no setting gives it.
    trainer: the trainer that the file is for, if the file does not say.
    values: {name: value} of a script's variables; the script's arguments are named "1", "2", ….

    Raises ConfigError for a file that is not ``framework``'s.
    """
    read = read_settings(path, FRAMEWORKS[framework], values)
    kind = require_kind(read.kind, FRAMEWORKS[framework], str(path), trainer)
    try:
        return _translation(kind, read, str(path), processes), read
    except (ValueError, TypeError) as error:  # of a number that other numbers are computed from
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} has a value of another kind than {framework}'s own: {error}") from error


def _translation(kind: Kind, read: Settings, path: str, processes: int | None) -> Translation:
    if kind.framework == "verl":
        if kind.trainer != "rl":
            raise refuse_trainer(kind, path, ("main_ppo", "the recipe dapo"))
        return verl.translate(read.given, read.unknown)
    if kind.framework == "axolotl":
        trainer = axolotl.trainer_of(read.given)
        if trainer not in OF_AXOLOTL_HERE or "rl" in read.unknown:
            raise refuse_trainer(Kind("axolotl", trainer), path, OF_AXOLOTL_HERE)
        return axolotl.translate(trainer, read.given, read.unknown, processes=processes)
    if kind.trainer not in OF_TRL_HERE:
        raise refuse_trainer(kind, path, OF_TRL_HERE)
    if kind.trainer == "grpo":
        translation = trl.translate(read.given, read.unknown, processes=processes)
        if kind.assumed:
            translation.left["trainer"] = (
                "the file names none, and is read as GRPO's; RLOO has its names too: --trainer"
            )
        return translation
    return trl_pairs.translate(kind.trainer, read.given, read.unknown, processes=processes)


def translate_command(arguments: Sequence[str]) -> int:
    """Print a file of settings as our YAML, below a comment for each setting that is not translated; return 0.

    arguments: the words after `megatron-rl translate` in the command line.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-rl translate",
        description="Translate verl's, TRL's or axolotl's settings; prints our YAML, checked. No script is run.",
    )
    parser.add_argument("framework", choices=tuple(FRAMEWORKS))
    parser.add_argument("file", type=pathlib.Path, help="a YAML, or a script with overrides a.b=c or --name value")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="trl, axolotl: processes that train, for the batch per device"
    )
    parser.add_argument("--trainer", choices=OF_TRL, help="trl: what a YAML is for, where it does not say so")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a script's variable, or its argument by number, as in --set 1=gpu",
    )
    options = parser.parse_args(arguments)
    if options.processes is not None and options.processes < 1:
        raise ConfigError(f"--processes {options.processes} is no number of processes; it is at least 1")
    values = {}
    for each in options.set:
        if not re.match(r"([A-Za-z_]\w*|[1-9])=", each):
            raise ConfigError(f"--set {quoted(each)} is not NAME=VALUE, with a variable's name or 1 to 9")
        name, _, values[name] = each.partition("=")
    translation, read = translated(
        options.framework, options.file, processes=options.processes, trainer=options.trainer, values=values
    )
    print(as_yaml(translation, options.file.name, checked(translation), read.notes), end="")
    return 0
