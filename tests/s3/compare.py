"""The objects of a store on the disk, and what two runs have written compared."""

import pathlib

from megatron_rl.checkpoint.folder import name_of
from megatron_rl.storage.location import location
from tests.equality.saved_steps import tensors_of
from tests.runs.command import rows_of, same_tensors, timeless


def downloaded(url: str, folder: pathlib.Path) -> pathlib.Path:
    """Copy every object below a URL to the disk; return the folder."""
    place = location(url)
    for name in place.files():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((place / name).read_bytes())
    return folder


def assert_same_records(one: pathlib.Path, two: pathlib.Path) -> None:
    """Assert that two runs have the same metrics but for clocks, and the same trace."""
    assert [timeless(x) for x in rows_of(one)] == [timeless(x) for x in rows_of(two)]
    assert (one / "trace.jsonl").read_text() == (two / "trace.jsonl").read_text()


def assert_same_checkpoint(one: pathlib.Path, two: pathlib.Path, iteration: int) -> None:
    """Assert that two roots on the disk hold the same tensors at an iteration, to the bit."""
    assert same_tensors(*(tensors_of(root / name_of(iteration)) for root in (one, two)))
