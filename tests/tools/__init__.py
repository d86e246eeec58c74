"""Tests of the tools. Importing this puts the tools' own folders on the search path, as `python FILE` would."""

import importlib.util
import pathlib
import sys
import types
from shlex import split as words  # of a command line

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS, BENCHMARKS = ROOT / "tools", ROOT / "tools" / "benchmarks"
sys.path[:0] = [str(TOOLS), str(BENCHMARKS)]

__all__ = ["BENCHMARKS", "ROOT", "TOOLS", "load_script", "words"]


def load_script(path: str) -> types.ModuleType:
    """Load a script as a module whose name is its whole path: several examples have a prepare.py."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
