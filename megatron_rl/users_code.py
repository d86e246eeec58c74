"""Functions that find the user's own code by its name in the configuration, and keep it from ending the process.

A name is ``module:attribute``, ``path/to/file.py:attribute`` or the name of a built-in.
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
    """Holds, for each thread, the id of the process that the thread may not end by ``os._exit``.

    The id is set within the ``with`` block of ``exit_is_an_error``. Outside the block it is None, and
    ``os._exit`` ends the process as usual.
    """

    process: int | None = None


_HERE = _Here()


@contextlib.contextmanager
def exit_is_an_error() -> Iterator[None]:
    """Make ``os._exit`` raise SystemExit within the ``with`` block, as ``sys.exit`` does; both count as a failure.

    Without this, a user's function could end the run with any exit code, even 0. Two kinds of calls
    still end their process: those in a process that the block forks, and those in another thread,
    such as the watchdog's.
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
    """Return whether a name is that of a user's own object, such as ``module:function``: it contains a colon."""
    return ":" in name


def resolve(name: str, built_in: Mapping[str, str], *, what: str, form: str, also: Collection[str] = ()) -> object:
    """Return the object that a name stands for; its module is imported, or its file run.

    name: a key of ``built_in``, ``module:attribute``, or a Python file in place of the module, as in
        ``./rewards.py:score``. A relative path starts at the working directory.
    built_in: {built-in name: its ``module:attribute``}.
    what: the setting and its value, for messages.
    form: how a user writes the name of an object, such as "module:function", for messages.
    also: further valid names, which the caller resolves itself; the error's message lists them.

    Raises ConfigError if the name, its module or its attribute is not found, with the nearest name.
    Raises ConfigError also if the import fails, with the import's error in the message.
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
    """Return the module of a Python file, which is run at the first call for it in a process.

    what: the setting and its value, for messages.

    Raises ConfigError if the path is no Python file.
    """
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
    """Return whether a value is a real number within float32's range: not NaN, and at most 3.4e38 in magnitude."""
    import numpy as np  # here, since a program that only reads the configuration does not need it

    return isinstance(value, (numbers.Real, np.bool_)) and bool(abs(value) <= LARGEST_REWARD)
