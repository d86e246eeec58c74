"""Data of training requests, and the plain loop over them that the server's gradients are held against."""

from __future__ import annotations

import numpy as np
import torch

from megatron_rl.serve.values import Datum
from megatron_rl.weights.fused import file_tensors

VOCAB = 99
SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.97, "clip_high_threshold": 1.02},
}


def make_data(loss: str, count: int, *, seed: int = 0, wide: bool = False, vocab: int = VOCAB) -> list[Datum]:
    """Draw ragged data: every third datum without a coefficient, targets as a client likes. wide: several a token."""
    random = np.random.default_rng([seed, count])
    data = []
    for i in range(count):
        prompt, response = int(random.integers(1, 6)), int(random.integers(1, 12))
        tokens = random.integers(2, vocab, prompt + response + 1)
        length, width = len(tokens) - 1, int(random.integers(1, 4)) if wide else 1
        targets = tokens[1:, None]
        if wide or i % 2:  # a client pads the prompt's targets, or scores other tokens
            targets = random.integers(0, vocab, (length, width))
        coefficient = random.normal(0, 1, (length, width)) * (np.arange(length) >= prompt - 1)[:, None] * (i % 3 != 0)
        inputs = {"weights" if loss == "cross_entropy" else "advantages": coefficient.astype(np.float32)}
        if loss != "cross_entropy":
            inputs["logprobs"] = random.normal(-4.5, 0.3, (length, width)).astype(np.float32)
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = (random.random((length, width)) < 0.7).astype(np.float32)
        data.append(Datum(tokens=tokens[:-1], targets=targets, inputs=inputs, flat=not wide))
    return data


def naive_logprobs(model: torch.nn.Module, datum: Datum) -> torch.Tensor:
    """Return log-probs [N, K] of a datum's targets by one plain forward."""
    distribution = model(torch.from_numpy(datum.tokens)[None]).logits[0].float().log_softmax(-1)
    return distribution.gather(-1, torch.from_numpy(datum.targets))


def naive_loss(loss: str, logprobs: torch.Tensor, datum: Datum) -> torch.Tensor:
    """Return the loss of Tinker's own formulas over one datum, in words of one line each."""
    given = {name: torch.from_numpy(values) for name, values in datum.inputs.items()}
    settings = SETTINGS[loss]
    low, high = settings.get("clip_low_threshold"), settings.get("clip_high_threshold")
    if loss == "cross_entropy":
        return -(given["weights"] * logprobs).sum()
    advantages, ratio = given["advantages"], (logprobs - given["logprobs"]).exp()
    match loss:
        case "importance_sampling":
            return -(ratio * advantages).sum()
        case "ppo":
            return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
        case "cispo":
            return -(ratio.clamp(low, high).detach() * logprobs * advantages).sum()
        case "dro":
            square = (logprobs - given["logprobs"]) ** 2
            return -(logprobs * advantages - 0.5 * settings["beta"] * square).sum()
        case "gspo":
            marked = given["sequence_ratio_mask"] != 0
            gaps = (logprobs.detach() - given["logprobs"])[marked]
            mean = gaps.mean() if marked.any() else torch.zeros(())
            own = (mean + logprobs - logprobs.detach()).exp()
            return -torch.minimum(own * advantages, own.clamp(low, high) * advantages).sum()
    raise ValueError(loss)


def naive_gradient(model, calls) -> tuple[dict[str, torch.Tensor], list[float], list[list[np.ndarray]]]:
    """Return the gradient of all calls together, each call's loss, and the log-probs of its data."""
    model.zero_grad()
    losses, read = [], []
    for loss, data in calls:
        total, values = 0.0, []
        for datum in data:
            logprobs = naive_logprobs(model, datum)
            term = naive_loss(loss, logprobs, datum)
            term.backward()
            total += float(term.detach())
            values.append(logprobs.detach().numpy())
        losses.append(total)
        read.append(values)
    gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return file_tensors(gradient, model.config.model_type), losses, read
