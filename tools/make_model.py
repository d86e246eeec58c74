"""Make a small model directory with random weights: config.json, model.safetensors and a copy of a tokenizer.

Example:
  python tools/make_model.py --family qwen2 --hidden 128 --layers 4 --heads 4 --kv-heads 2 --intermediate 384 \\
      --tokenizer tokenizer --out model --seed 0

The directory loads with transformers.AutoModelForCausalLM and AutoTokenizer, offline. Equal options and seed give equal
weights.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from megatron_rl.errors import ConfigError
from megatron_rl.weights.families.register import FAMILIES

DENSE_FAMILIES = sorted(name for name, family in FAMILIES.items() if family.experts is None)

# The head sizes that the attention kernels of vLLM and of Transformer Engine have in common.
HEAD_DIMS = (32, 64, 80, 96, 112, 128)


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Holds the sizes of a decoder.

    Raises ConfigError if they do not fit each other, or no attention kernel takes the head size.
    """

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 384
    max_position: int = 1024
    tied: bool = True

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "tied" and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
        if self.hidden % self.heads or self.hidden // self.heads not in HEAD_DIMS:
            raise ConfigError(
                f"--hidden {self.hidden} / --heads {self.heads} = {self.hidden / self.heads:g} is the size of a head "
                f"and must be one of {', '.join(map(str, HEAD_DIMS))}; change either"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def delta_sizes(sizes: ModelSizes) -> dict[str, int]:
    """Return the fields of gated delta nets: the heads of attention, and a head of k for each of its key-value heads."""
    return dict(
        linear_num_key_heads=sizes.kv_heads,
        linear_num_value_heads=sizes.heads,
        linear_key_head_dim=sizes.head_dim,
        linear_value_head_dim=sizes.head_dim,
    )


def make_model(
    family: str, sizes: ModelSizes, tokenizer_dir: str | pathlib.Path, out: str | pathlib.Path, seed: int
) -> dict:
    """Write config, random float32 weights and tokenizer to ``out``; the vocabulary is exactly the tokenizer's.

    Returns a report as JSON-able values. Raises ConfigError if the copied tokenizer does not load back equal.
    """
    # A path that is not a directory would be looked up on the Hugging Face hub.
    if not pathlib.Path(tokenizer_dir).is_dir():
        raise ConfigError(
            f"--tokenizer {str(tokenizer_dir)!r} is not a directory; make one with tools/make_tokenizer.py"
        )
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    extra = {"head_dim": sizes.head_dim} if family != "qwen2" else {}  # Qwen2Config has no such field
    if family == "qwen3_5_text":
        extra |= delta_sizes(sizes)
    config = CONFIG_MAPPING[family](
        vocab_size=len(tokenizer),
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        intermediate_size=sizes.intermediate,
        max_position_embeddings=sizes.max_position,
        tie_word_embeddings=sizes.tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **extra,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _check_tokenizer(tokenizer, out)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    report = {
        "out": str(out),
        "family": family,
        "parameters": num_parameters,
        "vocab_size": len(tokenizer),
        "seed": seed,
    }
    return report | asdict(sizes)


def _check_tokenizer(tokenizer, out: str | pathlib.Path) -> None:
    """Raise ConfigError if the copied tokenizer loads with another cut or vocabulary.

    Beside a config.json, AutoTokenizer may pick the model family's own tokenizer class, which cuts text differently.
    """
    copied = AutoTokenizer.from_pretrained(out)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        before, after = (repr(getattr(x.backend_tokenizer, part)) for x in (tokenizer, copied))
        if before != after:
            raise ConfigError(
                f"the tokenizer in {out} loads with another {part}: {after} instead of {before}; make it with "
                "tools/make_tokenizer.py"
            )
    if copied.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"the tokenizer in {out} loads with {len(copied)} tokens that are not the original {len(tokenizer)}"
        )


def add_size_arguments(parser: argparse.ArgumentParser, defaults: ModelSizes) -> None:
    """Add the options of ModelSizes to a parser, for this tool and the examples."""
    for name, value in asdict(defaults).items():
        if name != "tied":
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default: {value}")
    tied_help = "share input and output embeddings"
    parser.add_argument("--tied", action=argparse.BooleanOptionalAction, default=defaults.tied, help=tied_help)


def sizes_from(options: argparse.Namespace) -> ModelSizes:
    """Return the ModelSizes of parsed options; raises ConfigError."""
    values = vars(options)
    return ModelSizes(**{name: values[name] for name in ModelSizes.__dataclass_fields__})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=DENSE_FAMILIES, default="qwen2")
    add_size_arguments(parser, ModelSizes())
    parser.add_argument(
        "--tokenizer", required=True, help="directory of a tokenizer, as tools/make_tokenizer.py writes it"
    )
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed to this file")
    options = parser.parse_args(arguments)
    try:
        report = make_model(options.family, sizes_from(options), options.tokenizer, options.out, options.seed)
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
