"""Make the calculator example's inputs: products of two-digit numbers, a character tokenizer, a small model.

Example:
  python examples/calculator/prepare.py --out runs/calculator-data --call-share 0.3

Written:
  train.jsonl   every "a*b=" with a and b of two digits, shuffled: prompt "47*83=", answer "3901", and the solution that
                the warm-up imitates: for a share of the rows a call, its result and the answer (messages), for the
                others the answer alone (a text)
  test.jsonl    --test-rows of them, held out
  tokenizer/    one token per character
  model/        config.json, random weights of 0.8 million parameters, and the tokenizer
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

from make_model import ModelSizes, add_size_arguments, make_model, sizes_from
from make_tokenizer import make_tokenizer

from megatron_rl.errors import ConfigError

CHARACTERS = "0123456789+-*/%().=<>calceror "  # of prompts, calls, results and the calculator's "error"
NUMBERS = range(10, 100)


def generate(call_share: float, seed: int) -> list[dict]:
    """Return every product once, in an order that ``seed`` fixes; ``call_share`` of the solutions call the calculator.

    Example row: ``{"prompt": "47*83=", "answer": "3901", "solution": [{"role": "assistant", "content":
    "<calc>47*83</calc>"}, {"role": "tool", "content": "3901"}, {"role": "assistant", "content": "3901"}]}``.
    """
    rows = [(a, b) for a in NUMBERS for b in NUMBERS]
    order = random.Random(seed)
    order.shuffle(rows)
    problems = []
    for number, (a, b) in enumerate(rows):
        answer = str(a * b)
        calls = [
            {"role": "assistant", "content": f"<calc>{a}*{b}</calc>"},
            {"role": "tool", "content": answer},
            {"role": "assistant", "content": answer},
        ]
        problems.append(
            {"prompt": f"{a}*{b}=", "answer": answer, "solution": calls if number < call_share * len(rows) else answer}
        )
    order.shuffle(problems)
    return problems


def write_rows(path: pathlib.Path, rows: Sequence[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def prepare(options: argparse.Namespace) -> dict:
    """Write the data, the tokenizer and the model; return a report as JSON-able values. Raises ConfigError."""
    sizes = sizes_from(options)
    if not 0.0 <= options.call_share <= 1.0:
        raise ConfigError(f"--call-share {options.call_share} must be a share, from 0 to 1")
    rows = generate(options.call_share, options.seed)
    if not 1 <= options.test_rows < len(rows):
        raise ConfigError(
            f"--test-rows {options.test_rows} must be at least 1 and leave a row of {len(rows)} to train on"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    write_rows(options.out / "test.jsonl", rows[: options.test_rows])
    write_rows(options.out / "train.jsonl", rows[options.test_rows :])
    characters = "".join(dict.fromkeys(CHARACTERS))
    tokenizer_report = make_tokenizer(options.out / "tokenizer", [row["prompt"] for row in rows], None, characters)
    model_report = make_model(options.family, sizes, options.out / "tokenizer", options.out / "model", options.seed)
    return {
        "train_rows": len(rows) - options.test_rows,
        "test_rows": options.test_rows,
        "tokenizer": tokenizer_report,
        "model": model_report,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    parser.add_argument(
        "--call-share", type=float, default=0.3, help="of the solutions, those that call the calculator (default: 0.3)"
    )
    parser.add_argument("--test-rows", type=int, default=128, help="rows held out in test.jsonl (default: 128)")
    parser.add_argument("--family", choices=("qwen2", "qwen3", "llama"), default="qwen2")
    add_size_arguments(parser, ModelSizes(max_position=96))
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
