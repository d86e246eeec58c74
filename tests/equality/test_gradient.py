"""The skip run's gradient equals the dense run's and that of a plain loop, at every topology and cut."""

import dataclasses
import functools

import numpy as np
import pytest

from megatron_rl.planning.cost import CostModel, StageCost
from tests.equality.layouts import REDUCTIONS, TOLERANCE
from tests.equality.rig import Rig, equal_by_name, near_samples, open_rig, ragged_advantages
from tests.equality.rows import assert_close, measured
from tests.pairwise import quick
from tests.reference import make_samples, near_policy, reference_gradient, relative_error, tiny_model

NUM_SAMPLES, PER_MINI_BATCH = 11, 4  # divisible neither by each other nor by 2 or 4 data-parallel ranks
SPLIT = f"train.samples_per_mini_batch={PER_MINI_BATCH}"
CUTS = (dict(max_tokens=1),  # every sample alone
        dict(max_tokens=25),
        dict(max_tokens=10_000),
        dict(samples_per_microbatch=1),
        dict(samples_per_microbatch=3),
        dict(max_tokens=25, repack=False),
        dict(samples_per_microbatch=2, repack=False),
        dict(cost=CostModel(stages=(StageCost(overhead=0.0, token=1.0, square=0.0),) * 2)),
        dict(cost=CostModel(stages=(StageCost(overhead=1e6, token=1.0, square=0.1),) * 2)))
FEW = (CUTS[1], CUTS[4], CUTS[5])
WITHIN_A_SEQUENCE = ("TP2-SP qwen2_tied", "CP2 llama3_rope")  # their ranks run the same micro-batches as one would
# Tied and untied embeddings, biases, q/k norms, scaled rotary frequencies.
BASE = ("one qwen3", "TP2-SP qwen2_tied", "PP2 qwen2_tied", "DP2 llama3_rope", "CP2 llama3_rope")
FAMILIES = (  # whose layers differ: few cuts and the token mean
    *("TP2-SP phi3_partial", "TP2 olmo2", "TP2-SP olmo2", "TP2-SP olmo3", "PP2 gemma3_text", "TP2 gemma3_text"),
    *("CP2 gemma3_text", "PP2 mistral_window"),
)
AGAIN = ("TP2 olmo2", "TP2-SP olmo2")  # their norms are those of REDUCED's row and of TP2-SP olmo3
LARGE = (*("TP2-PP2-SP qwen3", "TP2-DP2 llama", "PP2-DP2 qwen2_untied", "DP4 qwen2_tied", "PP4 qwen2_tied"),
         *("PP2-recompute qwen3", "PP2-recompute olmo3", "PP2-VPP2 qwen2_tied", "PP2-VPP2-DP2 qwen2_untied"),
         "TP2-PP2-VPP2 qwen3")
TOPOLOGIES = BASE + FAMILIES + LARGE
# a reduction is a function of the samples, which no family's layers meet; the norm over all heads is a mutant's.
# Interleaved stages and recomputed layers take mini-batches of the same sizes in test_matrix.py
REDUCED = (*BASE, "TP2 olmo2")
# weights are made before a micro-batch is cut: the ranks of one replica meet each reduction as the same numbers
ONE_REPLICA = ("TP2-SP qwen2_tied", "PP2 qwen2_tied", "CP2 llama3_rope", "TP2 olmo2")
DROPPED = (*("one qwen2_tied", "PP2-bf16 qwen2_tied", "EP2 qwen3_moe", "one-bf16 qwen2_tied", "PP2 qwen2_tied"),
           *("PP2-DP2 qwen2_tied", "PP2-DP2-bf16 qwen2_tied", "EP2-PP2-VPP2 qwen3_moe", "EP2-DP2 glm4_moe"),
           "EP2-bf16 mixtral")
CALLS = ("DP2-overlap llama3_rope", "TP2-SP qwen2_tied", "TP2-PP2-SP-overlap qwen3", "PP2-DP2 qwen2_untied")


