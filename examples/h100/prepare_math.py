r"""Turn a MATH-like set of problems into megatron_rl's columns: prompt, solution, answer.

Example:
  python examples/h100/prepare_math.py --math MATH --out data/math

DIR of --math holds train.jsonl and test.jsonl, or folders train/ and test/ with a JSON file for each problem, as
Hendrycks et al.'s MATH has (arXiv:2103.03874). A row has the columns problem and solution, and the solution's last
\boxed{...} is the answer.

Written:
  train.jsonl, test.jsonl   prompt (the problem), solution, answer (the box, as in \boxed{\frac{1}{2}})
Rows are in an order drawn once and for all, so that the first rows of a split have all of its subjects. A row without a
box is left out, and so is one whose answer math-verify does not find equal to itself: the right answer to it would earn
nothing. Their numbers are printed.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import re
import sys
from collections.abc import Iterator, Sequence

from megatron_rl.data.rows import load_rows
from megatron_rl.errors import ConfigError
from megatron_rl.json_text import read_object
from megatron_rl.reward.math import math_verify

BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|[^\s{])")
BRACE = re.compile(r"\\.|[{}]")  # behind a backslash it is a character, not a brace


def boxed_answer(solution: str) -> str | None:
    r"""Return the last \boxed{...} or \fbox{...} of a solution as a \boxed{...}; None where there is none, or no end.

    Examples: ``so $x=\boxed{\frac{1}{2}}$.`` gives ``\boxed{\frac{1}{2}}``, and ``\boxed 7`` gives ``\boxed{7}``.
    """
    found = list(BOX.finditer(solution))
    if not found:
        return None
    if found[-1][1] != "{":
        return f"\\boxed{{{found[-1][1]}}}"
    start, depth = found[-1].end(), 1
    for brace in BRACE.finditer(solution, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return f"\\boxed{{{solution[start : brace.start()].strip()}}}"
    return None


def can_be_earned(answer: str) -> bool:
    """Say whether a completion that gives this very answer is scored as right."""
    try:
        return math_verify([""], [answer], [[]], [answer]) == [1.0]
    except ValueError:
        return False


def split_rows(folder: pathlib.Path, split: str) -> Iterator[tuple[str, dict]]:
    """Yield each row of a split with its place, from SPLIT.jsonl or from the JSON files below SPLIT."""
    file = folder / f"{split}.jsonl"
    if file.is_file():
        rows = load_rows(file, key="--math")
        yield from ((rows.place(number), row) for number, row in enumerate(rows))
        return
    files = sorted((folder / split).rglob("*.json"))
    if not files:
        raise ConfigError(
            f"--math {folder} holds neither {split}.jsonl nor JSON files below {split}; name MATH's folder"
        )
    yield from ((str(path), read_object(path)) for path in files)


def write_split(folder: pathlib.Path, out: pathlib.Path, split: str) -> dict[str, int]:
    """Convert one split; return its numbers of rows. Raises ConfigError for a row without its columns."""
    kept, without_box, unearned = [], 0, 0
    for place, row in split_rows(folder, split):
        for key in ("problem", "solution"):
            if not isinstance(row.get(key), str):
                raise ConfigError(f"{place} has no text column {key!r}; its columns are {', '.join(map(repr, row))}")
        answer = boxed_answer(row["solution"])
        without_box += answer is None
        if answer is None:
            continue
        if can_be_earned(answer):
            kept.append({"prompt": row["problem"], "solution": row["solution"], "answer": answer})
        else:
            unearned += 1
    random.Random(0).shuffle(kept)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
    (out / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return {f"{split}_rows": len(kept), f"{split}_without_box": without_box, f"{split}_not_verified": unearned}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--math", type=pathlib.Path, required=True, metavar="DIR", help="where both splits are")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        report = {
            name: n for split in ("train", "test") for name, n in write_split(options.math, options.out, split).items()
        }
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
