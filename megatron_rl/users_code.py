"""A user's code: objects that the configuration names, and calls in which ending the process is an error.

A name is the name of a built-in, ``module:attribute`` or ``path/to/file.py:attribute``.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import numbers
import operator
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType

from megatron_rl.errors import ConfigError, quoted

LARGEST_REWARD = float.fromhex("0x1.fffffep+127")  # the largest float32: the loss reads advantages in float32
_INSTALLING = threading.Lock()
_num_inside = 0
_real_exit: Callable[[int], None] = os._exit


class _Here(threading.local):
    """Holds, for each thread, the id of the process that the thread may not end; None outside ``exit_is_an_error``."""

    process: int | None = None


_HERE = _Here()


@contextlib.contextmanager
def exit_is_an_error() -> Iterator[None]:
    """Make ``os._exit`` in the block raise SystemExit, as ``sys.exit`` does; the caller treats both as a failure.

    Otherwise a user's function could end the run with any exit code, even 0. ``os._exit`` still ends a process that
    the block forked. It also works in all other threads, so that the watchdog can end this process.
    """
    global _num_inside, _real_exit
    outer, _HERE.process = _HERE.process, os.getpid()
    with _INSTALLING:
        if _num_inside == 0:
            _real_exit, os._exit = os._exit, _refuse
        _num_inside += 1
    try:
        yield
    finally:
        _HERE.process = outer
        with _INSTALLING:
            _num_inside -= 1
            if _num_inside == 0:
                os._exit = _real_exit


def _refuse(code: int) -> None:
    if _HERE.process != os.getpid():
        return _real_exit(code)
    raise SystemExit(f"os._exit({code!r}) was called")


def is_own(name: str) -> bool:
    """Return whether a name is of a user's own part, with a colon in it, not of a built-in."""
    return ":" in name


def resolve(name: str, built_in: Mapping[str, str], *, what: str, form: str, also: Collection[str] = ()) -> object:
    """Return the object of a name: of a built-in, or of a user's own ``module:attribute`` or ``file.py:attribute``.

    name: a key of ``built_in``, ``module:attribute``, or a Python file in the module's place, as in
        ``./rewards.py:score``. A file's path counts from the working directory.
    built_in: the ``module:attribute`` of each built-in name.
    what: the setting and its value, for messages.
    form: the form of a user's own name, for messages.
    also: further valid names, which the caller handles, for messages.

    Raises ConfigError with the nearest way out. If the module's import fails, the message holds its
    error.
    """
    # The name.
    module_name, separator, attribute = built_in.get(name, name).rpartition(":")
    if not (separator and module_name and attribute):
        known = [*built_in, *also]
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        listed = f"the built-ins are {', '.join(known)}; " if known else ""
        raise ConfigError(f"{what} is not known; {hint}{listed}your own is written {form}")
    # Its module or file.
    is_file = module_name.endswith(".py") or "/" in module_name
    try:
        with exit_is_an_error():
            module = _module_of_file(module_name, what) if is_file else importlib.import_module(module_name)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        mend = "mend the file" if is_file else "install it, or put the folder that holds it on PYTHONPATH"
        raise ConfigError(
            f"{what}: importing {quoted(module_name, 300)} failed with {type(error).__name__}: {error!s:.500}; {mend}"
        ) from error
    # The attribute in it.
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError:
        candidates = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        nearest = difflib.get_close_matches(attribute, candidates, n=1, cutoff=0.0)
        hint = f"; the nearest it has is {nearest[0]!r}" if nearest else "; it defines nothing that can be called"
        raise ConfigError(f"{what}: module {quoted(module_name, 300)} has no {quoted(attribute, 300)}{hint}") from None


def _module_of_file(path: str, what: str) -> ModuleType:
    """Return a Python file as a module; the file is run once per process."""
    file = pathlib.Path(path).expanduser().resolve()
    if not file.is_file() or file.suffix != ".py":
        fault = "is not a Python file" if file.exists() else "does not exist"
        raise ConfigError(
            f"{what}: {quoted(str(file), 300)} {fault}; write the path of a .py file from the working "
            "directory, or a module's name with dots in place of slashes"
        )
    # The name holds a digest, so that files of equal stems, or named like a package, do not collide in sys.modules.
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before the file runs, since dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def is_reward(value: object) -> bool:
    """Return whether a value is a number that float32 holds: neither NaN nor infinite, and at most 3.4e38 in size."""
    import numpy as np  # here, since a program that only reads the configuration does not need it

    return isinstance(value, (numbers.Real, np.bool_)) and bool(abs(value) <= LARGEST_REWARD)
