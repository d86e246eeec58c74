"""The model of `megatron-rl new --tiny`: random weights and a token per character, small enough for two CPU cores."""

from __future__ import annotations

import pathlib

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.utils import logging

from megatron_rl.errors import ConfigError

EOS = "<|endoftext|>"
PAD = "<|pad|>"
CHARACTERS = "0123456789+-*= "


def byte_level(model: models.BPE) -> Tokenizer:
    """Return a byte-level BPE tokenizer that splits text exactly as transformers' Qwen2Tokenizer does.

    model: the vocabulary and merges.

    If the folder with the saved tokenizer also has a config.json of model_type qwen2, AutoTokenizer
    (transformers 5.19) builds a Qwen2Tokenizer. That takes only vocabulary and merges from the
    tokenizer's files. As both split text alike, a text has the same tokens with and without the
    config.json.
    """
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    # In this pattern a digit is a token of its own (\p{N}), so that arithmetic has one alphabet.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_characters(characters: str) -> Tokenizer:
    """Return a BPE tokenizer without merges: one token for each of ``characters``, and the tokens EOS and PAD.

    Not covered: a character outside ``characters`` has no token. Encoding drops it silently, since
    the tokenizer has no token for unknown text.

    Raises ConfigError if there is no character, or one that is not ASCII.
    """
    foreign = sorted(set(characters) - set(map(chr, range(128))))
    if not characters or foreign:
        problem = f"has {foreign[0]!r}, which is more than one byte; use BPE for it" if foreign else "is empty"
        raise ConfigError(
            f'--characters {problem}; give the ASCII characters that texts may have, as in "0123456789+-= "'
        )
    vocabulary = {EOS: 0, PAD: 1}
    for character in characters:
        # The byte-level alphabet writes a byte as a printable character: a space as \u0120.
        [(symbol, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(character)
        vocabulary.setdefault(symbol, len(vocabulary))
    tokenizer = byte_level(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([EOS, PAD])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: str | pathlib.Path) -> None:
    """Write a tokenizer to the directory ``out``, from which AutoTokenizer loads it without a network."""
    # clean_up_tokenization_spaces would turn " ." into "." on decoding, and break the round trip.
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    wrapped.save_pretrained(out)


def write_tiny_model(out: str | pathlib.Path) -> None:
    """Write a Qwen2 model of 0.2M random float32 weights into ``out``, with a tokenizer for digits and signs."""
    tokenizer = make_characters(CHARACTERS)
    config = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(PAD),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    logging.disable_progress_bar()
    model.save_pretrained(out)
    save_tokenizer(tokenizer, out)
