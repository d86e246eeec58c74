"""Adapters on every topology equal a plain loop over a Hugging Face model that has them: gradient, steps and export."""

import pathlib

import numpy as np
import pytest
import torch

from megatron_rl.config import load_config
from megatron_rl.critic import Critic
from megatron_rl.distributed import topology
from megatron_rl.errors import ConfigError
from megatron_rl.model.lora.adapters import adapters_of as own_adapters
from megatron_rl.model.lora.adapters import adapters_off
from megatron_rl.weights.fused import file_tensors
from tests.allocated import AllocationMeter
from tests.equality.adapter_rig import LORA, NUM_SAMPLES, STEPS, gradients, merged_apart, open_settings, three_steps
from tests.equality.layouts import TOLERANCE
from tests.equality.rig import DEFAULTS, any_tokenizer, equal_by_name, open_rig, ragged_advantages
from tests.equality.rows import assert_all, assert_close, measured
from tests.pairwise import quick
from tests.reference import file_weights, make_samples, near_policy, reference_gradient, relative_error, tiny_model

from megatron.core.tensor_parallel.layers import LinearWithFrozenWeight  # isort: skip

# Every kind of layout and every kind of layer once; the rest of the product is long.
LAYOUTS = (
    *("one qwen3", "DP2 llama3_rope", "TP2-SP qwen3", "TP2 olmo2", "TP2 gemma3_text", "PP2-recompute qwen2_untied"),
    *("PP2-VPP2 qwen2_tied", "CP2 llama3_rope", "EP2-attention gpt_oss", "one glm4_moe", "TP2-SP glm4_moe"),
    *("TP2-SP-ETP1 mixtral", "PP2 qwen3_moe", "TP2-SP-EP2-ETP1 qwen3_moe"),
)
LONG = (
    *("recompute qwen2_tied", "TP2 qwen2_tied", "PP2 qwen2_tied", "EP2-attention qwen3_moe", "TP2-PP2 qwen2_untied"),
    *("TP2-SP-PP2-VPP2 qwen3", "PP2-DP2 qwen2_tied", "TP2-SP-CP2 qwen2_untied", "TP2-SP-EP2-attention mixtral"),
    *("EP2 qwen3_moe", "TP2-SP-EP2 mixtral"),
)
SPREAD = ("DP2-gather-sharded llama3_rope", "EP2-gather-sharded qwen3_moe")
LONG_SPREAD = (
    *("PP2-DP2-gather-sharded qwen2_tied", "EP2-DP2-attention-sharded qwen3_moe", "EP2-DP2-sharded qwen3_moe"),
)
BESIDE = ("TP2-SP qwen3", "EP2 qwen3_moe", "one glm4_moe", "TP2-SP glm4_moe", "PP2 qwen3_moe")
OVER_SHARED = ("TP2-SP-shared qwen3", "CP2-shared llama3_rope", "shared qwen3", "PP2-shared qwen2_tied")
STEPPED = (*LAYOUTS[:1], *LAYOUTS[2:3], *LAYOUTS[6:9], LAYOUTS[11], *SPREAD)
# first norms and movements of the steps are those of the same gradients: of these layouts, one shows them by themselves
GRADIENTS = (LAYOUTS[0], *(name for name in LAYOUTS if name not in STEPPED))
SILENT = ("DP2 llama3_rope", *SPREAD[:1], "PP2-DP2 qwen2_tied", *LONG_SPREAD[:1])
OFF = ("TP2-SP qwen3", *SPREAD[:1], "EP2 qwen3_moe", "one qwen3", "PP2-VPP2 qwen2_tied")
EXPORTED = ("TP2 qwen2_untied", "one qwen2_untied", "PP2 qwen2_untied")
FROZEN = ("PP2 qwen2_tied", "CP2 llama3_rope", "one qwen3", "recompute qwen2_tied", "TP2 qwen2_tied", "TP2-SP qwen3")
FROZEN += ("PP2-VPP2 qwen2_tied", "EP2-attention qwen3_moe")


@pytest.mark.parametrize("name", quick((*LAYOUTS, *LONG, *OVER_SHARED), *GRADIENTS, *OVER_SHARED[:2]))
def test_skip_and_dense_gradients_of_adapters_equal_reference(pool, name):
    assert_close(pool, name, gradients)


@pytest.mark.parametrize("name", quick(BESIDE, *BESIDE[:2]))
def test_adapters_beside_weights_equal_merged_ones(pool, name):
    found = measured(pool, name, merged_apart)
    assert max(found) < TOLERANCE, found


