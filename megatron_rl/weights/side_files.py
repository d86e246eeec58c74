"""The files that are copied with a model's weights: config, generation config, tokenizer, chat templates, licence."""

from __future__ import annotations

import json
import pathlib
import shutil

from megatron_rl.json_text import read_object

SIDE_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".bpe")
SIDE_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
# These describe weights that are not written: an adapter's, or quantised ones.
LEFT_BEHIND = ("adapter_config.json", "quantize_config.json", "hf_quant_config.json")
# These describe a vision-language model's images and videos; the text part alone is written.
LEFT_BEHIND += ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
TEMPLATES = "additional_chat_templates"
# Parts of the names of a tokenizer's files; any file with one of the suffixes is a tokenizer's too.
TOKENIZER_NAMES = ("tokenizer", "special_tokens_map", "added_tokens", "chat_template", "vocab", "merges", "spiece")
TOKENIZER_SUFFIXES = (".model", ".jinja", ".tiktoken", ".spm", ".bpe")


def side_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of a model folder to copy unchanged: no weights, no files that describe weights, no code."""
    named = [x for x in sorted(folder.iterdir()) if x.is_file() and x.name not in LEFT_BEHIND]
    named = [x for x in named if not x.name.endswith(".index.json")]
    found = [x for x in named if x.suffix in SIDE_SUFFIXES or x.name.startswith(SIDE_NAMES)]
    return found + sorted((folder / TEMPLATES).glob("*.jinja"))


def is_tokenizers(file: pathlib.Path) -> bool:
    """Return whether a side file belongs to the tokenizer."""
    return file.name.startswith(TOKENIZER_NAMES) or file.suffix in TOKENIZER_SUFFIXES


def copy_side_files(source: pathlib.Path, target: pathlib.Path, *, tokenizer: pathlib.Path | None = None) -> list[str]:
    """Copy a model folder's side files into the folder ``target`` byte for byte, and return their names there.

    tokenizer: a folder whose tokenizer files are copied in place of the model's own; None for the
        model's own.
    """
    files = [(source, file) for file in side_files(source) if tokenizer is None or not is_tokenizers(file)]
    if tokenizer is not None:
        files += [(tokenizer, file) for file in side_files(tokenizer) if is_tokenizers(file)]
    names = []
    for folder, file in files:
        place = target / file.relative_to(folder)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, place)
        names.append(str(place.relative_to(target)))
    return names


def drop_fields(path: pathlib.Path, names: tuple[str, ...]) -> None:
    """Remove the fields ``names`` from the JSON object in a file; the file is not rewritten if it has none of them."""
    fields = read_object(path)
    kept = {name: value for name, value in fields.items() if name not in names}
    if len(kept) < len(fields):
        path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
