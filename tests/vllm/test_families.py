"""A real embedded vLLM engine of a mixture gives Hugging Face's log-probs after a sync."""

import pathlib
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.pairwise import quick
from tests.reference import file_weights, tiny_config, tiny_model
from tests.vllm.rig import LOGPROB_TOLERANCE, make_prompts, ready, start_bench

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("bounded")]


# vLLM 0.32's decode kernel for CPUs takes latents of DeepSeek's width alone (mla/cpu_mla.py: head_dim 576).
WIDTHS = dict(kv_lora_rank=512, qk_rope_head_dim=64, head_dim=64, qk_nope_head_dim=128, qk_head_dim=192, v_head_dim=128)


def released_widths(family: str) -> tuple[PretrainedConfig, torch.nn.Module]:
    """Return a tiny config and its model of random weights, with the released models' widths of attention's parts."""
    config = tiny_config(family)
    for name, value in (*WIDTHS.items(), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").float().eval()
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.mul_(3.0)
    return config, model


@pytest.mark.parametrize("family", quick(["glm4_moe", "gemma3_text", "deepseek_v3"], "glm4_moe"))
def test_logprobs_of_a_family_equal_hugging_faces(inputs: pathlib.Path, tmp_path: pathlib.Path, family: str) -> None:
    """What a family alone has arrives: a router's bias (glm4_moe), windows and angles by the layer's kind (gemma3)."""
    folder = tmp_path / "model"
    shutil.copytree(inputs / "model", folder, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    config, model = tiny_model(family) if family != "deepseek_v3" else released_widths(family)
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    config.save_pretrained(folder)
    with ready(start_bench(folder, tmp_path / "run")) as bench:
        bench.model = model
        report = bench.sync(file_weights(model).items())
        assert not report.failed, report.failed
        assert bench.largest_gap(make_prompts(5, 2, 40, 1, 17, 33), 4) < LOGPROB_TOLERANCE
