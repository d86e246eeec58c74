"""Ghosts equal zero-gradient steps to the bit, frozen ones move nothing, an infinite gradient is passed over by all."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.advantage import GroupRewards, loss_inputs
from megatron_rl.algorithm.advantage import advantages as estimate
from megatron_rl.backend.optimizer import NonFiniteGradient
from megatron_rl.types import Advantages, StepKind
from tests.equality.layouts import MOVING
from tests.equality.rig import equal, equal_by_name, open_rig, ragged_advantages
from tests.equality.rows import assert_all, measured
from tests.pairwise import quick
from tests.reference import make_samples, sample_of

ADVANTAGES = ragged_advantages(8)
PRODUCT = itertools.product(("DP2", "PP2-DP2", "TP2"), ("plain", "sharded"), ("", "-bf16"))
ALL_WEIGHTS = [f"{layout}-{optimizer}{dtype} qwen2_tied" for layout, optimizer, dtype in PRODUCT]
ADAPTERS = ("TP2-SP-LoRA qwen3", "EP2-LoRA qwen3_moe", "DP2-LoRA-gather-sharded llama3_rope")
LONG_ADAPTERS = ("PP2-DP2-LoRA qwen2_tied", "PP2-DP2-LoRA-gather-sharded qwen2_tied")
MUON = ("DP2-sharded-bf16-muon qwen2_tied", "TP2-muon qwen2_tied", "EP2-sharded-muon qwen3_moe")
QUICK = [f"{x} qwen2_tied" for x in ("DP2-sharded-bf16", "DP2-plain", "TP2-sharded", "TP2-plain-bf16")]
FROZEN = [f"{layout}-frozen qwen2_tied" for layout in ("DP2-sharded", "DP2-plain", "PP2-DP2-sharded", "PP2-DP2-plain")]
FROZEN += ["DP2-sharded-frozen-muon qwen2_tied"]
NONFINITE = [f"{x} qwen2_tied" for x in ("DP2-sharded-gather", "DP2-plain", "PP2-DP2-sharded-gather", "PP2-DP2-plain")]
NONFINITE += ["PP2-DP2-sharded-gather-muon qwen2_tied"]
RAISING = ["PP2-DP2-plain qwen2_tied", "PP2-DP2-sharded qwen2_tied"]


def moving(family: str, layout: tuple[str, ...]):
    return open_rig(family, *MOVING, *layout, samples=8, total_steps=6)


def three_steps(middle: str, family: str, layout: tuple[str, ...]) -> dict[str, object]:
    """Take a real step, ``middle`` (ghost, held, zero-gradient or none) and a real step; return the states between."""
    with moving(family, layout) as rig:
        rig.step(ADVANTAGES, drops=False)
        version = rig.backend.weight_version
        found: dict[str, object] = {"before": rig.optimizer_state(), "weights before": rig.weights()}
        if middle == "ghost":
            result = rig.ghost()
        elif middle == "held":
            plan = rig.plan(np.zeros(8), drops=True).held()
            rig.accumulate(np.zeros(8), plan)
            result = rig.backend.optim_step(plan.mini_batches[0].kind)
            assert result.kind is StepKind.HELD
        elif middle == "zero-gradient":
            (result,) = rig.step(np.zeros(8), drops=False)
            assert result.kind is StepKind.REAL and result.grad_norm == 0.0
        found |= {"after": rig.optimizer_state(), "weights after": rig.weights()}
        found["versions"] = rig.backend.weight_version - version
        if middle != "none":
            found |= {"lr": result.learning_rate, "applied": result.applied}
        rig.step(ADVANTAGES, drops=False)
        return found | {"end": rig.optimizer_state(), "weights end": rig.weights()}


def ghost_against_zero_gradient(rank: int, world: int, family: str, layout: tuple[str, ...]) -> dict[str, bool]:
    ghost, dense = (three_steps(middle, family, layout) for middle in ("ghost", "zero-gradient"))
    found = {key: equal(ghost[key], dense[key]) for key in ("before", "after", "end")}
    found |= {key: equal_by_name(ghost[key], dense[key]) for key in ("weights before", "weights after", "weights end")}
    found["learning rate and version"] = (ghost["lr"], ghost["applied"], ghost["versions"]) == (dense["lr"], True, 1)
    # The state is not empty and the middle step did move the weights, or the equalities prove nothing.
    found["moved"] = not equal_by_name(dense["weights before"], dense["weights after"]) and len(dense["after"]) > 4
    return found


@pytest.mark.parametrize("name", quick((*ALL_WEIGHTS, *ADAPTERS, *LONG_ADAPTERS, *MUON), *QUICK, *ADAPTERS, MUON[0]))
def test_ghost_step_equals_zero_gradient_step(pool, name):
    """To the bit, as both take the same arithmetic on the same zeros."""
    assert_all(pool, name, ghost_against_zero_gradient)


def moves_nothing(rank: int, world: int, family: str, layout: tuple[str, ...], middle: str) -> dict[str, bool]:
    step, none = (three_steps(each, family, layout) for each in (middle, "none"))
    return {"state": equal(step["before"], step["after"]),
            "weights": equal_by_name(step["weights before"], step["weights after"]),
            "version": step["versions"] == 0 and step["applied"] is False,
            "the next step is as if there had been none between": equal(step["end"], none["end"]),
            "the next step moves": not equal(step["after"], step["end"])}


@pytest.mark.parametrize("name", quick(FROZEN, *FROZEN[:2]))
def test_frozen_ghost_moves_nothing(pool, name):
    assert_all(pool, name, moves_nothing, "ghost")


@pytest.mark.parametrize("name", quick(["one qwen2_tied", "PP2 qwen2_tied"], "PP2 qwen2_tied"))
def test_held_step_moves_nothing(pool, name):
    """Under ``skip.ghost: dense`` too, where a ghost decays weights and moments."""
    assert_all(pool, name, moves_nothing, "held")


def with_infinite_advantage(rank, world, family: str, layout: tuple[str, ...], reaction: str) -> dict[str, object]:
    """Take a real step, one in which one sample's advantage, of one rank, is infinite, and a real one."""
    bad = ADVANTAGES.copy()
    bad[5] = np.inf
    with moving(family, (*layout, f"optimizer.on_nonfinite={reaction}")) as rig:
        mini_batch = rig.plan(ADVANTAGES, drops=True).mini_batches[0]
        found: dict[str, object] = {"one rank runs it": sum(5 in mini_batch.rank_samples(d) for d in range(2)) == 1}
        rig.step(ADVANTAGES, drops=True)
        before, weights, version = rig.optimizer_state(), rig.weights(), rig.backend.weight_version
        try:
            (result,) = rig.step(bad, drops=True)
        except NonFiniteGradient as error:
            return found | {"raised": str(error)}
        untouched = equal(rig.optimizer_state(), before) and equal_by_name(rig.weights(), weights)
        found["passed over"] = not result.applied and not np.isfinite(result.grad_norm) and untouched
        found["no version"] = rig.backend.weight_version == version
        (result,) = rig.step(ADVANTAGES, drops=True)
        after = rig.weights()
        works = result.applied and np.isfinite(result.grad_norm)
        found["next step works"] = works and not equal_by_name(after, weights)
        found["next step is finite"] = all(bool(torch.isfinite(x).all()) for x in after.values())
        return found


