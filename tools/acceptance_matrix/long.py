"""Measures sequences of thousands of tokens: log-probs and gradient against a Hugging Face model on the same device."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np
import torch
from acceptance_matrix.cells import HIDDEN, Cell
from acceptance_matrix.facts import HOST, halve_gradient, on_cpu, worst_of_ranks

from megatron_rl.algorithm.advantage import reduction_weights
from megatron_rl.backend import MegatronBackend
from megatron_rl.config import load_config
from megatron_rl.distributed import topology
from megatron_rl.types import LossInputs, Sample
from megatron_rl.weights.fused import file_tensors
from tests.reference import file_weights, relative_error, tiny_model

TOKENS = {"cuda": 8192, "cpu": 1024}
PROMPT_TOKENS = 32
ADVANTAGES = np.array([0.8, -0.6, 0.3])
CLIP = 0.2
SHIFTS = np.array([-0.5, 0.0, 0.5], dtype=np.float32)  # of the old log-probs: far from the edges of clipping


def make_samples(longest: int) -> list[Sample]:
    """Make three samples: of the longest length, of half of it and one more token, and of a third."""
    random = np.random.default_rng(0)
    samples = []
    for number, length in enumerate((longest, longest // 2 + 1, longest // 3)):
        response = length - PROMPT_TOKENS
        samples.append(
            Sample(
                sample_id=f"s{number}",
                prompt_tokens=PROMPT_TOKENS,
                token_ids=random.integers(2, 99, length),
                loss_mask=np.ones(response, dtype=bool),
                logprobs=np.zeros(response, dtype=np.float32),
            )
        )
    return samples


def logprobs_of(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    tokens = torch.from_numpy(sample.token_ids).to(HOST.device)
    distribution = model(tokens[None]).logits[0].float().log_softmax(-1)[sample.prompt_tokens - 1 : -1]
    return distribution.gather(-1, tokens[sample.prompt_tokens :, None])[:, 0]


def reference_gradient(model: torch.nn.Module, samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Return the gradient of the clipped objective, one sample at a time, averaged over all tokens."""
    count = sum(len(s.logprobs) for s in samples)
    for sample, advantage in zip(samples, ADVANTAGES.tolist(), strict=True):
        ratio = (logprobs_of(model, sample) - torch.from_numpy(sample.logprobs).to(HOST.device)).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        (-objective.sum() / count).backward()
    gradient = {name: p.grad.detach() for name, p in model.named_parameters()}
    return on_cpu(file_tensors(gradient, model.config.model_type))


@contextlib.contextmanager
def open_backend(cell: Cell, longest: int, deadline_s: float) -> Iterator[tuple[MegatronBackend, torch.nn.Module]]:
    hf_config, model = tiny_model(cell.family, hidden=HIDDEN)
    hf_config.max_position_embeddings = 2 * longest
    if cell.dtype == "bfloat16":
        model = model.bfloat16().float()
    overrides = [f"parallel.{x}" for x in cell.parallel] + [f"model.dtype={cell.dtype}", "model.layer_spec=torch"]
    overrides += [f"plan.max_tokens_per_microbatch={longest + 64}", f"rollout.max_response_tokens={longest}"]
    config = load_config(None, [*overrides, f"run.deadline_s={deadline_s}", *cell.overrides])
    try:
        yield MegatronBackend(config, hf_config=hf_config, weights=file_weights(model)), model.to(HOST.device)
    finally:
        topology.destroy()


def measure(cell: Cell, fault: str, deadline_s: float, folder: pathlib.Path) -> dict:
    longest = TOKENS[HOST.device_type]
    with open_backend(cell, longest, deadline_s) as (backend, model):
        samples = make_samples(longest)
        with torch.no_grad():
            now = [logprobs_of(model, s).cpu().numpy() for s in samples]
        samples = [
            dataclasses.replace(s, logprobs=x + np.resize(SHIFTS, len(x))) for s, x in zip(samples, now, strict=True)
        ]
        batch = backend.gather(samples, [0, 0, 0], [0, 1, 2])
        chosen = np.ones(len(samples), dtype=bool)
        found = backend.logprobs(batch, chosen).flat
        plan = backend.plan_training(batch, chosen, drops=True)
        batch = backend.fetch_rows(batch, plan)
        (mini_batch,) = plan.mini_batches
        weights = reduction_weights("token_mean", batch.facts, mini_batch.members, max_response_tokens=longest)
        old = np.concatenate([s.logprobs for s in samples])
        inputs = LossInputs(advantages=ADVANTAGES * weights, weights=weights, old_logprobs=old)
        backend.forward_backward(batch, mini_batch, inputs, fingerprint=plan.fingerprints()[0])
        if fault == "drop-gradient":
            halve_gradient(backend)
        gradient = on_cpu(backend.gradient())
        errors = {
            "logprobs": float(np.abs(found - np.concatenate(now)).max()),
            "gradient": relative_error(gradient, reference_gradient(model, samples)),
        }
        return worst_of_ranks(errors, longest_tokens=longest)
