"""A real embedded vLLM engine of a mixture gives Hugging Face's log-probs after a sync."""

from __future__ import annotations

import pathlib
import shutil

import pytest
import torch

from tests.reference import file_weights, tiny_model
from tests.vllm.rig import LOGPROB_TOLERANCE, make_prompts, start_bench

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]


@pytest.mark.parametrize("family", ["glm4_moe", "olmo3", "gemma3_text", "deepseek_v3", "moonlight"])
def test_logprobs_of_a_family_equal_hugging_faces(inputs: pathlib.Path, tmp_path: pathlib.Path, family: str) -> None:
    """What a family alone has arrives, and the engine has what is the config's.

    A router's bias (glm4_moe), latents (deepseek_v3), windows and angles by the layer's kind (olmo3, gemma3_text).
    """
    folder = tmp_path / "model"
    shutil.copytree(inputs / "model", folder, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    config, model = tiny_model(family)
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    config.save_pretrained(folder)
    bench = start_bench(folder, tmp_path / "run")
    try:
        bench.engine.recover(())
        bench.model = model
        report = bench.sync(file_weights(model).items())
        assert not report.failed, report.failed
        gap = bench.largest_gap(make_prompts(5, 2, 40, 1, 17, 33), 4)
        print(f"{family}: {gap:.1e}")
        assert gap < LOGPROB_TOLERANCE
    finally:
        bench.engine.close()
