"""Make the quickstart's inputs: integer arithmetic, a character tokenizer, a model of 0.8 million parameters.

Example:
  python examples/quickstart/prepare.py --out runs/quickstart-data --digits 1 --operations +,-

Written:
  train.jsonl   every "a<op>b=" with a and b of at most --digits digits, shuffled:
                prompt "7+5=", answer "12", solution "12"
  test.jsonl    --test-rows of them, held out (0: not written)
  tokenizer/    one token per character
  model/        config.json, random weights and the tokenizer
"""

from __future__ import annotations

import argparse
import json
import operator
import pathlib
import random
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

from make_model import ModelSizes, add_size_arguments, make_model, sizes_from
from make_tokenizer import make_tokenizer

from megatron_rl.errors import ConfigError

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def generate(digits: int, operations: Sequence[str], seed: int) -> list[dict]:
    """Return every problem once, in an order that ``seed`` fixes; raises ConfigError for an unknown operation.

    Example row: ``{"prompt": "7+5=", "answer": "12", "solution": "12"}``.
    """
    unknown = [name for name in operations if name not in OPERATIONS]
    if unknown or not operations:
        raise ConfigError(
            f"--operations {','.join(operations)!r} must be a comma-separated choice of {','.join(OPERATIONS)}"
        )
    numbers = range(10**digits)
    rows = []
    for name in dict.fromkeys(operations):
        for a in numbers:
            for b in numbers:
                answer = str(OPERATIONS[name](a, b))
                rows.append({"prompt": f"{a}{name}{b}=", "answer": answer, "solution": answer})
    random.Random(seed).shuffle(rows)
    return rows


def write_rows(path: pathlib.Path, rows: Sequence[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def prepare(options: argparse.Namespace) -> dict:
    """Write the data, the tokenizer and the model; return a report as JSON-able values. Raises ConfigError."""
    sizes = sizes_from(options)
    rows = generate(options.digits, options.operations.split(","), options.seed)
    if not 0 <= options.test_rows < len(rows):
        raise ConfigError(
            f"--test-rows {options.test_rows} must be at least 0 and leave a row of {len(rows)} to train on"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    test, train = rows[: options.test_rows], rows[options.test_rows :]
    write_rows(options.out / "train.jsonl", train)
    if test:
        write_rows(options.out / "test.jsonl", test)
    # Every operation has a token, even if not chosen: a model of one kind of problem can continue with another.
    texts = [row["prompt"] + row["solution"] for row in rows]
    tokenizer_report = make_tokenizer(options.out / "tokenizer", texts, None, f"0123456789{''.join(OPERATIONS)}= ")
    model_report = make_model(options.family, sizes, options.out / "tokenizer", options.out / "model", options.seed)
    return {"train_rows": len(train), "test_rows": len(test), "tokenizer": tokenizer_report, "model": model_report}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    parser.add_argument("--digits", type=int, choices=(1, 2), default=1, help="of each operand, at most (default: 1)")
    parser.add_argument("--operations", default="+,-", help="comma-separated, of + - * (default: +,-)")
    parser.add_argument("--test-rows", type=int, default=0, help="rows held out in test.jsonl (default: 0)")
    parser.add_argument("--family", choices=("qwen2", "qwen3", "llama", "qwen3_5_text"), default="qwen2")
    add_size_arguments(parser, ModelSizes(max_position=64))
    parser.add_argument("--seed", type=int, default=0, help="of the order of rows and of the model's weights")
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed to this file")
    options = parser.parse_args(arguments)
    try:
        report = prepare(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text = json.dumps(report, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
