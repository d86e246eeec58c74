"""Measure the equality matrix and write it as a table.

Usage: python -m tests.equality.matrix_table [--only NAME ...] [--markdown FILE]
"""

import argparse
import pathlib

from tests.equality.matrix import BOUND, CELLS, QUANTITIES, measure, worst
from tests.workers.pool import Pool


def markdown(rows: list[tuple[str, str, dict[str, float]]]) -> str:
    head = ("topology", "model", "log-probs", "gradient", "gradient norm", "weights after 3 steps")
    table = [(name, family, *(f"{errors[q]:.1e}" for q in QUANTITIES)) for name, family, errors in rows]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *table)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.equality.matrix_table", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cells of these names alone")
    parser.add_argument("--markdown", type=pathlib.Path, help="where to write the table")
    given = parser.parse_args()
    rows = []
    with Pool() as pool:
        for cell in CELLS:
            for family in cell.families if not given.only or cell.name in given.only else ():
                rows.append((cell.name, family, worst(pool.run(cell.world, measure, cell, family, timeout_s=120)[0])))
                print(*rows[-1], flush=True)
    if given.markdown:
        given.markdown.write_text(markdown(rows))
    return int(any(error >= BOUND for _, _, errors in rows for error in errors.values()))


if __name__ == "__main__":
    raise SystemExit(main())
