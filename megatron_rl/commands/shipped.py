"""Finds the files that lie beside the package in a checkout, and inside it where it was installed from a wheel."""

from __future__ import annotations

import pathlib

from megatron_rl.errors import ConfigError

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
# Where a checkout has them → where setup.py puts them in a wheel.
FOLDERS = {"tools": "tools", "examples/slurm": "slurm"}


def shipped(folder: str, name: str) -> pathlib.Path:
    """Return the path of ``name`` in ``folder`` of a checkout (a key of FOLDERS), or of its copy in a wheel.

    Raises ConfigError where neither is there.
    """
    places = [PACKAGE.parent / folder / name, PACKAGE / FOLDERS[folder] / name]
    for place in places:
        if place.is_file():
            return place
    raise ConfigError(
        f"this installation of megatron_rl lacks {folder}/{name} (looked for {' and '.join(map(str, places))}); "
        "install it again"
    )
