"""Checks weights/model_dtype.py: the dtype that `model.dtype: auto` stands for."""

import json
import pathlib
import types

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.config import Config, ModelConfig, load_config
from megatron_rl.weights.config_json import parse_hf_config
from megatron_rl.weights.model_dtype import settle_dtype
from megatron_rl.weights.reader import EMBEDDING_NAME
from tests.reference import tiny_config

FILES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "bfloat16"}


def settled(config: Config, stated: object, *, on_gpu: bool) -> str:
    return settle_dtype(config.model, types.SimpleNamespace(dtype=stated), on_gpu=on_gpu).dtype


def test_a_cpu_and_a_folder_without_weights_or_word_take_float32(tmp_path: pathlib.Path) -> None:
    assert {settled(Config(), stated, on_gpu=False) for stated in [*FILES, "float16", "bfloat16", None]} == {"float32"}
    config = load_config(None, [f"model.hf_path={tmp_path}"])
    assert settled(config, None, on_gpu=True) == "float32"


@pytest.mark.parametrize("stated", FILES, ids=str)
def test_a_gpu_takes_the_dtype_that_the_config_states(stated: torch.dtype) -> None:
    for said in (stated, str(stated).removeprefix("torch.")):
        assert settled(Config(), said, on_gpu=True) == FILES[stated]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dtype_that_is_set_stays(dtype: str) -> None:
    model = ModelConfig(dtype=dtype)
    for stated in FILES:
        for on_gpu in (False, True):
            assert settle_dtype(model, types.SimpleNamespace(dtype=stated), on_gpu=on_gpu) is model


@pytest.mark.parametrize("dtype", FILES, ids=str)
def test_files_speak_where_their_config_does_not(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    """Without a `dtype` in config.json the embedding's counts."""
    tiny_config("llama").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields = {name: value for name, value in fields.items() if name not in ("dtype", "torch_dtype")}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file({EMBEDDING_NAME: torch.zeros(2, dtype=dtype)}, tmp_path / "model.safetensors")
    hf_config = parse_hf_config(tmp_path)
    config = load_config(None, [f"model.hf_path={tmp_path}"])
    assert settle_dtype(config.model, hf_config, on_gpu=True).dtype == FILES[dtype]
