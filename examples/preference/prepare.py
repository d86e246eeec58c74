"""Make preference pairs of the quickstart's problems: the right answer is chosen, a wrong one near it is rejected.

Example:
  python examples/preference/prepare.py --rows runs/inputs/train.jsonl --out runs/inputs/pairs.jsonl

A row: ``{"prompt": "7+5=", "answer": "12", "chosen": "12", "rejected": "13"}``; each problem comes --pairs times, every
time with another wrong answer.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import sys
from collections.abc import Sequence


def pairs_of(row: dict, count: int, random_numbers: random.Random) -> list[dict]:
    """Return ``count`` pairs of a problem; no wrong answer comes twice.

    Example: ``{"prompt": "7+5=", "answer": "12"}`` → chosen "12", rejected "13" and "10".
    """
    right = int(row["answer"])
    wrong = [right + offset for offset in range(-6, 7) if offset]
    return [
        {"prompt": row["prompt"], "answer": row["answer"], "chosen": row["answer"], "rejected": str(number)}
        for number in random_numbers.sample(wrong, count)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=pathlib.Path, required=True, help="the quickstart's train.jsonl")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the file of pairs")
    parser.add_argument("--pairs", type=int, choices=range(1, 13), default=4, help="of each problem (default: 4)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rows = [json.loads(line) for line in options.rows.read_text(encoding="utf-8").splitlines()]
    numbers = random.Random(options.seed)
    pairs = [pair for row in rows for pair in pairs_of(row, options.pairs, numbers)]
    options.out.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    print(f"{len(pairs)} pairs of {len(rows)} problems: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
