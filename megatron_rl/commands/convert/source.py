"""The Hugging Face directory that a conversion reads: its path on the disk, its config and its shape."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from megatron_rl.errors import ConfigError
from megatron_rl.model.hf_config import latent_angles, read_shape, rotary_tables
from megatron_rl.weights.config_json import read_fields, read_hf_config
from megatron_rl.weights.families.register import ALIASES, FAMILIES, MISSING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from megatron_rl.storage.remote import RemotePath
    from megatron_rl.weights.model_shape import ModelShape


def read_on_disk(folder: pathlib.Path | RemotePath, key: str, *, weights: bool = False) -> pathlib.Path:
    """Return the local path of a Hugging Face directory; a remote one's files are first copied to the host's cache.

    key: the argument's name in error messages.
    weights: whether the weight files are copied too.
    """
    if isinstance(folder, pathlib.Path):
        return folder
    from megatron_rl.hub.resolve import fetched_folder

    return fetched_folder(folder, key, weights=weights)


def read_model(folder: pathlib.Path, *, vocab_multiple: int = 1) -> tuple[PretrainedConfig, ModelShape]:
    """Return (Hugging Face config, ModelShape) of a Hugging Face directory.

    vocab_multiple: the vocabulary is padded to a multiple of this number.

    Raises ConfigError for a model that our tables (weights/families) do not cover; the message
    names the missing part.
    """
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} has no config.json; name a Hugging Face directory")
    family = read_fields(folder).get("model_type")
    if ALIASES.get(family, family) not in FAMILIES:
        missing = MISSING.get(family, "a file of its own in weights/families (CONTRIBUTING.md, Adding a family)")
        raise ConfigError(
            f"{folder} holds a {family!r} model, and the tables are for {', '.join(FAMILIES)}; missing for {family}: "
            f"{missing}. With NVIDIA's megatron-bridge installed (pip install 'megatron_rl[bridge]', a GPU) this "
            "command goes through it"
        )
    config = read_hf_config(folder)
    shape = read_shape(config, layer_spec="torch", vocab_multiple=vocab_multiple)
    # Either call raises for a rope scaling that the model would not apply.
    latent_angles(config, shape) if shape.kv_lora_rank else rotary_tables(config, shape.head_dim)
    return config, shape
