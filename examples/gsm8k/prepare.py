"""Make the GSM8K example's inputs: the dataset in megatron_rl's columns, a tokenizer trained on it, a small model.

Example:
  python examples/gsm8k/prepare.py --gsm8k grade-school-math/grade_school_math/data --out runs/gsm8k-data

DIR of --gsm8k holds train.jsonl and test.jsonl of github.com/openai/grade-school-math (columns question, answer).

Written:
  train.jsonl, test.jsonl   prompt (the question), solution (the worked answer, ending in "#### n"), answer (the number)
  tokenizer/                byte-level BPE, trained on train.jsonl
  model/                    config.json, random weights and the tokenizer
The last two are for a model made here, and --data-only leaves them out.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Sequence

from transformers import AutoTokenizer

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

from make_model import ModelSizes, add_size_arguments, make_model, sizes_from
from make_tokenizer import make_tokenizer

from megatron_rl.data.rows import load_rows
from megatron_rl.errors import ConfigError

CALCULATOR = re.compile(r"<<[^<>]*>>")  # <<48/2=24>>: a tool call of the dataset's own, not text
NUMBER = re.compile(r"-?\d+(\.\d+)?")
LAST_LINE = "#### {answer}"  # the dataset's own


def calculations(row: dict) -> int:
    """Return how many steps of a solution calculate, by the marks that the dataset puts there."""
    return len(CALCULATOR.findall(row["answer"]))


def convert(row: dict, where: str, last_line: str = LAST_LINE) -> dict:
    """Return one row of GSM8K as prompt, solution and answer.

    last_line: ends the solution, with the number in place of ``{answer}``.

    Example: answer ``"48/2 = <<48/2=24>>24 clips\\n#### 1,024"`` gives solution ``"48/2 = 24 clips\\n#### 1,024"`` and
    answer ``"1024"``. Raises ConfigError, beginning with ``where``, for a row that is not GSM8K's.
    """
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str):
            raise ConfigError(f"{where} has no text column {key!r}; its columns are {', '.join(map(repr, row))}")
    solution = CALCULATOR.sub("", row["answer"])
    text, mark, last = solution.rpartition("####")
    answer = last.strip().replace(",", "")
    if not mark or not NUMBER.fullmatch(answer):
        raise ConfigError(f"{where}: the answer must end in '#### <number>' and ends in {solution[-40:]!r}")
    if last_line != LAST_LINE:
        solution = text + last_line.replace("{answer}", answer)
    return {"prompt": row["question"], "solution": solution, "answer": answer}


def write_split(
    source: pathlib.Path, target: pathlib.Path, last_line: str = LAST_LINE, max_calculations: int | None = None
) -> list[dict]:
    """Convert one file and return its converted rows: all, or those of 1 to ``max_calculations`` calculations."""
    rows = []
    for number, row in enumerate(load_rows(source, key="--gsm8k")):
        converted = convert(row, f"row {number} of {source}", last_line)
        if max_calculations is None or 0 < calculations(row) <= max_calculations:
            rows.append(converted)
    target.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return rows


def prepare(options: argparse.Namespace) -> dict:
    """Write the data, the tokenizer and the model; return a report as JSON-able values. Raises ConfigError."""
    sizes = sizes_from(options)  # before the slow part, so that a wrong size is reported at once
    options.out.mkdir(parents=True, exist_ok=True)
    train = write_split(
        options.gsm8k / "train.jsonl", options.out / "train.jsonl", options.last_line, options.max_calculations
    )
    test = write_split(options.gsm8k / "test.jsonl", options.out / "test.jsonl", options.last_line)
    if options.data_only:
        return {"train_rows": len(train), "test_rows": len(test)}
    texts = [row[key] for row in train for key in ("prompt", "solution")]
    tokenizer_report = make_tokenizer(options.out / "tokenizer", texts, options.vocab_size, None)
    model_report = make_model(options.family, sizes, options.out / "tokenizer", options.out / "model", options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.out / "model")
    # The least data.max_prompt_tokens and rollout.max_response_tokens, the response's end-of-sequence token included.
    longest = {
        key: max(map(len, tokenizer([row[key] for row in train + test], add_special_tokens=False).input_ids))
        for key in ("prompt", "solution")
    }
    lengths = {"longest_prompt_tokens": longest["prompt"], "longest_solution_tokens": longest["solution"] + 1}
    return {
        "train_rows": len(train),
        "test_rows": len(test),
        **lengths,
        "tokenizer": tokenizer_report,
        "model": model_report,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gsm8k", type=pathlib.Path, required=True, metavar="DIR", help="where train.jsonl and test.jsonl are"
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    parser.add_argument("--data-only", action="store_true", help="write train.jsonl and test.jsonl, and no model")
    parser.add_argument(
        "--last-line", default=LAST_LINE, metavar="TEXT", help=f"of each solution; default: {LAST_LINE!r}"
    )
    parser.add_argument(
        "--max-calculations",
        type=int,
        metavar="N",
        help="train only on solutions of 1 to N calculations; the test split stays whole",
    )
    parser.add_argument("--vocab-size", type=int, default=2048, help="default: 2048")
    parser.add_argument("--family", choices=("qwen2", "qwen3", "llama"), default="qwen2")
    add_size_arguments(parser, ModelSizes(hidden=256, intermediate=704))
    parser.add_argument("--seed", type=int, default=0, help="of the model's weights")
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
