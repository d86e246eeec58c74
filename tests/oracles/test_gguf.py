"""`megatron-rl convert import --gguf` gives the tensors that transformers' own loading of a GGUF file gives."""

import pathlib
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.gguf_model import write_gguf

pytest.importorskip("gguf", reason="needs pip install 'megatron_rl[gguf]'")
pytest.importorskip("accelerate", reason="transformers loads GGUF files by accelerate: make test-oracles installs it")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

from megatron_rl.commands.convert.command import main


@pytest.mark.parametrize("family", ["llama", "qwen2_tied", "qwen2_untied", "qwen3"])
def test_tensors_equal_transformers(tmp_path: pathlib.Path, family: str) -> None:
    """Transformers 5.19 takes a dense qwen3's head_dim to be 128, whatever the file says: no logits of 32."""
    from transformers import AutoModelForCausalLM

    wanted = write_gguf(tmp_path / "m.gguf", family)
    assert main(["import", "--gguf", str(tmp_path / "m.gguf"), str(tmp_path / "hf")]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    found, state = load_file(tmp_path / "hf" / "model.safetensors"), theirs.state_dict()
    twice = {"lm_head.weight"} if theirs.config.tie_word_embeddings else set()
    assert found.keys() == wanted.keys() == state.keys() - twice
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name]), name
    if family == "qwen3":
        return
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens = torch.arange(40)[None]
    assert torch.equal(ours.eval()(tokens).logits, theirs.eval()(tokens).logits)
