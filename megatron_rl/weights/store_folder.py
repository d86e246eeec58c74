"""The writing of a model folder to an object store, which renames nothing: the last object makes the folder whole.

Objects have their final names from the start, and each appears when its upload ends. The last one
is ``config.json`` (``adapter_config.json`` for adapters), and no loader takes a folder without this
file. An export that fails removes what it wrote. An export that is killed leaves objects behind;
the next export to the same folder removes them.
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
    """Yield the store folder ``place`` after removing all its objects; remove them again if the ``with`` block raises.

    last: the name of the object without which the folder is not whole. The caller writes it last;
        here it is removed first.
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
    """Yield a folder on this host's disk; after the ``with`` block its files replace the objects in ``place``.

    place: a folder of an object store.
    last: the name of the file that is uploaded last.
    """
    with tempfile.TemporaryDirectory() as local:
        yield pathlib.Path(local)
        with filled(place, last):
            upload(pathlib.Path(local), place, last)


def upload(folder: pathlib.Path, place: RemotePath, last: str) -> None:
    """Copy a folder's files to the store folder ``place``, the file named ``last`` after all others."""
    names = sorted((str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file()), key=lambda x: (x == last, x))
    for name in names:
        with (folder / name).open("rb") as source, (place / name).open("wb") as target:
            while block := source.read(BLOCK_BYTES):
                target.write(block)


def clear(place: RemotePath, last: str) -> None:
    """Remove every object below ``place``, first the one named ``last``, which is written last.

    No loader takes a folder without it.
    """
    for name in sorted(place.files(), key=lambda x: (x != last, x)):
        (place / name).unlink(missing_ok=True)
