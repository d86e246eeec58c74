"""Make word problems of one and two steps, with whole answers: train.jsonl and test.jsonl.

Example:
  python examples/smollm2/problems.py --out runs/smollm2/inputs/data --steps 1 --train-rows 2000 --test-rows 128

A row: {"prompt": [{"role": "user", "content": "Mia has 12 pens and gives 5 of them to Omar. How many pens does Mia have
left?"}], "answer": "7", "solution": "12 - 5 = 7. The answer is 7.", "kind": "give"}. Rows follow from --seed; no row
of test.jsonl has the kind and the numbers of one of train.jsonl.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.errors import ConfigError

NAMES = (
    *("Ada", "Ben", "Carla", "Dario", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kemi", "Liam", "Mia", "Nora"),
    *("Omar", "Priya", "Quinn", "Rosa", "Sami", "Tess", "Uma", "Victor", "Wei", "Yara", "Zoe"),
)
THINGS = (
    *("apples", "marbles", "stickers", "pens", "shells", "cookies", "stamps", "coins", "books", "cards", "oranges"),
    *("balloons", "beads", "candles", "eggs", "flowers", "toys", "ribbons", "buttons", "muffins"),
)
BOXES = (("box", "boxes"), ("bag", "bags"), ("basket", "baskets"), ("jar", "jars"), ("pack", "packs"))
GETS = ("buys", "finds", "wins", "gets", "collects")
LOSES = ("gives away", "loses", "sells", "uses")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Describes problems that differ in names, things and numbers.

    steps: operations until the answer.
    text: the problem, with {name}, {other}, {things}, {box}, {boxes}, {gets}, {loses}, {a}, {b} and {c} in it.
    numbers: the smallest and largest value of a, b and c.
    working: the operations, as Python and as text; the last one's value is the answer.
    """

    steps: int
    text: str
    numbers: tuple[tuple[int, int], ...]
    working: tuple[str, ...]


SMALL, MIDDLE, FEW = (2, 10), (3, 15), (2, 5)
KINDS = {
    "get": Kind(
        steps=1,
        text="{name} has {a} {things} and {gets} {b} more. How many {things} does {name} have now?",
        numbers=(MIDDLE, MIDDLE),
        working=("{a} + {b}",),
    ),
    "give": Kind(
        steps=1,
        text="{name} has {a} {things} and gives {b} of them to {other}. How many {things} does {name} have left?",
        numbers=(MIDDLE, MIDDLE),
        working=("{a} - {b}",),
    ),
    "boxes": Kind(
        steps=1,
        text="{name} buys {a} {boxes} of {things}. Each {box} holds {b} {things}. How many {things} does {name} buy?",
        numbers=(FEW, SMALL),
        working=("{a} * {b}",),
    ),
    "difference": Kind(
        steps=1,
        text="{name} has {a} {things} and {other} has {b}. How many more {things} does {name} have than {other}?",
        numbers=(MIDDLE, MIDDLE),
        working=("{a} - {b}",),
    ),
    "get_and_lose": Kind(
        steps=2,
        text="{name} has {a} {things}, {gets} {b} more and then {loses} {c}. How many {things} are left?",
        numbers=(MIDDLE, SMALL, SMALL),
        working=("{a} + {b}", "{0} - {c}"),
    ),
    "three_friends": Kind(
        steps=2,
        text="{name} brings {a} {things}, {other} brings {b} and {third} brings {c}. How many {things} do they bring?",
        numbers=(SMALL, SMALL, SMALL),
        working=("{a} + {b}", "{0} + {c}"),
    ),
    "boxes_and_more": Kind(
        steps=2,
        text="{name} has {a} {boxes} with {b} {things} each and {c} {things} more. How many {things} is that?",
        numbers=(FEW, SMALL, SMALL),
        working=("{a} * {b}", "{0} + {c}"),
    ),
    "boxes_less": Kind(
        steps=2,
        text="There are {a} {boxes} with {b} {things} each. {name} {loses} {c} of the {things}. How many are left?",
        numbers=(FEW, SMALL, SMALL),
        working=("{a} * {b}", "{0} - {c}"),
    ),
    "together": Kind(
        steps=2,
        text="{name} has {a} {things}. {other} has {b} more than {name}. How many {things} do they have together?",
        numbers=(SMALL, SMALL),
        working=("{a} + {b}", "{a} + {0}"),
    ),
    "times": Kind(
        steps=2,
        text="{name} has {a} {things} and {other} has {b} times as many. How many {things} do they have together?",
        numbers=(SMALL, FEW),
        working=("{a} * {b}", "{a} + {0}"),
    ),
    "change": Kind(
        steps=2,
        text="{name} buys {a} {things} for ${b} each and pays with ${c}. How many dollars does {name} get back?",
        numbers=(FEW, FEW, (25, 50)),
        working=("{a} * {b}", "{c} - {0}"),
    ),
    "wages": Kind(
        steps=2,
        text="{name} earns ${a} an hour and works {b} hours. {name} then spends ${c}. How many dollars are left?",
        numbers=(SMALL, FEW, SMALL),
        working=("{a} * {b}", "{0} - {c}"),
    ),
}  # fmt: skip


