"""Preference pairs of the tests' arithmetic: the right answer, and one that is off by one."""

from __future__ import annotations

import json
import pathlib


def write_pairs(source: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """Write the rows of ``source`` with a chosen and a rejected column to ``path``; return it."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    for row in rows:
        row |= {"chosen": row["answer"], "rejected": str(int(row["answer"]) + 1)}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
