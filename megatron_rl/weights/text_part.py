"""The text part of a vision-language model's folder: its fields of config.json, and the names of its tensors.

A folder of such a model (``TEXT_PARTS``) is read as if it held the text model alone, as transformers'
``AutoModelForCausalLM`` reads it (5.19): the config is ``text_config``, the tensors are those named
``model.language_model.…`` and the LM head.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.json_text import check, read_object
from megatron_rl.weights.families.register import TEXT_PARTS

INNER = "text_config"
# The fields that are taken from the outer config where the text part has none of its own.
OUTER = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
OUTER += ("quantization_config", "compression_config", "transformers_version")
WITHIN, PLAIN = "model.language_model.", "model."  # the starts of a text tensor's name in the files, and here


def text_fields(fields: Mapping[str, object], where: str) -> dict[str, object]:
    """Return the fields of the text part's config; the fields unchanged unless ``model_type`` is in ``TEXT_PARTS``.

    A field of ``OUTER`` is taken from beside ``text_config`` if ``text_config`` lacks it.

    fields: the fields of a config.json.
    where: the file's name, for messages.

    Raises ConfigError if ``text_config`` is missing, is no object, or is another model's.
    """
    family = TEXT_PARTS.get(str(fields.get("model_type")))
    if family is None:
        return dict(fields)
    own = f"{where}: {INNER}"
    if fields.get(INNER) is None:
        raise ConfigError(
            f"{where} holds a {quoted(fields['model_type'])} model and no {INNER}, the fields of its text part; give "
            f"the config of its weights, or a text model's with model_type={family}"
        )
    inner = check(fields[INNER], own, dict)
    if inner.get("model_type") not in (None, family, fields["model_type"]):
        raise ConfigError(f"{own} holds a {quoted(inner['model_type'])} model; that of a text part here is {family}")
    taken = {name: fields[name] for name in OUTER if fields.get(name) is not None and inner.get(name) is None}
    return {**inner, **taken, "model_type": family, "architectures": [causal_class(family)]}


def has_text_part(folder: str | pathlib.Path) -> bool:
    """Return whether a folder's config.json is a vision-language model's, of whose text part a model is built here."""
    path = pathlib.Path(folder) / "config.json"
    return path.is_file() and read_object(path).get("model_type") in TEXT_PARTS


def causal_class(family: str) -> str:
    """Return the name of transformers' class of causal language models of a ``model_type``."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]


def write_text_config(path: pathlib.Path) -> None:
    """Replace a vision-language model's config.json by its text part's; any other config.json is left as it is."""
    fields = read_object(path)
    if fields.get("model_type") in TEXT_PARTS:
        path.write_text(json.dumps(text_fields(fields, str(path)), indent=2) + "\n", encoding="utf-8")


def text_name(name: str) -> str:
    """Return the name here of a tensor in the files: ``model.language_model.norm.weight`` → ``model.norm.weight``."""
    return PLAIN + name.removeprefix(WITHIN) if name.startswith(WITHIN) else name


def text_names(files: Mapping[str, pathlib.Path], folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Return {name here: file} of {name in the files: file}; names outside the text part are left as they are.

    folder: the model folder, for messages.

    Raises ConfigError if two tensors of the files would have one name.
    """
    renamed: dict[str, pathlib.Path] = {}
    for name, file in files.items():
        if (own := text_name(name)) in renamed or (own != name and own in files):
            raise ConfigError(f"{folder} holds both {own} and {WITHIN}{own.removeprefix(PLAIN)}; remove one of them")
        renamed[own] = file
    return renamed


class TextHandle:
    """Gives safetensors' handle of a file, with the names of a text model's tensors.

    handle: safetensors' handle, with the names in the file.
    """

    def __init__(self, handle: Any) -> None:
        self.handle, self.names = handle, {text_name(name): name for name in handle.keys()}  # noqa: SIM118

    def keys(self) -> Iterable[str]:
        return self.names.keys()

    def get_slice(self, name: str) -> Any:
        return self.handle.get_slice(self.names[name])
