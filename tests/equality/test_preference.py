"""The linear loss of preference pairs has the gradient of the pairs' own loss, on every grid of ranks.

The reference is a loop over pairs with a Hugging Face model and autograd through the paper's equation. Sample i lies on
rank i mod world and a micro-batch takes 40 tokens, so that the halves of a pair are apart in every way.
"""

import copy

import pytest
import torch

from megatron_rl.config import PreferenceConfig
from megatron_rl.config.preference import OF_A_POLICY
from megatron_rl.trainer.preference import compare_pairs, prepare_pairs
from megatron_rl.types import Sample
from tests.equality.adapter_rig import open_either
from tests.equality.rig import Rig, ragged_advantages
from tests.equality.rows import assert_close
from tests.naive_pairs import RULE, naive_loss, pairs_of_one_prompt
from tests.pairwise import quick
from tests.reference import gradient_of, reference_logprobs, relative_error

SAMPLES, LR = 10, "optimizer.lr=0.003"
SETTINGS = {"dpo": PreferenceConfig(loss="dpo", beta=0.3, label_smoothing=0.1),
            "ipo": PreferenceConfig(loss="ipo", beta=0.3),
            "simpo": PreferenceConfig(loss="simpo", beta=2.0, margin=0.5)}
LAYOUTS = (*("one qwen2_tied", "DP2 llama3_rope", "PP2 qwen2_tied", "TP2-SP qwen3", "PP2-VPP2 qwen2_untied"),
           *("PP2-shared qwen2_untied", "CP2 llama3_rope", "LoRA-DP2 llama3_rope", "LoRA-TP2 qwen2_tied"))
LONG = (*("TP2 qwen2_tied", "DP2-shared qwen2_tied", "TP2-PP2 qwen2_untied", "PP2-DP2 qwen2_tied"),
        *("LoRA qwen3", "LoRA-PP2 qwen2_tied"))
# a pair's loss is of sums that every rank holds: on most grids one that drops nothing and one that drops pairs
EVERY_LOSS, FEW_LOSSES = (*LAYOUTS[:2], *LONG), ("dpo", "hinge")


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
    return gradient_of(model), total


def moved_model(rig: Rig) -> torch.nn.Module:
    """Keep the rig's weights as the reference, train one step, and return a Hugging Face model of the new weights."""
    backend, model = rig.backend, copy.deepcopy(rig.model)
    backend.keep_reference()
    rig.step(ragged_advantages(len(rig.samples)), drops=True)
    weights = rig.trained()
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
    with open_either(family, overrides, LR, samples=SAMPLES) as rig:
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


@pytest.mark.parametrize("layout", quick((*LAYOUTS, *LONG), LAYOUTS[1], *LAYOUTS[3:]))
def test_the_linear_loss_has_the_gradient_of_the_pairs(pool, layout):
    assert_close(pool, layout, gradients_of_pairs, OF_A_POLICY if layout in EVERY_LOSS else FEW_LOSSES)
