"""A model folder in an object store, where nothing is renamed: it is whole if its last object is there.

Objects have their final names from the start, and each appears when its upload ends. The last one
is ``config.json`` (``adapter_config.json`` for adapters): no loader takes a folder without it. An
export that fails removes what it wrote. An export that is killed leaves objects that no loader
takes; the next export to the same place removes them.
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator

from megatron_rl.storage.remote import RemotePath

BLOCK_BYTES = 1 << 22


@contextlib.contextmanager
def filled(place: RemotePath, last: str) -> Iterator[RemotePath]:
    """Yield a folder emptied for new objects, and empty it if the block raises.

    last: the name of the object that is written last.
    """
    clear(place, last)
    try:
        yield place
    except BaseException:
        with contextlib.suppress(OSError):  # the error that led here is raised, not this one
            clear(place, last)
        raise


@contextlib.contextmanager
def uploaded(place: RemotePath, last: str) -> Iterator[pathlib.Path]:
    """Yield a folder on this host's disk; after the block its files replace the objects at ``place``."""
    with tempfile.TemporaryDirectory() as local:
        yield pathlib.Path(local)
        with filled(place, last):
            upload(pathlib.Path(local), place, last)


def upload(folder: pathlib.Path, place: RemotePath, last: str) -> None:
    """Copy a folder's files to a store, ``last`` after all others."""
    names = sorted((str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file()), key=lambda x: (x == last, x))
    for name in names:
        with (folder / name).open("rb") as source, (place / name).open("wb") as target:
            while block := source.read(BLOCK_BYTES):
                target.write(block)


def clear(place: RemotePath, last: str) -> None:
    """Remove every object below ``place``, starting with the one that makes the folder whole."""
    for name in sorted(place.files(), key=lambda x: (x != last, x)):
        (place / name).unlink(missing_ok=True)
