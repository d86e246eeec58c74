"""Makes the data, tokenizer and tiny models that the runs of the tests start from, as the quickstart does."""

from __future__ import annotations

import json
import pathlib
import shutil
import sys

import torch

ROOT = pathlib.Path(__file__).parents[2]


def prepare_inputs(folder: pathlib.Path, *, hidden: int, layers: int, heads: int, intermediate: int) -> pathlib.Path:
    """Write data, tokenizer and a model of the quickstart's kind into ``folder``; return it."""
    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    import prepare

    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "kv-heads": heads, "intermediate": intermediate}
    given = [f"--{name}={value}" for name, value in (sizes | {"test-rows": 20}).items()]
    assert prepare.main(["--out", str(folder), *given]) in (0, None)
    return folder


def prepare_experts(arithmetic: pathlib.Path, folder: pathlib.Path, kind: type, **settings: object) -> pathlib.Path:
    """Write the data and tokenizer of ``arithmetic`` and a model of four experts, as Hugging Face saves it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shutil.copytree(arithmetic, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = AutoTokenizer.from_pretrained(arithmetic / "model")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32, "max_position_embeddings": 1024}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = kind(vocab_size=len(tokenizer), **sizes, **heads, **tokens, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return folder


def prepare_mixture(arithmetic: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Write the data and tokenizer of ``arithmetic`` and a Qwen3-MoE of four experts; return ``folder``."""
    from transformers import Qwen3MoeConfig

    sizes = {"num_experts": 4, "intermediate_size": 96, "moe_intermediate_size": 48}
    given = {"norm_topk_prob": True, "tie_word_embeddings": True, "bos_token_id": None}
    return prepare_experts(arithmetic, folder, Qwen3MoeConfig, **sizes, **given)


def prepare_gpt_oss(arithmetic: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Write the data and tokenizer of ``arithmetic`` and a gpt-oss of four experts; return ``folder``."""
    from transformers import GptOssConfig

    sizes = {"num_local_experts": 4, "intermediate_size": 48, "sliding_window": 9}
    return prepare_experts(arithmetic, folder, GptOssConfig, **sizes)


def prepare_family(arithmetic: pathlib.Path, folder: pathlib.Path, family: str) -> pathlib.Path:
    """Write the data and tokenizer of ``arithmetic`` and a dense model of another family; return ``folder``."""
    sys.path.insert(0, str(ROOT / "tools"))
    from make_model import ModelSizes, make_model

    shutil.copytree(arithmetic, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = ModelSizes(hidden=64, layers=2, heads=2, kv_heads=2, intermediate=96, tied=False)
    make_model(family, sizes, arithmetic / "model", folder / "model", 0)
    config = folder / "model" / "config.json"
    if "layer_types" in (fields := json.loads(config.read_text())):  # a window that leaves most tokens out
        kinds = ["sliding_attention", "full_attention"]
        config.write_text(json.dumps(fields | {"sliding_window": 4, "layer_types": kinds}))
    return folder
