"""Make a small tokenizer: byte-level BPE trained on JSONL columns, or one token per character.

Examples:
  python tools/make_tokenizer.py --input train.jsonl --columns question answer --vocab-size 2048 --out tokenizer
  python tools/make_tokenizer.py --characters "0123456789+-= " --out tokenizer

The directory loads offline with transformers.AutoTokenizer. Before it exits 0, the tool loads it back and checks that
decode(encode(x)) == x for every text of its input.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from megatron_rl.commands.tiny_model import EOS, PAD, byte_level, make_characters, save_tokenizer
from megatron_rl.data.rows import load_rows
from megatron_rl.errors import ConfigError


def read_texts(paths: Sequence[str | pathlib.Path], columns: Sequence[str]) -> list[str]:
    """Return the named columns of every row of JSONL files.

    Raises ConfigError if a file, a row or a column is missing.
    """
    texts = []
    for path in paths:
        for number, row in enumerate(load_rows(path, key="--input")):
            for column in columns:
                if not isinstance(row.get(column), str):
                    known = ", ".join(map(repr, row))
                    raise ConfigError(
                        f"--columns {column}: row {number} of {path} has no text there; its columns are {known}"
                    )
                texts.append(row[column])
    return texts


def train_bpe(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most ``vocab_size`` tokens, EOS and PAD included; every digit is a token of its own.

    Raises ConfigError for fewer than 258 tokens: 256 bytes and the two special ones.
    """
    smallest = 256 + 2
    if vocab_size < smallest:
        raise ConfigError(f"--vocab-size {vocab_size} must be at least {smallest}: 256 bytes and 2 special tokens")
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def check_roundtrip(directory: str | pathlib.Path, texts: Sequence[str]) -> int:
    """Load the directory, encode and decode every text, and return the number of tokens.

    Raises ConfigError on the first difference.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory)
    num_tokens = 0
    for number, text in enumerate(texts):
        token_ids = tokenizer(text, add_special_tokens=False).input_ids
        num_tokens += len(token_ids)
        decoded = tokenizer.decode(token_ids)
        if decoded != text:
            raise ConfigError(
                f"text {number} does not survive decode(encode(x)): {text!r} came back as {decoded!r}; add the "
                "missing characters to --characters, or normalize the text to NFC"
            )
    return num_tokens


def make_tokenizer(
    out: str | pathlib.Path, texts: Sequence[str], vocab_size: int | None, characters: str | None
) -> dict:
    """Make, save and check a tokenizer of ``characters`` if they are given, else BPE of ``vocab_size`` tokens.

    Returns a report as JSON-able values. Raises ConfigError, see `train_bpe`, `make_characters`, `check_roundtrip`.
    """
    tokenizer = train_bpe(texts, vocab_size) if characters is None else make_characters(characters)
    save_tokenizer(tokenizer, out)
    checked = [*texts] if characters is None else [characters, *texts]
    num_tokens = check_roundtrip(out, checked)
    return {
        "out": str(out),
        "kind": "byte_level_bpe" if characters is None else "characters",
        "vocab_size": tokenizer.get_vocab_size(),
        "texts_checked": len(checked),
        "characters_per_token": round(sum(map(len, checked)) / max(num_tokens, 1), 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", default=[], metavar="JSONL", help="files to train on (BPE) and to check")
    parser.add_argument(
        "--columns", nargs="+", default=["prompt", "solution"], help="their columns (default: prompt solution)"
    )
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens, special ones included (default: 2048)")
    parser.add_argument("--characters", help="make a character tokenizer of just these instead")
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed to this file")
    options = parser.parse_args(arguments)
    if options.characters is None and not options.input:
        parser.error("give --input files to train on, or --characters")
    try:
        texts = read_texts(options.input, options.columns)
        report = make_tokenizer(options.out, texts, options.vocab_size, options.characters)
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
