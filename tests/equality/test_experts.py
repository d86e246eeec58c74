"""Mixtures of experts equal the reference in log-probs, gradients, norms and steps, under every parallelism."""

import numpy as np
import pytest
import torch

from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.engines.embedded import TransformersEngine
from megatron_rl.rollout.job import to_sample
from megatron_rl.types import Prompt
from tests.equality.layouts import EP2, TOLERANCE
from tests.equality.matrix import NUM_SAMPLES, Cell, measure, wanted
from tests.equality.rig import any_tokenizer, config_of, layers_of, open_rig, ragged_advantages
from tests.equality.rows import measured
from tests.pairwise import quick
from tests.reference import (
    LAYERS,
    MIXTURES,
    make_samples,
    reference_gradient,
    reference_logprobs,
    relative_error,
    tiny_model,
)

# Each family and each kind of layout once; CP2-EP2, recomputed and interleaved experts are cells of the matrix.
QUICK = (
    *("one qwen3_moe", "EP2 qwen3_moe_unnormalised", "EP2 llama4_interleaved"),
    *(f"TP2-SP-EP2-ETP1 {family}" for family in ("gpt_oss", "deepseek_v3")),
    "EP2-overlap qwen3_moe",
    # experts' gradients are scattered over the tensor ranks here, dense ones over no rank
    "TP2-SP-ETP1-sharded qwen3_moe",
    "PP2 glm4_moe",  # a dense layer on one stage, a mixture on the other
    *("CP2 llama4", "CP2 deepseek_v3"),  # chunks of attention that end within a rank's tokens; latents
)
LARGE = ("one", "EP2", "TP2-SP-EP2-ETP1", "EP2-PP2", "EP2-DP2", "TP2-SP-EP2", "EP2-PP2-VPP2")
ROWS = dict.fromkeys(
    (*QUICK,
     # a layer without positions on the second stage
     *("PP2-VPP2 qwen3_moe", "CP2-EP2 mixtral", "CP2 glm4_moe", "PP2 llama4_interleaved", "PP2 deepseek_v3"),
     "PP2-VPP2-CP2 deepseek_v3",
     # experts with biases are not split over tensor ranks
     *(f"{n} {f}" for n in LARGE for f in MIXTURES if (n, f) != ("TP2-SP-EP2", "gpt_oss")))
)


def against_reference(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> dict[str, float]:
    """Measure a row as a cell of the matrix, whose skip run has the row's own optimizer."""
    layers = layers_of(config_of(*overrides))
    return measure(rank, world, Cell(name=family, world=world, parallel=(), extra=overrides, layers=layers), family, ())


@pytest.mark.parametrize("name", quick(ROWS, *QUICK))
def test_mixtures_equal_reference(pool, name):
    """Of 11 samples 7 have an advantage: where replicas share experts, some run fillers."""
    found = measured(pool, name, against_reference)[0]
    assert max(found.values()) < TOLERANCE and len(found) == 10, found


def one_normalised_expert(rank: int, world: int, overrides: tuple[str, ...]) -> dict[str, float]:
    """Return the errors of log-probs and gradient of a mixture whose tokens take one expert, of weight p / p = 1."""
    want, advantages = wanted("mixtral_top1", LAYERS), ragged_advantages(NUM_SAMPLES)
    with open_rig("mixtral_top1", *overrides, samples=NUM_SAMPLES) as rig:
        found = rig.logprobs()
        ours = rig.gradient(advantages, rig.plan(advantages, drops=True))
    routers = {name: x for name, x in ours.items() if name.endswith(".gate.weight")}
    return {"logprobs": float(np.abs(found[rig.loss_mask] - want.logprobs.numpy()).max()),
            "gradient": relative_error(ours, want.gradient),
            "routers": max(float(x.abs().max()) for x in routers.values())}


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