@functools.cache
def wanted(family: str, layers: int, reduction: str, first: int, last: int, count: int) -> tuple[dict, float]:
    """Return the reference's gradient and loss over samples first..last of ``count``; a worker keeps them."""
    _, model = tiny_model(family, layers=layers)
    advantages, groups = ragged_advantages(count)[first:last], [i // 2 for i in range(first, last)]
    samples = near_samples(family, layers, count)[first:last]
    return reference_gradient(model, samples, groups, list(advantages), reduction=reduction)


def error_of(rig: Rig, family: str, gradient: dict, reduction="token_mean", first=0, last=NUM_SAMPLES) -> float:
    """Return a gradient's relative error on the main rank only: the others' cores are better used elsewhere."""
    layers = rig.model.config.num_hidden_layers
    if not rig.is_main:
        return 0.0
    return relative_error(gradient, wanted(family, layers, reduction, first, last, len(rig.samples))[0])


def every_reduction(rank, world, family: str, layout: tuple[str, ...], reductions: tuple[str, ...]) -> dict[str, float]:
    """Return the relative error per (reduction, dense or skip), the worst over mini-batches of 4 of 11 samples."""
    found: dict[str, float] = {}
    with open_rig(family, SPLIT, *layout, samples=NUM_SAMPLES) as rig:
        advantages = ragged_advantages(NUM_SAMPLES)
        for drops in (False, True):
            plan = rig.plan(advantages, drops=drops)
            assert sum(len(m.dropped) for m in plan.mini_batches) == (4 if drops else 0)
            for reduction in reductions:
                errors = []
                for position, mini_batch in enumerate(plan.mini_batches):
                    gradient = rig.gradient(advantages, plan, position, reduction=reduction)
                    first, last = int(mini_batch.members[0]), int(mini_batch.members[-1]) + 1
                    errors.append(error_of(rig, family, gradient, reduction, first, last))
                found[f"{reduction} {'skip' if drops else 'dense'}"] = max(errors)
    return found


@pytest.mark.parametrize("name", quick(TOPOLOGIES, *REDUCED))
def test_skip_and_dense_equal_reference_for_every_reduction(pool, name):
    assert_close(pool, name, every_reduction, REDUCTIONS[1:3] if name in ONE_REPLICA else REDUCTIONS)


def every_cut(rank: int, world: int, family: str, layout: tuple[str, ...], cuts: tuple[dict, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    with open_rig(family, *layout, samples=NUM_SAMPLES) as rig:
        advantages, usual = ragged_advantages(NUM_SAMPLES), rig.backend.rules
        for cut in cuts:
            rig.backend.rules = dataclasses.replace(usual, **cut)
            for drops in (False, True):
                gradient = rig.gradient(advantages, rig.plan(advantages, drops=drops))
                found[f"{cut} {drops}"] = error_of(rig, family, gradient)
    return found


@pytest.mark.parametrize("name", quick(TOPOLOGIES, *BASE, *(set(FAMILIES) - set(AGAIN))))
def test_every_cut_into_microbatches_gives_the_reference_gradient(pool, name):
    assert_close(pool, name, every_cut, FEW if name in FAMILIES else CUTS[:6] if name in WITHIN_A_SEQUENCE else CUTS)


def several_calls(rank: int, world: int, family: str, layout: tuple[str, ...]) -> dict[str, float]:
    """Return the errors of three calls and one reduction; then of optim_step's norm and loss over the same."""
    with open_rig(family, SPLIT, *layout, samples=NUM_SAMPLES) as rig:
        advantages, found = ragged_advantages(NUM_SAMPLES), {}
        plan, inputs = rig.plan(advantages, drops=True), rig.inputs(advantages, np.arange(NUM_SAMPLES))
        for again in range(3):  # again: what the first step leaves behind must not leak into the second
            for position in range(len(plan.mini_batches)):
                rig.run(plan, inputs, position)
            if again < 2:
                found[f"gradient {again}"] = error_of(rig, family, rig.taken())
        result = rig.backend.optim_step(plan.mini_batches[-1].kind)
        if rig.is_main:
            layers = rig.model.config.num_hidden_layers
            gradient, loss = wanted(family, layers, "token_mean", 0, NUM_SAMPLES, NUM_SAMPLES)
            norm = float(sum((g.double() ** 2).sum() for g in gradient.values()) ** 0.5)
            found |= {"norm": abs(result.grad_norm / norm - 1), "loss": abs(result.sums["loss"] - loss)}
        return found


@pytest.mark.parametrize("name", quick(CALLS, *CALLS[:2]))
def test_several_calls_before_one_step_add(pool, name):
    assert_close(pool, name, several_calls)  # reduced twice, the norm would be 2x


def with_a_sample_without_loss_tokens(rank: int, world: int, family: str, layout: tuple[str, ...]) -> dict[str, float]:
    """Return the errors where every sample is alone in its micro-batch and one of them is masked throughout."""
    with open_rig(family, *layout) as rig:
        samples = near_policy(rig.model, make_samples(5))
        samples[2] = dataclasses.replace(samples[2], loss_mask=np.zeros_like(samples[2].loss_mask))
        rig.take(samples)
        rig.rules(max_tokens=1)
        advantages = np.array([0.5, -1.0, 2.0, 0.0, 1.0])
        expected, _ = reference_gradient(rig.model, samples, rig.groups, list(advantages))
        plan = rig.plan(advantages, drops=False, passes=True)
        passed = rig.backend.forward(rig.batch, plan)
        assert passed.sums["tokens"] == sum(s.loss_mask.sum() for s in samples)
        for drops in (False, True):
            assert (2 in rig.plan(advantages, drops=drops).mini_batches[0].dropped) is drops
        return rig.errors(advantages, expected)


@pytest.mark.parametrize("layout", quick(["one", "PP2-DP2"], "one"))
def test_sample_without_loss_tokens_adds_nothing(pool, layout):
    assert_close(pool, f"{layout} qwen2_tied", with_a_sample_without_loss_tokens)


def bitwise_pairs(rank: int, world: int, family: str, layout: tuple[str, ...]) -> list[tuple[int, bool, float]]:
    """Compare the gradients of a skip run that drops whole micro-batches, with nothing repacked, and the dense run."""
    advantages = np.where(np.arange(14) < 10, 0.0, np.linspace(-1, 1, 14))  # of two ranks at another place on each
    with open_rig(family, *layout, samples=14) as rig:
        usual, found = rig.backend.rules, []
        for cut in (dict(samples_per_microbatch=2), dict(max_tokens=10)):
            rig.backend.rules = dataclasses.replace(usual, repack=False, **cut)
            wants = rig.gradient(advantages, rig.plan(advantages, drops=False))
            skip = rig.plan(advantages, drops=True)
            same, norm = equal_by_name(rig.gradient(advantages, skip), wants), sum(x.norm() for x in wants.values())
            found.append((int(skip.mini_batches[0].microbatches_dropped), same, float(norm)))
        return found


@pytest.mark.parametrize("name", quick(DROPPED, *DROPPED[:3]))
def test_dropped_microbatches_leave_the_dense_gradient_bitwise(pool, name):
    """They add exact zeros in the dense order, so there is no rounding to tolerate."""
    for found in measured(pool, name, bitwise_pairs):
        assert all(dropped > 0 and same and norm > 0 for dropped, same, norm in found), found


def with_pad_tokens(rank: int, world: int) -> dict[str, float]:
    """Return the errors over samples that hold the pad's id; "frozen": that row in transformers."""
    samples = [dataclasses.replace(s, token_ids=np.where(s.token_ids % 5 == 0, 0, s.token_ids))
               for s in make_samples(6)]
    advantages, name = ragged_advantages(6), "model.embed_tokens.weight"
    with open_rig("qwen2_untied") as rig:
        assert rig.model.config.pad_token_id == 0
        rig.rules(pad_multiple=8)
        rig.take(samples)
        found = rig.gradient(advantages, rig.plan(advantages, drops=True))
        frozen, _ = reference_gradient(rig.model, samples, rig.groups, list(advantages))
        rig.model.get_input_embeddings().padding_idx = None
        expected, _ = reference_gradient(rig.model, samples, rig.groups, list(advantages))
    return {"all": relative_error(found, expected),
            "the pad's row": relative_error({name: found[name][0]}, {name: expected[name][0]}),
            "frozen": float(frozen[name][0].abs().max())}


def test_the_pads_id_is_a_token_like_any_other(pool):
    """It trains its embedding, which transformers' ``padding_idx`` leaves out; pads that fill up do not."""
    (found,) = pool.run(1, with_pad_tokens, timeout_s=60)
    assert found["frozen"] == 0.0 and found["all"] < TOLERANCE and found["the pad's row"] < TOLERANCE, found
