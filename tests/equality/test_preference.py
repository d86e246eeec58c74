"""The linear loss of preference pairs has the gradient of the pairs' own loss, on every grid of ranks.

The reference is a loop over pairs with a Hugging Face model and autograd through the paper's equation. Sample i lies on
rank i mod world and a micro-batch takes 40 tokens, so that the halves of a pair are apart in every way.
"""

from __future__ import annotations

import copy

import pytest
import torch

from megatron_rl.config import PreferenceConfig
from megatron_rl.config.preference import OF_A_POLICY
from megatron_rl.trainer.preference import compare_pairs, prepare_pairs
from megatron_rl.types import Sample
from tests.equality.adapter_rig import LORA, open_adapted
from tests.equality.layouts import TOLERANCE
from tests.equality.rig import Rig, open_rig, ragged_advantages
from tests.equality.shared_samples import SHARED
from tests.naive_pairs import RULE, naive_loss, pairs_of_one_prompt
from tests.reference import reference_logprobs, relative_error

SAMPLES, LR = 10, "optimizer.lr=0.003"
SETTINGS = {
    "dpo": PreferenceConfig(loss="dpo", beta=0.3, label_smoothing=0.1),
    "ipo": PreferenceConfig(loss="ipo", beta=0.3),
    "simpo": PreferenceConfig(loss="simpo", beta=2.0, margin=0.5),
}
LAYOUTS = {
    "1 process": (1, "qwen2_tied", ()),
    "DP2": (2, "llama3_rope", ()),
    "PP2": (2, "qwen2_tied", ("parallel.pipeline=2",)),
    "TP2": (2, "qwen2_tied", ("parallel.tensor=2",)),
    "TP2-SP": (2, "qwen3", ("parallel.tensor=2", "parallel.sequence_parallel=true")),
    "PP2-VPP2": (2, "qwen2_untied", ("parallel.pipeline=2", "parallel.virtual_pipeline=2")),
    "DP2-shared": (2, "qwen2_tied", (SHARED,)),
    "PP2-shared": (2, "qwen2_untied", ("parallel.pipeline=2", SHARED)),
    "CP2": (2, "llama3_rope", ("parallel.context=2",)),
    "TP2-PP2": (4, "qwen2_untied", ("parallel.tensor=2", "parallel.pipeline=2")),
    "DP2-PP2": (4, "qwen2_tied", ("parallel.pipeline=2",)),
    "LoRA": (1, "qwen3", LORA),
    "LoRA-DP2": (2, "llama3_rope", LORA),
    "LoRA-PP2": (2, "qwen2_tied", ("parallel.pipeline=2", *LORA)),
    "LoRA-TP2": (2, "qwen2_tied", ("parallel.tensor=2", *LORA)),
}


def naive(model, reference, samples: list[Sample], config: PreferenceConfig) -> tuple[dict[str, torch.Tensor], float]:
    """Return gradient and loss, the mean over pairs, one pair after the other."""
    model.zero_grad()
    total, count = 0.0, len(samples) // 2
    for i in range(0, len(samples), 2):
        sums, kept = [], []
        for sample in samples[i : i + 2]:
            mask = torch.from_numpy(sample.loss_mask)
            sums.append((reference_logprobs(model, sample)[0] * mask).sum())
            with torch.no_grad():
                kept.append(float((reference_logprobs(reference, sample)[0] * mask).sum()))
        tokens = [int(sample.loss_mask.sum()) for sample in samples[i : i + 2]]
        loss = naive_loss(config, *sums, *kept, *tokens) / count
        loss.backward()
        total += float(loss.detach())
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, total


def moved_model(rig: Rig) -> torch.nn.Module:
    """Keep the rig's weights as the reference, train one step, and return a Hugging Face model of the new weights."""
    backend, model = rig.backend, copy.deepcopy(rig.model)
    backend.keep_reference()
    rig.step(ragged_advantages(len(rig.samples)), drops=True)
    exported = backend.export_adapters() if backend.shape.lora_rank else backend.export()
    weights = {name: tensor.clone() for name, tensor in exported}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
    return model


def beyond_some(rig: Rig) -> PreferenceConfig:
    """Return a hinge beyond whose margin some pairs are, and others not."""
    _, outcome = compare_pairs(rig.backend, rig.batch, PreferenceConfig(loss="dpo", beta=1.0))
    return PreferenceConfig(loss="hinge", beta=round(1.5 / float(outcome.margins.max()), 2))


def gradients_of_pairs(rank, world, family, overrides, losses) -> dict[str, float]:
    """Return the worst differences to the loop, of the gradient and of the loss, for each loss."""
    found = {}
    if any(x.startswith("lora.") for x in overrides):
        parallel = tuple(x.removeprefix("parallel.") for x in overrides if x.startswith("parallel."))
        opened = open_adapted(family, parallel, (LR,), samples=SAMPLES)
    else:
        opened = open_rig(family, *overrides, LR, samples=SAMPLES)
    with opened as rig:
        backend = rig.backend
        rig.take(pairs_of_one_prompt(SAMPLES))
        model = moved_model(rig)
        for name in losses:
            config = SETTINGS[name] if name != "hinge" else beyond_some(rig)
            _, outcome = compare_pairs(backend, rig.batch, config)
            update = prepare_pairs(backend, rig.batch, outcome, RULE)
            update.accumulate(backend)
            gradient = backend.gradient()
            backend.zero_grad()
            wanted, loss = naive(model, rig.model, rig.samples, config)
            found[name] = relative_error(gradient, wanted)
            found[f"{name} loss"] = abs(float(outcome.losses.mean()) - loss) / loss
            dropped = len(update.step.dropped)
            assert 0 < dropped < SAMPLES if name == "hinge" else dropped == 0, (name, dropped)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_linear_loss_has_the_gradient_of_the_pairs(pool, layout):
    world, family, overrides = LAYOUTS[layout]
    for found in pool.run(world, gradients_of_pairs, family, overrides, OF_A_POLICY, timeout_s=120):
        assert max(found.values()) < TOLERANCE, found