def without_tokens(rank: int, world: int) -> dict[str, object]:
    """Return how many experts one short sample leaves without a token, and what its gradient is for their adapters."""
    with open_settings("glm4_moe", ("parallel.expert=2",), samples=0) as rig:
        rig.take(near_policy(rig.model, make_samples(2)[:1] * 2))
        reference_gradient(rig.model, rig.samples, rig.groups, [1.0, 1.0])
        named = {name: p.grad for name, p in rig.model.named_parameters() if ".lora_" in name}
        want = file_tensors(named, rig.model.config.model_type)
        gradient = rig.gradient(np.ones(2), rig.plan(np.ones(2), drops=True))
        idle = [name for name, x in want.items() if ".experts." in name and not x.any()]
        zero = not any(gradient[name].any() for name in idle)
        return {"idle": len(idle), "zero": zero, "error": relative_error(gradient, want)}


def test_an_expert_without_tokens_has_a_gradient_of_zero(pool):
    for found in pool.run(2, without_tokens, timeout_s=60):
        assert found["idle"] and found["zero"] and found["error"] < TOLERANCE, found


@pytest.mark.parametrize("name", quick((*LAYOUTS, *LONG, *SPREAD, *LONG_SPREAD), *STEPPED))
def test_three_adamw_steps_of_adapters_equal_torchs(pool, name):
    """The movement's bound is wider, as AdamW amplifies the summation order where a gradient is near zero."""
    for found in measured(pool, name, three_steps):
        assert found["norm"] < 1e-6 and found["moved"] < 1e-3 and found["export"] < TOLERANCE, found
        assert found["frozen"] and found["trained"] and found["replicas"], found


def silent(rank: int, world: int, family: str, settings: tuple[str, ...]) -> float:
    """Return the error of the skip run's merged weights after two steps in which one sample of eleven has signal."""
    advantages, ended = np.zeros(NUM_SAMPLES), []
    advantages[5] = 0.7
    for drops in (True, False):
        with open_settings(family, (*settings, *STEPS[1:])) as rig:
            assert bool(rig.plan(advantages, drops=drops).mini_batches[0].silent_ranks) == drops
            for _ in range(2):
                rig.step(advantages, drops=drops)
            ended.append(rig.weights())
    return relative_error(*ended)


@pytest.mark.parametrize("name", quick(SILENT, *SILENT[:2]))
def test_a_silent_rank_joins_the_reduction_of_adapters(pool, name):
    found = measured(pool, name, silent)
    assert max(found) < TOLERANCE, found


def untrained(rank: int, world: int, family: str, settings: tuple[str, ...]) -> dict[str, torch.Tensor]:
    with open_rig(family, *LORA, *settings, layers=4) as rig:
        return rig.trained()


def test_every_layout_starts_with_the_same_adapters(pool):
    """To the bit, so that no layout draws for itself."""
    (first,) = measured(pool, "one qwen3", untrained)
    for name in ("TP2-SP qwen3", "PP2-VPP2 qwen3", "TP2-PP2 qwen3"):
        assert all(equal_by_name(found, first) for found in measured(pool, name, untrained)), name
    assert all(x.any() == (".lora_A." in name) for name, x in first.items())
    columns = [x for name, x in first.items() if ".lora_A." in name]
    assert len({x.flatten()[0].item() for x in columns}) == len(columns), "no two are drawn alike"


def off_and_on(rank: int, world: int, family: str, settings: tuple[str, ...]) -> dict[str, bool]:
    """Compare adapters that are off, or untrained with B = 0, with the model without any, and on again with before."""
    with open_settings(family, settings) as rig:
        samples, before = rig.samples, rig.logprobs()
        rig.backend.schedule.gather_parameters()
        with adapters_off(rig.backend.chunks):
            inside = rig.logprobs()
        after = rig.logprobs()
        rig.step(ragged_advantages(NUM_SAMPLES), drops=True)
        results = rig.step(ragged_advantages(NUM_SAMPLES), drops=True)
    with open_rig(family, *LORA, *settings) as rig:
        rig.take(samples)
        untrained = rig.logprobs()
    with open_rig(family, *settings) as rig:
        rig.take(samples)
        base = rig.logprobs()
        with pytest.raises(ValueError, match="set lora.rank"), adapters_off(rig.backend.chunks):
            pass
    return {"off is the model without": np.array_equal(inside, base),
            "untrained is the model without": np.array_equal(untrained, base),
            "on again": np.array_equal(after, before),
            "they differ": float(np.abs(before - base).max()) > 0.01,
            "training goes on": results[0].applied and results[0].grad_norm > 0}