def solve(working: Sequence[str], numbers: dict[str, int]) -> tuple[list[str], int]:
    """Return the sentences of a solution, as "3 * 4 = 12.", and the last value."""
    sentences, values = [], []
    for operation in working:
        left, sign, right = operation.format(*values, **numbers).split()
        value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(left), int(right))
        sentences.append(f"{left} {sign} {right} = {value}.")
        values.append(value)
    return sentences, values[-1]


def draw(name: str, order: random.Random) -> tuple[tuple, dict] | None:
    """Return (kind and numbers, row) of a problem, or None where its answer is no positive number."""
    kind = KINDS[name]
    numbers = {letter: order.randint(*bounds) for letter, bounds in zip("abc", kind.numbers, strict=False)}
    first, second, third = order.sample(NAMES, 3)
    box, boxes = order.choice(BOXES)
    words = {"things": order.choice(THINGS), "gets": order.choice(GETS), "loses": order.choice(LOSES)}
    sentences, answer = solve(kind.working, numbers)
    if answer < 1:
        return None
    prompt = kind.text.format(name=first, other=second, third=third, box=box, boxes=boxes, **words, **numbers)
    solution = " ".join([*sentences, f"The answer is {answer}."])
    row = {"prompt": prompt, "answer": str(answer), "solution": solution, "kind": name}
    return (name, *numbers.values()), row


def generate(steps: Sequence[int], train_rows: int, test_rows: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Return the rows to train on and those held out, in an order that ``seed`` fixes.

    No prompt comes twice, and no row to train on has the kind and the numbers of one that is held out. Raises
    ConfigError where there are not as many different problems.
    """
    order = random.Random(seed)
    names = [name for name, kind in KINDS.items() if kind.steps in steps]
    if not names:
        raise ConfigError(f"--steps {','.join(map(str, steps))} must name 1, 2 or both")
    held_out: dict[tuple, dict] = {}
    train: dict[str, dict] = {}
    for _ in range(20 * (train_rows + test_rows)):
        key, row = draw(order.choice(names), order) or (None, None)
        if row is None:
            continue
        if len(held_out) < test_rows:
            held_out.setdefault(key, row)
        elif len(train) < train_rows and key not in held_out:
            train.setdefault(row["prompt"], row)
    if len(held_out) < test_rows or len(train) < train_rows:
        raise ConfigError(
            f"{len(held_out)} problems to hold out and {len(train)} to train on were found, and {test_rows} and "
            f"{train_rows} are asked; ask for fewer"
        )
    return list(train.values()), list(held_out.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    parser.add_argument("--steps", default="1,2", help="operations of a problem: 1, 2 or 1,2 (default: 1,2)")
    parser.add_argument("--train-rows", type=int, default=2000, metavar="N", help="default: 2000")
    parser.add_argument("--test-rows", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--seed", type=int, default=0, help="of the problems")
    options = parser.parse_args(arguments)
    try:
        if not options.steps.replace(",", "").isdigit() or min(options.train_rows, options.test_rows) < 1:
            raise ConfigError(
                f"--steps {options.steps}, --train-rows {options.train_rows} and --test-rows {options.test_rows} must "
                "be 1, 2 or 1,2 and at least 1"
            )
        steps = [int(part) for part in options.steps.split(",") if part]
        train, held_out = generate(steps, options.train_rows, options.test_rows, options.seed)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", held_out), ("train", train)):
        for row in part:
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
        text = "".join(json.dumps(row) + "\n" for row in part)
        (options.out / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"wrote {options.out / name}.jsonl: {len(part)} problems")
    return 0


if __name__ == "__main__":
    sys.exit(main())
