"""Makes what the benchmarks of weight sync and rollouts have in common: a model's sizes, and one vLLM engine of it."""

from __future__ import annotations

import argparse

# SmolLM2-135M's
SIZES = {"hidden": 576, "layers": 30, "heads": 9, "kv-heads": 3, "intermediate": 1536, "vocab": 49152}


def add_sizes(parser: argparse.ArgumentParser) -> None:
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)


def sizes_config(given: argparse.Namespace, **more: object):
    """Return transformers' config of a llama of the sizes that were given."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=given.vocab,
        hidden_size=given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=given.kv_heads,
        intermediate_size=given.intermediate,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
        **more,
    )


def build_one(config):
    """Return the vLLM engine that a run of one rank has under ``config``; it does not serve yet."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from megatron_rl.rollout.build import RankLocation, build_engine, role_of

    model = config.model.hf_path
    location = RankLocation(rank=0, world_size=1, local_rank=0, local_world_size=1)
    return build_engine(
        config,
        AutoTokenizer.from_pretrained(model),
        location=location,
        role=role_of(config, location),
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        dtype=getattr(torch, config.model.dtype),
        vocab_size=AutoConfig.from_pretrained(model).vocab_size,
    )