@pytest.mark.parametrize("name", quick(OFF, *OFF[:3]))
def test_adapters_off_is_the_frozen_model_to_the_bit(pool, name):
    assert_all(pool, name, off_and_on)


def memory_of_export(rank: int, world: int, family: str, settings: tuple[str, ...]) -> dict[int, int]:
    """Return, by bucket_bytes, the most bytes that an export takes beside the model."""
    found = {}
    with open_settings(family, settings, samples=0) as rig:
        for bucket_bytes in (1, 200_000):
            meter, tensors = AllocationMeter(), rig.backend.export(bucket_bytes=bucket_bytes)
            while True:
                with meter:
                    if next(tensors, None) is None:
                        break
            found[bucket_bytes] = meter.peak_bytes
    return found


@pytest.mark.parametrize("name", quick(EXPORTED, EXPORTED[0]))
def test_merging_takes_a_parameter_beside_the_bucket(pool, name):
    """linear_fc1, [192, 64] in float32, with its result, two blocks, and the whole tensor where one is made of it."""
    for found in measured(pool, name, memory_of_export):
        one = 192 * 64 * 4
        assert found[200_000] <= 200_000 + 3 * one and found[1] <= 5 * one, found


def written(rank: int, world: int, folder: str) -> list[str]:
    """Return what an export of GLM-4.5 with adapters writes, and of Qwen3's mixture, and a refusal's words."""
    with open_rig("glm4_moe", *LORA) as rig:
        rig.backend.save_hugging_face(pathlib.Path(folder) / "hf", any_tokenizer())
        with pytest.raises(ConfigError) as caught:
            rig.backend.save_adapters(pathlib.Path(folder) / "adapter")
    with open_rig("qwen3_moe", *LORA) as rig:
        rig.backend.save_hugging_face(pathlib.Path(folder) / "other", any_tokenizer())
    return [*sorted(x.name for x in pathlib.Path(folder).iterdir()), str(caught.value)]


def test_adapters_that_peft_would_leave_out_are_not_written(pool, tmp_path):
    (found,) = pool.run(1, written, str(tmp_path), timeout_s=60)
    assert found[:-1] == ["hf", "other", "other_adapter"]
    assert "gate_proj of glm4_moe" in found[-1] and "hf, or set lora.targets" in found[-1]


def critic_without(rank: int, world: int) -> bool:
    """Return whether a value model under a configuration with adapters has none and trains every weight."""
    hf_config, model = tiny_model("qwen2_untied")
    config = load_config(None, [*DEFAULTS, *LORA, "advantage.estimator=gae"])
    critic = Critic(config, hf_config=hf_config, weights=file_weights(model), alone=True)
    try:
        return not own_adapters(critic.chunks) and all(p.requires_grad for p in critic.parameters())
    finally:
        critic.close()
        topology.destroy()


def test_a_critic_has_no_adapters(pool):
    assert pool.run(1, critic_without, timeout_s=60) == [True]


def rows_apart(rank: int, world: int, family: str, settings: tuple[str, ...]) -> list:
    """Return shape and strides of each gradient [T, 1, out] that a frozen weight would multiply row by row."""
    advantages, seen, apart = ragged_advantages(NUM_SAMPLES), [], []
    original = LinearWithFrozenWeight.backward

    def backward(ctx, gradient: torch.Tensor):
        seen.append(gradient.shape)
        if gradient.stride(0) != gradient.shape[1] * gradient.stride(1):  # torch.matmul folds [T, 1] only where equal
            apart.append((tuple(gradient.shape), gradient.stride()))
        return original(ctx, gradient)

    with pytest.MonkeyPatch.context() as patch, open_settings(family, settings) as rig:
        patch.setattr(LinearWithFrozenWeight, "backward", staticmethod(backward))
        rig.gradient(advantages, rig.plan(advantages, drops=False))
    assert len(seen) > 4 * len(rig.model.model.layers) // rig.backend.topology.pipeline_size
    return apart


@pytest.mark.parametrize("name", quick(FROZEN, *FROZEN[:2]))
def test_frozen_weights_multiply_a_gradient_whole(pool, name):
    """With other strides than these a backward pass took ten times as long, and memory for a weight per token."""
    assert not any(measured(pool, name, rows_apart))
