"""Calls `megatron-rl convert` on folders of tiny models, which may be changed."""

import pathlib

import torch
from safetensors.torch import load_file

from megatron_rl.commands.convert.command import main
from tests.equality.odd_folders import config
from tests.reference import tiny_model


def run(*arguments: object) -> int:
    return main([str(x) for x in arguments])


def write_model(folder: pathlib.Path, family: str = "qwen2_tied", *, dtype=torch.float32, shards: str = "1GB"):
    """Write a Hugging Face directory with side files that are no weights; return its model."""
    _, model = tiny_model(family, layers=4)
    model.to(dtype).save_pretrained(folder, max_shard_size=shards)
    (folder / "tokenizer.json").write_text('{"of": "nothing"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_own.py").write_text("raise SystemExit")
    return model


def tensors_of(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Return whether both hold the same names, each with the same dtype and bits."""
    dtypes = [{name: x.dtype for name, x in held.items()} for held in (found, wanted)]
    return dtypes[0] == dtypes[1] and all(torch.equal(found[name], x) for name, x in wanted.items())


def changed(folder: pathlib.Path, **values: object) -> None:
    """Change fields of a folder's config.json."""
    config(**values)(folder)
