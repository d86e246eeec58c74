"""Mixtures of experts equal the reference in log-probs, gradients, norms and steps, under every parallelism."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.transformers_engine import TransformersEngine
from megatron_rl.rollout.worker import to_sample
from megatron_rl.types import Prompt
from tests.equality.layouts import EP2, SHARDED, SP, TOLERANCE, TP2
from tests.equality.rig import Rig, any_tokenizer, open_rig, ragged_advantages
from tests.equality.rows import measured
from tests.pairwise import quick
from tests.reference import (
    MIXTURES,
    adamw,
    file_weights,
    make_samples,
    masked_logprobs,
    near_policy,
    reference_gradient,
    reference_logprobs,
    relative_error,
    tiny_model,
)

# LR is so small that the later steps do not clip every token, which would leave no gradient to compare
NUM_SAMPLES, STEPS, LAYERS, LR, DECAY, CLIP = 11, 3, 2, 0.0003, 0.1, 0.5
SETTINGS = (f"optimizer.lr={LR}", f"optimizer.weight_decay={DECAY}", f"optimizer.clip_grad={CLIP}")
TP2_SP = (TP2, SP)
# Each family and each kind of layout once; CP2-EP2, recomputed and interleaved experts are cells of the matrix.
QUICK = (
    *("one qwen3_moe", "EP2 qwen3_moe_unnormalised", "EP2 llama4_interleaved"),
    *(f"TP2-SP-EP2-ETP1 {family}" for family in ("glm4_moe", "gpt_oss", "deepseek_v3")),
    *("EP2-overlap qwen3_moe", "TP2-SP mixtral", "ETP2 qwen3_moe_unnormalised"),
    # experts' gradients are scattered over the tensor ranks here, dense ones over no rank
    "TP2-SP-ETP1-sharded qwen3_moe",
    "PP2 glm4_moe",  # a dense layer on one stage, a mixture on the other
    *("CP2 llama4", "CP2 deepseek_v3"),  # chunks of attention that end within a rank's tokens; latents
)
LARGE = ("one", "EP2", "TP2-SP-EP2-ETP1", "EP2-PP2", "EP2-DP2", "TP2-SP-EP2", "EP2-PP2-VPP2")
ROWS = dict.fromkeys(
    (
        *QUICK,
        # a layer without positions on the second stage
        *("PP2-VPP2 qwen3_moe", "CP2-EP2 mixtral", "CP2 glm4_moe", "PP2 llama4_interleaved", "PP2 deepseek_v3"),
        # experts with biases are not split over tensor ranks
        *(f"{n} {f}" for n in LARGE for f in MIXTURES if (n, f) != ("TP2-SP-EP2", "gpt_oss")),
    )
)


@functools.cache
def wanted(family: str, layers: int) -> tuple[np.ndarray, dict, dict, list[float]]:
    """Return the reference's log-probs (flat, 0 where masked), first gradient, and weights and norms of three steps."""
    _, model = tiny_model(family, layers=layers)
    samples = near_policy(model, make_samples(NUM_SAMPLES))
    logprobs, optimizer = masked_logprobs(model, samples), adamw(model, LR, DECAY)
    gradients, norms, groups = [], [], [i // 2 for i in range(NUM_SAMPLES)]
    for _ in range(STEPS):
        gradients.append(reference_gradient(model, samples, groups, list(ragged_advantages(NUM_SAMPLES)))[0])
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return logprobs, gradients[0], {k: v.clone() for k, v in file_weights(model).items()}, norms


def steps(rig: Rig, family: str, label: str, *, drops: bool) -> dict[str, float]:
    """Take three optimizer steps; return the errors of each norm and of the last weights on the main rank."""
    norms = [result.grad_norm for _ in range(STEPS) for result in rig.step(ragged_advantages(NUM_SAMPLES), drops=drops)]
    weights = rig.weights()
    if not rig.is_main:
        return {}
    _, _, expected, expected_norms = wanted(family, rig.model.config.num_hidden_layers)
    return {
        f"norm, {label}": abs(norms[0] / expected_norms[0] - 1),
        f"later norms, {label}": float(np.abs(np.array(norms[1:]) / expected_norms[1:] - 1).max()),
        f"weights, {label}": relative_error(weights, {k: v for k, v in expected.items() if k in weights}),
    }


def against_reference(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> tuple[dict[str, float], int]:
    """Return the main rank's largest gaps by what was compared, and how many micro-batches were fillers."""
    found: dict[str, float] = {}
    advantages, fillers = ragged_advantages(NUM_SAMPLES), 0
    with open_rig(family, *overrides, *SETTINGS, samples=NUM_SAMPLES, total_steps=STEPS) as rig:
        for cut in (dict(max_tokens=25), dict(samples_per_microbatch=1)):
            rig.rules(**cut)
            flat, gradients = rig.logprobs(), []
            for drops in (False, True):
                plan = rig.plan(advantages, drops=drops)
                gradients.append(rig.gradient(advantages, plan))
                fillers += plan.mini_batches[0].num_fillers
            if rig.is_main:
                logprobs, gradient, _, _ = wanted(family, rig.model.config.num_hidden_layers)
                found[f"log-probs {cut}"] = float(np.abs(flat - logprobs).max())
                found |= {f"gradient {cut} {i}": relative_error(each, gradient) for i, each in enumerate(gradients)}
        found |= steps(rig, family, "plain optimizer", drops=True)
    with open_rig(family, *overrides, *SETTINGS, *SHARDED, samples=NUM_SAMPLES, total_steps=STEPS) as rig:
        return found | steps(rig, family, "distributed optimizer", drops=False), fillers


@pytest.mark.parametrize("name", quick(ROWS, *QUICK))
def test_mixtures_equal_reference(pool, name):
    """Of 11 samples 7 have an advantage: where replicas share experts, some run fillers."""
    results = measured(pool, name, against_reference)
    found = results[0][0]
    later = {k: found.pop(k) for k in list(found) if k.startswith("later norms")}
    assert max(found.values()) < TOLERANCE and len(found) == 10, found
    assert max(later.values()) < 1e-4, later  # the norm at weights that are apart by 1e-6
    assert not name.startswith("EP2 ") or min(fillers for _, fillers in results) >= 2, results


def one_normalised_expert(rank: int, world: int, overrides: tuple[str, ...]) -> dict[str, float]:
    """Return the errors of log-probs and gradient of a mixture whose tokens take one expert, of weight p / p = 1."""
    logprobs, gradient, _, _ = wanted("mixtral_top1", LAYERS)
    advantages = ragged_advantages(NUM_SAMPLES)
    with open_rig("mixtral_top1", *overrides, samples=NUM_SAMPLES) as rig:
        found = rig.logprobs()
        ours = rig.gradient(advantages, rig.plan(advantages, drops=True))
    routers = {name: x for name, x in ours.items() if name.endswith(".gate.weight")}
    return {
        "logprobs": float(np.abs(found - logprobs).max()),
        "gradient": relative_error(ours, gradient),
        "routers": max(float(x.abs().max()) for x in routers.values()),
    }


@pytest.mark.parametrize("overrides", [(), (EP2,)], ids=["EP1", "EP2"])
def test_one_normalised_expert_per_token_equals_the_reference(pool, overrides):
    """Megatron-Core refuses it under its own name; in transformers the router's gradient is the rounding of 0."""
    for found in pool.run(1 + len(overrides), one_normalised_expert, overrides, timeout_s=60):
        assert found["logprobs"] < 1e-5 and found["gradient"] < TOLERANCE and found["routers"] == 0.0, found


def one_sample_with_signal(rank: int, world: int, overrides: tuple[str, ...]) -> dict[str, object]:
    """Measure a step of one sample: its expert group runs fillers, any other is silent, and all reduce experts."""
    advantages = np.zeros(NUM_SAMPLES)
    advantages[4] = -0.7
    with open_rig("mixtral", *overrides, samples=NUM_SAMPLES) as rig:
        plan = rig.plan(advantages, drops=True)
        expected, _ = reference_gradient(rig.model, rig.samples, rig.groups, list(advantages))
        (mini_batch,) = plan.mini_batches
        error = relative_error(rig.gradient(advantages, plan), expected)
        return {"error": error, "microbatches": mini_batch.num_microbatches.tolist(), "fillers": mini_batch.num_fillers}


@pytest.mark.parametrize("world", [2, 4])
def test_fillers_and_silent_groups_add_nothing_to_experts(pool, world):
    for found in pool.run(world, one_sample_with_signal, (EP2,), timeout_s=60):
        assert found["microbatches"] == [1, 1, 0, 0][:world] and found["fillers"] == 1, found
        assert found["error"] < TOLERANCE, found


def engine_and_trainer(rank: int, world: int, family: str, path: str) -> float:
    """Return the largest gap between the log-probs that the engine sampled with and the trainer's."""
    prompts = [Prompt(prompt_id=f"{i}@0", text="", token_ids=(5, 7, 11, 13, 17)[: i + 2], columns={}) for i in range(4)]
    with open_rig(family, f"parallel.expert={world}") as rig:
        cpu = dict(seed=0, dtype=torch.float32, device=torch.device("cpu"))
        engine = TransformersEngine(path, any_tokenizer(), RolloutConfig(max_response_tokens=8), **cpu)
        engine.load_weights(rig.backend.export(), version=0)
        rig.take([to_sample(rollout, included=True) for rollout in engine.generate(prompts, 2)])
        return rig.backend.logprobs(rig.batch, rig.everyone).sums["logprob_gap_max"]


@pytest.mark.parametrize("family", MIXTURES)
def test_engine_samples_from_the_trainers_policy(pool, tmp_path, family):
    """Its model is the exported experts under the names of files; its own experts are one fused tensor."""
    tiny_model(family)[0].save_pretrained(tmp_path)
    for gap in pool.run(2, engine_and_trainer, family, str(tmp_path), timeout_s=60):
        assert gap < TOLERANCE, gap


@pytest.mark.parametrize("family", MIXTURES)
def test_no_token_is_near_a_tie(family):
    """The tolerance stands on that: rounding of 1e-6 must not be able to send a token to another expert."""
    config, model = tiny_model(family)
    margins = []

    def margin(scores: torch.Tensor, taken: int) -> float:
        ordered = scores.sort(dim=-1, descending=True).values
        return float((ordered[:, taken - 1] - ordered[:, taken]).min())

    def note(module, args, output) -> None:
        scores = output[config.model_type == "llama4_text"]  # router logits [tokens, experts]
        if (bias := getattr(module, "e_score_correction_bias", None)) is not None:
            scores = scores.sigmoid() + bias
            grouped = scores.unflatten(1, (config.n_group, -1))
            of_groups = grouped.topk(2).values.sum(-1)
            if config.topk_group < config.n_group:
                margins.append(margin(of_groups, config.topk_group))
            chosen = of_groups.topk(config.topk_group).indices
            scores = grouped.gather(1, chosen[..., None].expand(-1, -1, grouped.shape[2])).flatten(1)
        if config.num_experts_per_tok < scores.shape[1]:
            margins.append(margin(scores, config.num_experts_per_tok))

    mixtures = [x for name, x in model.named_modules() if name.endswith(("mlp.gate", ".router"))]
    for router in mixtures:
        router.register_forward_hook(note)
    for sample in make_samples(NUM_SAMPLES):
        with torch.no_grad():
            reference_logprobs(model, sample)
    assert len(margins) >= len(mixtures) * NUM_SAMPLES > 0 and min(margins) > 1e-4, min(margins)
