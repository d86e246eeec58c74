"""Make conversations of the quickstart's arithmetic, and give its model a chat template.

Example:
  python examples/sft/prepare.py --inputs runs/sft/inputs --conversations 600

Written into the folder of examples/quickstart/prepare.py:
  chats.jsonl   conversations of two turns: ``{"messages": [{"role": "user", "content": "7+5="}, ...]}``
  model/        its tokenizer gets the template: a turn's text, and the end of sequence behind the assistant's
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import sys
from collections.abc import Sequence

from transformers import AutoTokenizer


def conversation(problems: Sequence[dict]) -> list[dict]:
    """Return the messages of a conversation: each problem by the user, its answer by the assistant."""
    turns = []
    for problem in problems:
        turns.append({"role": "user", "content": problem["prompt"]})
        turns.append({"role": "assistant", "content": problem["answer"]})
    return turns


def template_of(end: str) -> str:
    """Return a chat template. ``end``: the end-of-sequence token."""
    return (
        "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}" + end + "{% endif %}"
        "{% endfor %}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=pathlib.Path, required=True, help="the quickstart's folder")
    parser.add_argument("--conversations", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rows = [json.loads(line) for line in (options.inputs / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    numbers = random.Random(options.seed)
    chats = [{"messages": conversation(numbers.sample(rows, 2))} for _ in range(options.conversations)]
    (options.inputs / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(options.inputs / "model")
    tokenizer.chat_template = template_of(tokenizer.eos_token)
    tokenizer.save_pretrained(options.inputs / "model")
    print(f"{len(chats)} conversations: {options.inputs / 'chats.jsonl'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
