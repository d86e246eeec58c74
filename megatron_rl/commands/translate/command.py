"""Reads the command line of ``megatron-rl translate`` and prints our YAML."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from megatron_rl.commands.translate import trl, verl
from megatron_rl.commands.translate.settings import read_settings
from megatron_rl.commands.translate.translation import Translation, as_yaml
from megatron_rl.errors import ConfigError


def translated(framework: str, path: pathlib.Path, processes: int | None) -> Translation:
    """Return the translation of a file of verl's or TRL's settings. Raises ConfigError for a file without any."""
    given = read_settings(path)
    if not given:
        raise ConfigError(f"{path} holds no setting of {framework}'s: neither a YAML nor overrides a.b=c")
    try:
        return verl.translate(given) if framework == "verl" else trl.translate(given, processes=processes)
    except (ValueError, TypeError) as error:  # of a number that other numbers are made of
        raise ConfigError(f"{path} has a value of another kind than {framework}'s own: {error}") from error


def translate_command(arguments: Sequence[str]) -> int:
    """Print our YAML for a file of settings, with a comment for each that is not translated, and return 0."""
    parser = argparse.ArgumentParser(
        prog="megatron-rl translate", description="Translate verl's or TRL's settings; prints our YAML."
    )
    parser.add_argument("framework", choices=("verl", "trl"))
    parser.add_argument("file", type=pathlib.Path, help="a YAML; for verl also a script with overrides a.b=c")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="trl: processes that train, for its batch per device"
    )
    given = parser.parse_args(arguments)
    if given.processes is not None and given.processes < 1:
        raise ConfigError(f"--processes {given.processes} is no number of processes; it is at least 1")
    print(as_yaml(translated(given.framework, given.file, given.processes), given.file.name, given.framework), end="")
    return 0
