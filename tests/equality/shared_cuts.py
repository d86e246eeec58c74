"""A batch whose prompts run once for their groups, under several cuts in micro-batches, beside a plain loop."""

import functools

import numpy as np
import torch

from megatron_rl.types import Sample
from tests.equality.rig import open_rig
from tests.equality.shared_samples import SHARED, advantages_of, group_samples
from tests.reference import masked_logprobs, near_policy, reference_gradient, tiny_model

CUTS = (dict(max_tokens=10_000),
        dict(max_tokens=30),  # groups are cut
        dict(max_tokens=1),  # every sample alone: nothing is shared
        dict(samples_per_microbatch=3),
        dict(max_tokens=30, repack=False))


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
