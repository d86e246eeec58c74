"""Makes problems whose answers are some hundred tokens long, and scores them: for runs in which rollouts rule.

    python tools/benchmarks/lists.py --out runs/lists --rows 16 --numbers 40
    python tools/benchmarks/whole_runs.py --example smollm2 --out runs/lists/ways --ways today speculation \\
        reward.functions=[./tools/benchmarks/lists.py:listed] \\
        data.train=runs/lists/train.jsonl eval.path=runs/lists/test.jsonl

A problem asks for all whole numbers from one to another. ``listed`` rewards the share of them that stand at
the answer's beginning, in order.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import re
from collections.abc import Sequence

LARGEST = 900  # first number of a list; all have at most three digits


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/lists.py --out runs/lists --rows 16 --numbers 40",
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    parser.add_argument("--rows", type=int, default=16, help="of train.jsonl, and of test.jsonl")
    parser.add_argument("--numbers", type=int, default=40, help="of each list")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    if not (given.rows >= 1 and 2 * given.rows <= LARGEST and 1 <= given.numbers <= 99):
        parser.error(f"--rows {given.rows} must be 1 to {LARGEST // 2} and --numbers {given.numbers} 1 to 99")
    return given


def row_of(first: int, numbers: int) -> dict[str, object]:
    last = first + numbers - 1
    text = f"Write all whole numbers from {first} to {last}, separated by commas, and nothing else."
    return {"prompt": [{"role": "user", "content": text}], "answer": f"{first} {last}"}


def listed(
    prompts: Sequence[str],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[str],
    **columns: object,
) -> list[float]:
    """Return [S], each sample's share of the wanted numbers that its list begins with, in order."""
    rewards = []
    for completion, bounds in zip(completions, answer, strict=True):
        first, last = map(int, bounds.split())
        wanted, right = range(first, last + 1), 0
        for found, number in zip(re.findall(r"\d+", completion), wanted, strict=False):
            if found != str(number):
                break
            right += 1
        rewards.append(right / len(wanted))
    return rewards


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    firsts = random.Random(given.seed).sample(range(LARGEST), 2 * given.rows)
    given.out.mkdir(parents=True, exist_ok=True)
    for name, own in (("train", firsts[: given.rows]), ("test", firsts[given.rows :])):
        lines = [json.dumps(row_of(first, given.numbers)) + "\n" for first in own]
        (given.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
