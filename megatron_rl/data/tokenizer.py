"""The loading of a run's tokenizer, with checks of its files."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Mapping

from megatron_rl.config import ModelConfig
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import check, field, read_object

# The JSON files of a tokenizer's folder. Each is read before transformers reads it, so that an
# error names the file and the place.
JSON_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
)
# A folder holds the tokens in one of these files, whatever its tokenizer_config.json says.
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken", "*.spm", "*.bpe")


def load_tokenizer(model: ModelConfig, vocab_size: int):
    """Return the run's tokenizer, a Hugging Face tokenizer.

    vocab_size: the number of tokens of the model; every id of the tokenizer must be below it.

    Raises ConfigError, naming the file, for a tokenizer that cannot be loaded, that has no end of
    sequence (no completion would end), or that has ids beyond the model's vocabulary.
    """
    from transformers import AutoTokenizer

    # The files are checked first, then transformers loads them.
    path = pathlib.Path(model.tokenizer_path or model.hf_path)
    tokens = _check_files(path, vocab_size)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        ids = tokenizer.get_vocab()
    except Exception as error:  # each kind of tokenizer raises errors of its own; tokenizers raises a plain Exception
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"no tokenizer can be loaded from {str(path)!r} ({type(error).__name__}: {reason}); name one by "
            "model.tokenizer_path"
        ) from error
    # What a run needs of it: an end of sequence, ids of the model, a chat template that is text.
    eos = tokenizer.eos_token
    if tokenizer.eos_token_id is None or (tokens and eos not in tokens):
        fault = "has no eos_token" if eos is None else f"has the eos_token {quoted(eos)}, which is none of its tokens"
        raise ConfigError(
            f"the tokenizer of {str(path)!r} {fault}, so no completion would end; name one in its tokenizer_config.json"
        )
    _check_ids(ids, f"the tokenizer of {str(path)!r}", vocab_size)
    if not isinstance(tokenizer.chat_template, (str, dict, type(None))):
        raise ConfigError(
            f"{path / 'tokenizer_config.json'}: chat_template must be a text, and it is "
            f"{quoted(tokenizer.chat_template)}"
        )
    return tokenizer


def _check_files(folder: pathlib.Path, vocab_size: int) -> set[str]:
    """Return the set of tokens listed in a tokenizer's folder; an empty set if it has no tokenizer.json.

    Raises ConfigError for a folder without a tokenizer's files, for a file that is no JSON object,
    and for invalid ids, since tokenizers 0.22 allocates memory by the largest id.
    """
    if not folder.is_dir():
        raise ConfigError(f"no tokenizer can be loaded from {str(folder)!r}: there is no such directory")
    files = {name: read_object(folder / name) for name in JSON_FILES if (folder / name).exists()}
    if not any(any(folder.glob(pattern)) for pattern in VOCABULARIES):
        raise ConfigError(
            f"no tokenizer can be loaded from {str(folder)!r}: it holds none of {', '.join(VOCABULARIES)}; copy the "
            "model's tokenizer there, or name another directory by model.tokenizer_path"
        )
    settings = files.get("tokenizer_config.json", {})
    if settings.get("model_max_length") is not None:
        check(settings["model_max_length"], f"{folder / 'tokenizer_config.json'}: model_max_length", float)
    for name in ("vocab.json", "added_tokens.json"):
        _check_vocabulary(files.get(name, {}), str(folder / name), vocab_size)
    if "tokenizer.json" not in files:
        return set()
    where = str(folder / "tokenizer.json")
    model = field(files["tokenizer.json"], "model", dict, where)
    vocabulary = model.get("vocab") or {}
    if not isinstance(vocabulary, list):
        check(vocabulary, f"{where}: model.vocab", dict)
    if isinstance(vocabulary, dict):  # Unigram has a list, in the order of the ids
        _check_vocabulary(vocabulary, f"{where}: model.vocab", vocab_size)
    added = check(files["tokenizer.json"].get("added_tokens") or [], f"{where}: added_tokens", list)
    decoder = check(settings.get("added_tokens_decoder") or {}, f"{where}: added_tokens_decoder", dict)
    named = [x.get("content") for x in (*added, *decoder.values()) if isinstance(x, dict)]
    own = vocabulary if isinstance(vocabulary, dict) else [x[0] for x in vocabulary if isinstance(x, list) and x]
    return {x for x in (*own, *named, *files.get("added_tokens.json", {})) if isinstance(x, str)}


def _check_vocabulary(ids: Mapping[str, object], where: str, vocab_size: int) -> None:
    """Raise ConfigError for an id that is no integer, is beyond the model's vocabulary, or belongs to two tokens.

    ids: {token: id}.
    where: the file and field of the vocabulary, for errors.
    """
    for token, number in ids.items():
        check(number, f"{where}: the id of {quoted(token)}", int, least=0)
    _check_ids(ids, where, vocab_size)
    if len(set(ids.values())) < len(ids):
        number, times = Counter(ids.values()).most_common(1)[0]
        tokens = ", ".join(quoted(token) for token, each in ids.items() if each == number)
        raise ConfigError(f"{where} gives the id {number} to {times} tokens, {tokens[:200]}; each needs one of its own")


def _check_ids(ids: Mapping[str, int], where: str, vocab_size: int) -> None:
    """Raise ConfigError if an id of ``ids``, {token: id}, is beyond the model's vocabulary."""
    outside = [(number, token) for token, number in ids.items() if number >= vocab_size]
    if outside:
        number, token = max(outside)
        raise ConfigError(
            f"{where} has {len(outside)} of {len(ids)} ids beyond the model's vocab_size={vocab_size}, {number} of "
            f"{quoted(token)} the largest; give the model's own tokenizer by model.tokenizer_path"
        )
