"""Every installation that the documents name resolves, or is refused, as docs/evidence/compatibility.md says."""

from __future__ import annotations

import re

import pytest

from tests.extras.compatibility import HEADS, row_of, rows_in
from tests.extras.resolver import resolve
from tests.extras.sets import SETS
from tests.extras.stated import ROOT, Stated, released, wanted_pins


def name_of(stated: Stated) -> str:
    return f"{stated.name}-{stated.python}"


@pytest.mark.long(seconds=15)
@pytest.mark.network
@pytest.mark.parametrize("stated", SETS, ids=name_of)
def test_set_resolves_as_the_page_says(stated: Stated) -> None:
    resolution = resolve(stated)
    row = row_of(stated, resolution, "a date")
    page = (ROOT / "docs" / "evidence" / "compatibility.md").read_text(encoding="utf-8")
    written = {cells[:2]: cells for cells in rows_in(page)}[stated.name, stated.python]
    assert written[: len(HEADS) - 1] == row[:-1], "run make compatibility"
    if stated.refused:
        return
    pins, resolved = wanted_pins(stated), resolution.versions
    named = set(pins) & set(resolved)
    assert {name: released(resolved[name]) for name in named} == {name: pins[name] for name in named}
    packages = re.findall(r'"([\w-]+)(?:\[\w+\])?[=>]', "\n".join(extra_lines(extra) for extra in stated.extras))
    assert packages and set(packages) <= set(resolved), f"{set(packages) - set(resolved)} not resolved"


def extra_lines(extra: str) -> str:
    """Return the text of an extra's list in setup.py."""
    setup = (ROOT / "setup.py").read_text()
    return re.search(rf'"{extra}": \[(.*?)\],\n(?=        "|        #|    \}})', setup, re.S)[1]
