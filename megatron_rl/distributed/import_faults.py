"""The causes of a failed import, found from its error's text. This module imports only the standard library."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
LIBRARY = re.compile(r"(?:ImportError|OSError): (?:.*?[\s/])??([\w.+-]+\.so[.\d]*): (.*)")
ABSENT = "cannot open shared object file"
# The error of Transformer Engine's search for libraries (2.20, common/__init__.py).
UNNAMED_LIBRARY = re.compile(r"RuntimeError: (\w+) shared object not found")
WHEELS = {"libnccl": "nvidia-nccl", "libcudnn": "nvidia-cudnn"}  # the packages' names end in -cu12 or -cu13


class Cause(enum.Enum):
    """Names why an import failed: a missing package, a missing or broken library, or the imported package itself."""

    PACKAGE_MISSING = enum.auto()
    LIBRARY_MISSING = enum.auto()
    LIBRARY_BROKEN = enum.auto()
    ITSELF = enum.auto()


class Fault(NamedTuple):
    """Describes why an import failed.

    state: what is wrong, to follow the package's name in a message, such as "is half-installed".
    mend: the command or step that repairs it; "" if the package itself must be installed again.
    """

    cause: Cause
    state: str
    mend: str = ""


def error_text(error: BaseException) -> str:
    """Return an error as one line, "Type: message", the form that ``fault_of`` takes."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def fault_of(error: str, package: str, cuda: str | None = None) -> Fault:
    """Return the fault behind a failed import.

    error: the import's error as "Type: message" (``error_text``).
    package: the name of the imported top-level package, such as "transformer_engine".
    cuda: the CUDA version that torch is built for; None for a CPU build.
    """
    if (matched := MODULE.match(error)) and not matched[1].startswith(package):
        top, dot, _ = matched[1].partition(".")
        if dot:  # Python found the top-level package, but not its module
            return Fault(
                Cause.PACKAGE_MISSING, f"lacks the module {matched[1]} of another {top}", f"pip install --upgrade {top}"
            )
        install = f"pip install {top.replace('_', '-')}"
        return Fault(Cause.PACKAGE_MISSING, f"lacks the package {top}", f"{install}  (pip check names any others)")
    if matched := UNNAMED_LIBRARY.match(error):
        return _library_missing(f"lib{matched[1]}.so", cuda)
    matched = LIBRARY.match(error)
    if not matched or (package in matched[1] and matched[2].startswith(ABSENT)):
        return Fault(Cause.ITSELF, "is half-installed")
    if matched[2].startswith(ABSENT):
        return _library_missing(matched[1], cuda)
    return Fault(Cause.LIBRARY_BROKEN, f"has a library that does not load, {matched[1]}")


def _library_missing(library: str, cuda: str | None) -> Fault:
    wheel = WHEELS.get(library.partition(".")[0])
    install = f"pip install {wheel}-cu{cuda.partition('.')[0] if cuda else '13'}" if wheel else "install what brings it"
    return Fault(
        Cause.LIBRARY_MISSING,
        f"needs the library {library}, which is not found",
        f"put the folder that holds it in LD_LIBRARY_PATH, or {install}",
    )
