"""A prompt that runs once for its group changes no number: gradients and log-probs equal a plain loop's."""

import functools

import numpy as np
import pytest
import torch

from megatron_rl.types import Sample
from tests.equality.rig import open_rig
from tests.equality.rows import assert_close
from tests.equality.shared_samples import SHARED, advantages_of, group_samples
from tests.pairwise import quick
from tests.reference import masked_logprobs, near_policy, reference_gradient, tiny_model

CUTS = (dict(max_tokens=10_000),
        dict(max_tokens=30),  # groups are cut
        dict(max_tokens=1),  # every sample alone: nothing is shared
        dict(samples_per_microbatch=3),
        dict(max_tokens=30, repack=False))
BASE = ("one qwen3", "TP2-SP qwen2_tied", "PP2 llama3_rope", "CP2 llama3_rope", "EP2 gpt_oss")
FAMILIES = (  # whose layers differ: one cut
    *("DP2 qwen3_moe", "CP2 llama4", "one deepseek_v3", "one mistral_window", "one phi3", "one olmo2", "one olmo3"),
    *("one gemma3_text", "one mixtral", "one glm4_moe"),
)
# the others' prompts apart, and samples that share with none as each is alone, are those of test_gradient.py
APART = ("one qwen3",)
LARGE = (*("PP2-VPP2 qwen2_tied", "PP2-recompute qwen3", "TP2-PP2-SP qwen3", "CP2-DP2 llama", "EP2 qwen3_moe"),
         "CP2 moonlight")


@functools.cache
def plain(family: str, layers: int) -> tuple[list[Sample], dict[str, torch.Tensor], np.ndarray]:
    """Return the samples, and gradient and log-probs of a plain loop."""
    _, model = tiny_model(family, layers=layers)
    samples, groups = group_samples()
    samples = near_policy(model, samples)
    gradient, _ = reference_gradient(model, samples, groups, list(advantages_of(len(samples))))
    return samples, gradient, masked_logprobs(model, samples)


def every_cut(rank, world, family: str, layout: tuple[str, ...], cuts, sharing: tuple[bool, ...]) -> dict[str, float]:
    """Return the relative error of gradients and the largest of log-probs, by cut, sharing and skip."""
    found: dict[str, float] = {}
    with open_rig(family, SHARED, *layout) as rig:
        samples, wanted, logprobs = plain(family, rig.model.config.num_hidden_layers)
        rig.take(samples, group_samples()[1])
        assert rig.backend.rules.share_prompts
        before = rig.backend.rules
        for cut in cuts:
            for shares in sharing:
                label = f" {cut} {'shared' if shares else 'apart'}"
                rig.rules(**{"max_tokens": 40, **cut}, share_prompts=shares)
                found |= rig.errors(advantages_of(len(samples)), wanted, label)
                found[f"log-probs{label}"] = float(np.abs(rig.logprobs() - logprobs).max())
                rig.backend.rules = before
    return found


@pytest.mark.parametrize("name", quick((*BASE, *FAMILIES, *LARGE), *BASE, *FAMILIES))
def test_shared_prompts_equal_the_plain_loop(pool, name):
    cuts = CUTS[1:2] if name in FAMILIES else (*CUTS[:2], *CUTS[3:]) if name in BASE[1:] else CUTS
    assert_close(pool, name, every_cut, cuts, (True, False) if name in APART else (True,))