@pytest.mark.parametrize("name", quick(NONFINITE, *NONFINITE[:2]))
def test_nonfinite_gradient_is_passed_over_on_all_ranks(pool, name):
    assert_all(pool, name, with_infinite_advantage, "skip")


@pytest.mark.parametrize("name", quick(RAISING, RAISING[1]))
def test_nonfinite_gradient_raises_on_all_ranks(pool, name):
    for found in measured(pool, name, with_infinite_advantage, "fail"):
        assert found["one rank runs it"] and "optimizer.on_nonfinite=skip" in found["raised"], found


def first_on_policy_step(rank: int, world: int) -> dict[str, object]:
    """Take a first on-policy step of whole groups under grpo and sequence_mean; the last group's rewards are equal."""
    with open_rig("qwen2_tied") as rig:
        rig.take(make_samples(12), groups=[i // 4 for i in range(12)])
        rewards = np.array([1, 0, 0, 0, 0.3, 1, 0.2, 0, 1, 1, 1, 1], dtype=np.float64)
        given = GroupRewards(totals=rewards, groups=np.array(rig.groups), included=np.ones(12, dtype=bool))
        advantages = estimate(given, estimator="grpo")
        old = rig.logprobs()
        plan = rig.plan(advantages, drops=True)
        (result,) = rig.step(advantages, drops=True, reduction="sequence_mean", old=old)
        dropped = plan.mini_batches[0].dropped.tolist()
        return {"loss": result.sums["loss"], "norm": result.grad_norm, "dropped": dropped}


def test_zero_loss_is_not_zero_gradient(pool):
    """Standardised advantages sum to 0 on-policy, and so does the loss; the drop goes by advantages."""
    for found in pool.run(2, first_on_policy_step, timeout_s=60):
        assert abs(found["loss"]) < 1e-6, found  # ε = 1e-6 beside the standard deviation and float32 ratios; seen 3e-8
        assert found["norm"] > 1e-2, found
        assert found["dropped"] == [8, 9, 10, 11]  # equal rewards, and nothing else


def thousand_tokens(rank: int, world: int, pipeline: int) -> dict[str, float]:
    """Return the loss of 100 tokens at 0.5 each and 900 at 0.3 each: importance_sampling at ratio 1 gives −w·A."""
    advantages = np.array([-0.5] + [-0.3] * 9)
    random = np.random.default_rng(0)
    with open_rig("qwen2_tied", f"parallel.pipeline={pipeline}", "loss.policy=importance_sampling") as rig:
        rig.take([sample_of(f"h{i}", random.integers(2, 99, 103), 100) for i in range(10)])
        old, usual, found = rig.logprobs(), rig.backend.rules, {}
        for cut in [
            *(dict(max_tokens=n) for n in (1, 250, 500, 10_000)),
            *(dict(samples_per_microbatch=n) for n in (1, 2, 3, 10)),
        ]:
            rig.backend.rules = usual
            rig.rules(**cut)
            plan = rig.plan(advantages, drops=True)
            rig.accumulate(advantages, plan, old=old)
            total = rig.backend._sums.values[0].clone()
            rig.backend._sums.zero()
            rig.backend.zero_grad()
            torch.distributed.all_reduce(total)
            found[f"{cut}: {plan.mini_batches[0].num_microbatches.tolist()} micro-batches"] = float(total)
    return found


@pytest.mark.parametrize(("pipeline", "world"), [(1, 1), (1, 2), pytest.param(2, 4, marks=pytest.mark.long)])
def test_token_mean_is_032_and_never_040(pool, pipeline, world):
    for found in pool.run(world, thousand_tokens, pipeline, timeout_s=60):
        assert len(found) == 8
        for cut, loss in found.items():
            assert abs(loss - 0.32) < 1e-5, (cut, loss)  # the ratio is 1 within 1e-6 (two packings in float32)


def step_sums(rank: int, world: int, mode: str) -> list[dict[str, float]]:
    """Return the sums of one step whose survivors share their micro-batches with dropped samples, and do not."""
    found = []
    signal = ADVANTAGES != 0
    for repack in ("true", "false"):
        cut = ("plan.samples_per_microbatch=3", f"plan.repack={repack}", f"skip.mode={mode}")
        with open_rig("qwen2_tied", *cut, samples=8) as rig:
            plan = rig.plan(ADVANTAGES, drops=mode == "exact")
            (step,) = plan.mini_batches
            assert np.isin(step.order, np.flatnonzero(~signal)).any() == (mode == "off" or repack == "false")
            old = rig.logprobs() + np.float32(0.3)
            advantages = Advantages(of_sample=ADVANTAGES)
            limits = dict(drops=mode != "off", max_response_tokens=rig.backend.config.rollout.max_response_tokens)
            inputs = loss_inputs(rig.backend.config.loss, rig.batch.facts, step, advantages, signal, **limits)
            rig.run(plan, dataclasses.replace(inputs, old_logprobs=old))
            found.append(dict(rig.backend.optim_step(step.kind).sums))
            found[-1]["wanted tokens"] = float(rig.batch.facts.loss_tokens[signal | (mode == "off")].sum())
    return found


@pytest.mark.parametrize(("mode", "world"), [("exact", 1), ("exact", 2), ("off", 1)])
def test_metrics_count_survivors_alone_whoever_shares_their_micro_batches(pool, mode, world):
    """Sums of some 60 float32 numbers in another order; the dense run (``skip.mode=off``) measures everything."""
    for repacked, shared in pool.run(world, step_sums, mode, timeout_s=60):
        assert shared["tokens"] == repacked["tokens"] == repacked["wanted tokens"] > 0
        assert shared == pytest.approx(repacked, rel=1e-5)


def both_ways(rank: int, world: int, family: str, parallel: tuple[str, ...]) -> tuple[bool, bool]:
    """Return whether gradients and weights after two steps are the same with run.deterministic and without."""
    found = []
    advantages = ragged_advantages(8)
    try:
        for asked in ("false", "true"):
            with open_rig(family, *parallel, f"run.deterministic={asked}", samples=8, total_steps=10) as rig:
                assert torch.are_deterministic_algorithms_enabled() == (asked == "true")
                rig.step(advantages, drops=True)
                rig.step(advantages, drops=True)
                found.append((rig.gradient(advantages, rig.plan(advantages, drops=True)), rig.weights()))
    finally:
        torch.use_deterministic_algorithms(False)
    (gradient, weights), (other_gradient, other_weights) = found
    return equal_by_name(gradient, other_gradient), equal_by_name(weights, other_weights)


@pytest.mark.parametrize("name", ["one qwen3", "TP2 qwen2_tied", "EP2 qwen3_moe"])
def test_the_gradient_is_that_of_a_run_without_it(pool, name):
    assert all(map(all, measured(pool, name, both_ways)))
