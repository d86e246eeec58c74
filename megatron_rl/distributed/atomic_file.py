"""Files and folders that appear whole or not at all: written under another name, then renamed."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator

log = logging.getLogger(__name__)


def replace_text(path: pathlib.Path, text: str, *, synced: bool = False) -> None:
    """Replace a small file at once: a reader sees the old text or the new text.

    synced: whether the new text is flushed to the disk before the renaming. Then the file holds the
        old or the new text after a power loss too.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        if synced:
            file.flush()
            os.fsync(file.fileno())
    os.replace(unfinished, path)


@contextlib.contextmanager
def replacing_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a new folder that replaces ``path`` when the ``with`` block ends; remove the folder if the block raises."""
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        shutil.rmtree(path, ignore_errors=True)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def set_aside(path: pathlib.Path) -> None:
    """Rename an earlier run's ``path`` to the first free ``path.1``, ``path.2``, ..., and log a warning."""
    number = 1
    while (other := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(other)
    log.warning("%s is from an earlier run: kept as %s", path.name, other.name)
