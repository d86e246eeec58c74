"""A prompt that runs once for its group changes no number: gradients and log-probs equal a plain loop's."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from megatron_rl.types import Sample
from tests.equality.layouts import CP, SP, TOLERANCE
from tests.equality.rig import open_rig, sizes
from tests.equality.shared_samples import advantages_of, group_samples
from tests.pairwise import quick
from tests.reference import near_policy, reference_gradient, reference_logprobs, relative_error, tiny_model

CUTS = (
    dict(max_tokens=10_000),
    dict(max_tokens=30),  # groups are cut
    dict(max_tokens=1),  # every sample alone: nothing is shared
    dict(samples_per_microbatch=3),
    dict(max_tokens=30, repack=False),
)
VPP = ("parallel.virtual_pipeline=2",)
RECOMPUTE = tuple(f"megatron.transformer.recompute_{x}" for x in ("granularity=full", "method=uniform", "num_layers=1"))
# (tensor, pipeline, data), a family, more.
SMALL = [
    ((1, 1, 1), "qwen3", ()),
    ((2, 1, 1), "qwen2_tied", SP),
    ((1, 2, 1), "llama3_rope", ()),
    ((1, 1, 2), "qwen3_moe", ()),
    ((1, 1, 2), "gpt_oss", ("parallel.expert=2",)),
    ((1, 1, 2), "llama3_rope", CP),
    ((1, 1, 2), "llama4", CP),
    ((1, 1, 1), "deepseek_v3", ()),
    *(((1, 1, 1), family, ()) for family in ("mistral_window", "phi3", "olmo2", "olmo3", "gemma3_text")),
    *(((1, 1, 1), family, ()) for family in ("mixtral", "glm4_moe")),
]
LARGE = [
    ((1, 2, 1), "qwen2_tied", VPP),
    ((1, 2, 1), "qwen3", RECOMPUTE),
    ((2, 2, 1), "qwen3", SP),
    ((1, 1, 4), "llama", CP),
    ((1, 1, 2), "qwen3_moe", ("parallel.expert=2",)),
    ((1, 1, 2), "moonlight", CP),
]
TOPOLOGIES = SMALL + LARGE


def name(topology: tuple) -> str:
    (tensor, pipeline, data), family, extra = topology
    return f"TP{tensor}-PP{pipeline}-DP{data}-{family}" + "".join(f"-{x.rpartition('.')[2]}" for x in extra[:1])


@functools.cache
def plain(family: str, layers: int) -> tuple[list[Sample], dict[str, torch.Tensor], list[np.ndarray]]:
    """Return the samples, and gradient and log-probs of a plain loop."""
    _, model = tiny_model(family, layers=layers)
    samples, groups = group_samples()
    samples = near_policy(model, samples)
    gradient, _ = reference_gradient(model, samples, groups, list(advantages_of(len(samples))), reduction="token_mean")
    with torch.no_grad():
        logprobs = [reference_logprobs(model, s)[0].numpy() for s in samples]
    return samples, gradient, logprobs


def every_cut(rank: int, world: int, topology: tuple) -> dict[str, float]:
    """Return the relative error of gradients and the largest of log-probs, by cut, sharing and skip."""
    (tensor, pipeline, _), family, extra = topology
    found: dict[str, float] = {}
    with open_rig(family, *sizes(tensor, pipeline), "plan.share_prompts=true", *extra) as rig:
        samples, wanted, logprobs = plain(family, rig.model.config.num_hidden_layers)
        _, groups = group_samples()
        rig.take(samples, groups)
        assert rig.backend.rules.share_prompts
        values, read_at = advantages_of(len(samples)), np.concatenate([s.loss_mask for s in samples])
        for cut in CUTS:
            for shares in (True, False):
                label = f"{cut} {'shared' if shares else 'apart'}"
                before = rig.backend.rules
                rig.rules(**{"max_tokens": 40, **cut}, share_prompts=shares)
                for drops in (False, True):
                    gradient = rig.gradient(values, rig.plan(values, drops=drops))
                    error = relative_error(gradient, wanted) if rig.is_main else 0.0
                    found[f"{label} {'skip' if drops else 'dense'}"] = error
                rig.plan(np.ones(len(samples)), drops=False, purpose="logprob")
                read = rig.backend.logprobs(rig.batch, np.ones(len(samples), dtype=bool)).flat
                found[f"{label} log-probs"] = float(np.abs(read - np.concatenate(logprobs))[read_at].max())
                rig.backend.rules = before
    return found


@pytest.mark.parametrize("topology", quick(TOPOLOGIES, *SMALL), ids=name)
def test_shared_prompts_equal_the_plain_loop(pool, topology):
    (tensor, pipeline, data), _, _ = topology
    found = pool.run(tensor * pipeline * data, every_cut, topology, timeout_s=120)[0]
    print(name(topology), f"worst {max(found.values()):.1e}")
    assert max(found.values()) < TOLERANCE, found
