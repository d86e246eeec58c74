"""Samples with experts drawn at random, and the plain loop over a Hugging Face mixture that is forced to take them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from megatron_rl.types import Sample
from tests.equality.rig import ragged_advantages
from tests.reference import make_samples, near_policy, reference_gradient, reference_logprobs, tiny_model

NUM_SAMPLES, EXPERTS, TOP_K = 11, 4, 2


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
def hooked(model, hook_of: Callable[[int], Callable]) -> Iterator[None]:
    """Hook the router of each layer of a transformers model by ``hook_of(layer)``."""
    with contextlib.ExitStack() as held:
        for number, layer in enumerate(model.model.layers):
            held.callback(layer.mlp.gate.register_forward_hook(hook_of(number)).remove)
        yield


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

    with hooked(model, lambda number: functools.partial(force, number)):
        yield


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
    """Return the plain loop's log-probs and gradient on the samples with given experts."""
    _, model = tiny_model(family, layers=layers)
    return plain_loop(model, given(family, layers), ragged_advantages(NUM_SAMPLES))


def plain_loop(model, samples: Sequence[Sample], advantages: np.ndarray) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Return log-probs (flat, 0 where masked) and the gradient, sample by sample, with each one's experts forced."""
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
