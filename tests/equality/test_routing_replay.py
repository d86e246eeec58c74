"""Routing replay: a mixture trained with given experts has the gradient of a plain loop whose experts are forced.

The experts are drawn at random, so that most tokens go elsewhere than their router would send them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from megatron_rl.types import Sample
from tests.equality.rig import open_rig, ragged_advantages
from tests.reference import make_samples, near_policy, reference_gradient, reference_logprobs, relative_error, tiny_model
from tests.workers.pool import Pool

NUM_SAMPLES, EXPERTS, TOP_K = 11, 4, 2
# Float32 and another order of summation, as in test_experts.py; a token of one layer that goes elsewhere shows at 1e-2.
TOLERANCE = 1e-5
REPLAY = "rollout.routing_replay=rollout"
RECOMPUTE = tuple(f"megatron.transformer.recompute_{x}" for x in ("granularity=full", "method=uniform", "num_layers=1"))
RECOMPUTE_MIXTURES = ("megatron.transformer.recompute_granularity=selective", "megatron.transformer.recompute_modules=[moe]")


def draw_experts(samples: list[Sample], layers: int, seed: int = 5) -> list[Sample]:
    """Give each token random experts in each layer; of every fifth token, and of each last one, none."""
    random, found = np.random.default_rng(seed), []
    for sample in samples:
        tokens = len(sample.token_ids)
        drawn = random.random((tokens, layers, EXPERTS)).argsort(axis=2)[..., :TOP_K].astype(np.int16)
        drawn[random.random(tokens) < 0.2] = -1
        drawn[-1] = -1
        found.append(dataclasses.replace(sample, routed_experts=drawn))
    return found


@contextlib.contextmanager
def forced(model, sample: Sample) -> Iterator[None]:
    """Have each mixture of a transformers model take the sample's experts, by its router's own probabilities."""

    def force(layer: int, module, args, output):
        logits = output[0]
        wanted = torch.from_numpy(sample.routed_experts[:, layer].astype(np.int64))
        own = logits.topk(TOP_K, dim=-1).indices
        chosen = torch.where(wanted[: len(own), :1] >= 0, wanted[: len(own)], own)
        weights = logits.float().softmax(-1).gather(1, chosen)
        if getattr(module, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(output[1].dtype), chosen

    hooks = [
        layer.mlp.gate.register_forward_hook(functools.partial(force, number))
        for number, layer in enumerate(model.model.layers)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@functools.cache
def given(family: str, layers: int) -> tuple[Sample, ...]:
    """Draw samples with experts; log-probs are near those of the model with these experts."""
    samples, found = draw_experts(make_samples(NUM_SAMPLES), layers), []
    _, model = tiny_model(family, layers=layers)
    for i, sample in enumerate(samples):
        with forced(model, sample):
            found += near_policy(model, [sample], seed=i)
    return tuple(found)


@functools.cache
def wanted(family: str, layers: int) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Return the plain loop's log-probs (flat, 0 where masked) and gradient, sample by sample, experts forced."""
    _, model = tiny_model(family, layers=layers)
    samples, advantages = given(family, layers), ragged_advantages(NUM_SAMPLES)
    logprobs, total = [], {}
    tokens = sum(int(s.loss_mask.sum()) for s in samples)
    for sample, advantage in zip(samples, advantages, strict=True):
        with forced(model, sample):
            with torch.no_grad():
                logprobs.append(reference_logprobs(model, sample)[0].numpy() * sample.loss_mask)
            gradient, _ = reference_gradient(model, [sample], [0], [advantage / tokens], reduction="token_sum")
        for name, value in gradient.items():
            total[name] = total.get(name, 0) + value
    return np.concatenate(logprobs), total


def replayed(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> dict[str, float]:
    layers = 4 if "parallel.virtual_pipeline=2" in overrides else 2
    logprobs, gradient = wanted(family, layers)
    advantages, found = ragged_advantages(NUM_SAMPLES), {}
    with open_rig(family, *overrides, REPLAY, layers=layers) as rig:
        rig.take(list(given(family, layers)))
        for cut in (dict(max_tokens=25), dict(samples_per_microbatch=1)):
            rig.rules(**cut)
            flat = rig.backend.logprobs(rig.batch, np.ones(NUM_SAMPLES, dtype=bool)).flat
            found[f"log-probs {cut}"] = float(np.abs(flat - logprobs).max())
            for drops in (False, True):
                plan = rig.plan(advantages, drops=drops)
                found[f"gradient {cut} {'skip' if drops else 'dense'}"] = relative_error(
                    rig.gradient(advantages, plan), gradient
                )
    return found


def degrees(**given: int) -> tuple[str, ...]:
    found = [f"parallel.{name}={degree}" for name, degree in given.items()]
    return (*found, *(["parallel.sequence_parallel=true"] if given.get("tensor", 1) > 1 else []))


@pytest.mark.parametrize(
    ("world", "overrides", "family"),
    [
        pytest.param(1, (), "qwen3_moe", id="one"),
        pytest.param(1, (), "qwen3_moe_unnormalised", id="one-unnormalised"),
        pytest.param(1, (), "mixtral", id="one-mixtral"),
        pytest.param(1, RECOMPUTE, "qwen3_moe", id="recompute"),
        pytest.param(1, RECOMPUTE_MIXTURES, "qwen3_moe", id="recompute-mixtures"),
        pytest.param(2, (), "qwen3_moe", id="DP2"),
        pytest.param(2, degrees(expert=2), "qwen3_moe", id="EP2"),
        pytest.param(2, degrees(tensor=2), "mixtral", id="TP2-SP"),
        pytest.param(2, degrees(tensor=2, expert=2, expert_tensor=1), "qwen3_moe", id="TP2-SP-EP2"),
        pytest.param(2, degrees(pipeline=2), "qwen3_moe", id="PP2"),
        pytest.param(2, (*degrees(pipeline=2), *RECOMPUTE), "qwen3_moe", id="PP2-recompute"),
        pytest.param(2, (*degrees(pipeline=2, virtual_pipeline=2), *RECOMPUTE), "qwen3_moe", id="PP2-VPP2-recompute"),
        pytest.param(2, degrees(context=2), "qwen3_moe", id="CP2"),
        pytest.param(2, degrees(context=2, expert=2), "mixtral", id="CP2-EP2"),
    ],
)
def test_replayed_experts_equal_the_plain_loop_with_experts_forced(
    pool: Pool, world: int, overrides: tuple[str, ...], family: str
) -> None:
    for found in pool.run(world, replayed, family, overrides, timeout_s=90):
        print({k: f"{v:.1e}" for k, v in found.items()})
        assert max(found.values()) < TOLERANCE, found
