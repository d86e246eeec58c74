"""Makes a folder of the quickstart's data with a tiny Gemma, a family that only Megatron-Bridge builds here."""

import pathlib

import torch

from tests.reference import tiny_config
from tests.workers.inputs import prepare_inputs


def prepare_gemma(folder: pathlib.Path) -> pathlib.Path:
    """Write data, tokenizer and a Gemma of two layers into ``folder``; return it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prepare_inputs(folder, hidden=64, layers=2, heads=2, intermediate=96)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    config = tiny_config("gemma", vocab_size=len(tokenizer))
    config.update(dict(max_position_embeddings=1024, bos_token_id=None))
    config.update(dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / "model")
    return folder
