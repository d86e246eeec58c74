"""Ghosts equal zero-gradient steps to the bit, frozen ones move nothing, an infinite gradient is passed over by all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.advantage import GroupRewards, loss_inputs
from megatron_rl.algorithm.advantage import advantages as estimate
from megatron_rl.backend.optimizer import NonFiniteGradient
from megatron_rl.types import Advantages, Sample, StepKind
from tests.equality.rig import equal, equal_by_name, open_rig, ragged_advantages, sizes
from tests.pairwise import pairwise, quick
from tests.reference import make_samples

MOVING = (  # everything that a step without gradient still moves
    "optimizer.lr=0.01",
    "optimizer.weight_decay=0.1",
    "optimizer.schedule=cosine",
    "optimizer.warmup_steps=2",
    "optimizer.decay_steps=6",
    "optimizer.min_lr=0.001",
)
ADVANTAGES = ragged_advantages(8)


def three_steps(middle: str, tensor: int, pipeline: int, extra: tuple[str, ...]) -> dict[str, object]:
    """Take a real step, ``middle`` (ghost, held, zero-gradient or none) and a real step; return the states between."""
    with open_rig("qwen2_tied", *sizes(tensor, pipeline), *MOVING, *extra, samples=8, total_steps=6) as rig:
        rig.step(ADVANTAGES, drops=False)
        before, version = rig.optimizer_state(), rig.backend.weight_version
        found: dict[str, object] = {"before": before, "weights before": rig.weights()}
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
        found |= {
            "after": rig.optimizer_state(),
            "weights after": rig.weights(),
            "versions": rig.backend.weight_version - version,
        }
        if middle != "none":
            found |= {"lr": result.learning_rate, "applied": result.applied}
        rig.step(ADVANTAGES, drops=False)
        return found | {"end": rig.optimizer_state(), "weights end": rig.weights()}


def ghost_against_zero_gradient(rank, world, tensor, pipeline, extra) -> dict[str, bool]:
    ghost, dense = (three_steps(middle, tensor, pipeline, extra) for middle in ("ghost", "zero-gradient"))
    found = {key: equal(ghost[key], dense[key]) for key in ("before", "after", "end")}
    found |= {key: equal_by_name(ghost[key], dense[key]) for key in ("weights before", "weights after", "weights end")}
    found["learning rate and version"] = (ghost["lr"], ghost["applied"], ghost["versions"]) == (dense["lr"], True, 1)
    # The state is not empty and the middle step did move the weights, or the equalities prove nothing.
    found["moved"] = not equal_by_name(dense["weights before"], dense["weights after"]) and len(dense["after"]) > 4
    return found


@pytest.mark.parametrize(
    ("degrees", "distributed", "dtype"),
    pairwise([(1, 1, 2), (1, 2, 2), (2, 1, 1)], ["false", "true"], ["float32", "bfloat16"]),
)
def test_ghost_step_equals_zero_gradient_step(pool, degrees, distributed, dtype):
    """To the bit, as both take the same arithmetic on the same zeros."""
    tensor, pipeline, data = degrees
    extra = (f"model.dtype={dtype}", f"optimizer.distributed={distributed}")
    for found in pool.run(tensor * pipeline * data, ghost_against_zero_gradient, tensor, pipeline, extra, timeout_s=60):
        assert all(found.values()), found


def frozen(rank: int, world: int, pipeline: int, extra: tuple[str, ...]) -> dict[str, bool]:
    extra = (*extra, "skip.ghost=freeze")
    ghost, none = (three_steps(middle, 1, pipeline, extra) for middle in ("ghost", "none"))
    return {
        "state": equal(ghost["before"], ghost["after"]),
        "weights": equal_by_name(ghost["weights before"], ghost["weights after"]),
        "version": ghost["versions"] == 0 and ghost["applied"] is False,
        "the next step is as if there had been no ghost": equal(ghost["end"], none["end"]),
        "the next step moves": not equal(ghost["after"], ghost["end"]),
    }


@pytest.mark.parametrize(("pipeline", "distributed"), pairwise([1, 2], ["true", "false"], strength=1))
def test_frozen_ghost_moves_nothing(pool, pipeline, distributed):
    for found in pool.run(2 * pipeline, frozen, pipeline, (f"optimizer.distributed={distributed}",), timeout_s=60):
        assert all(found.values()), found


def held(rank: int, world: int, pipeline: int, extra: tuple[str, ...]) -> dict[str, bool]:
    step, none = (three_steps(middle, 1, pipeline, extra) for middle in ("held", "none"))
    return {
        "state": equal(step["before"], step["after"]),
        "weights": equal_by_name(step["weights before"], step["weights after"]),
        "version": step["versions"] == 0 and step["applied"] is False,
        "the next step is as if there had been no held one": equal(step["end"], none["end"]),
    }


@pytest.mark.parametrize("pipeline", [1, 2])
def test_held_step_moves_nothing(pool, pipeline):
    """Under ``skip.ghost: dense`` too, where a ghost decays weights and moments."""
    for found in pool.run(pipeline, held, pipeline, (), timeout_s=60):
        assert all(found.values()), found


# ---- a gradient that is not finite -----------------------------------------------------------------------------------


def with_infinite_advantage(rank: int, world: int, pipeline: int, extra: tuple[str, ...]) -> dict[str, object]:
    """Take a real step, one in which one sample's advantage, of one rank, is infinite, and a real one."""
    bad = ADVANTAGES.copy()
    bad[5] = np.inf
    with open_rig("qwen2_tied", *sizes(1, pipeline), *MOVING, *extra, samples=8, total_steps=6) as rig:
        runners = [
            rig.backend.plan("train", rig.batch, ADVANTAGES != 0, drops=True).mini_batches[0].rank_samples(d)
            for d in range(2)
        ]
        rig.step(ADVANTAGES, drops=True)
        before, weights, version = rig.optimizer_state(), rig.weights(), rig.backend.weight_version
        found: dict[str, object] = {"one rank runs it": sum(5 in x for x in runners) == 1}
        try:
            (result,) = rig.step(bad, drops=True)
        except NonFiniteGradient as error:
            return found | {"raised": str(error)}
        found["passed over"] = (
            not result.applied and not np.isfinite(result.grad_norm) and rig.backend.weight_version == version
        )
        found["state untouched"] = equal(rig.optimizer_state(), before) and equal_by_name(rig.weights(), weights)
        (result,) = rig.step(ADVANTAGES, drops=True)
        after = rig.weights()
        found["next step works"] = (
            result.applied and np.isfinite(result.grad_norm) and not equal_by_name(after, weights)
        )
        found["next step is finite"] = all(bool(torch.isfinite(x).all()) for x in after.values())
        return found


OVERLAP = (
    "megatron.ddp.overlap_grad_reduce=true",
    "megatron.ddp.overlap_param_gather=true",
    "megatron.ddp.bucket_size=1000",
)


@pytest.mark.parametrize(
    ("pipeline", "extra"),
    pairwise(
        [1, 2],
        [("optimizer.distributed=true", *OVERLAP), ("optimizer.distributed=false",)],
        strength=1,
        ids=lambda x: f"PP{x}" if isinstance(x, int) else "overlap" if len(x) > 1 else "plain",
    ),
)
def test_nonfinite_gradient_is_passed_over_on_all_ranks(pool, pipeline, extra):
    for found in pool.run(
        2 * pipeline, with_infinite_advantage, pipeline, (*extra, "optimizer.on_nonfinite=skip"), timeout_s=60
    ):
        assert all(found.values()), found


@pytest.mark.parametrize("distributed", quick(["false", "true"], "true"))
def test_nonfinite_gradient_raises_on_all_ranks(pool, distributed):
    results = pool.run(4, with_infinite_advantage, 2, (f"optimizer.distributed={distributed}",), timeout_s=60)
    assert len(results) == 4
    for found in results:
        assert found["one rank runs it"] and "optimizer.on_nonfinite=skip" in found["raised"], found


# ---- what a loss says and does not say -------------------------------------------------------------------------------


def first_on_policy_step(rank: int, world: int) -> dict[str, object]:
    """Take a first on-policy step of whole groups under grpo and sequence_mean; the last group's rewards are equal."""
    with open_rig("qwen2_tied") as rig:
        rig.take(make_samples(12), groups=[i // 4 for i in range(12)])
        rewards = np.array([1, 0, 0, 0, 0.3, 1, 0.2, 0, 1, 1, 1, 1], dtype=np.float64)
        given = GroupRewards(totals=rewards, groups=np.array(rig.groups), included=np.ones(12, dtype=bool))
        advantages = estimate(given, estimator="grpo")
        old = rig.backend.logprobs(rig.batch, np.ones(12, dtype=bool)).flat
        plan = rig.plan(advantages, drops=True)
        (result,) = rig.step(advantages, drops=True, reduction="sequence_mean", old=old)
        dropped = plan.mini_batches[0].dropped.tolist()
        return {"loss": result.sums["loss"], "norm": result.grad_norm, "dropped": dropped}


def test_zero_loss_is_not_zero_gradient(pool):
    """Standardised advantages sum to 0 on-policy, and so does the loss; the drop goes by advantages."""
    for found in pool.run(2, first_on_policy_step, timeout_s=60):
        print(found)
        assert abs(found["loss"]) < 1e-6, found  # ε = 1e-6 beside the standard deviation and float32 ratios; seen 3e-8
        assert found["norm"] > 1e-2, found
        assert found["dropped"] == [8, 9, 10, 11]  # equal rewards, and nothing else


def thousand_tokens(rank: int, world: int, pipeline: int) -> dict[str, float]:
    """Return the loss of 100 tokens at 0.5 each and 900 at 0.3 each: importance_sampling at ratio 1 gives −w·A."""
    advantages = np.array([-0.5] + [-0.3] * 9)
    random = np.random.default_rng(0)
    with open_rig("qwen2_tied", *sizes(1, pipeline), "loss.policy=importance_sampling") as rig:
        samples = [_sample_of_hundred(random, i) for i in range(10)]
        rig.take(samples)
        old = rig.backend.logprobs(rig.batch, np.ones(10, dtype=bool)).flat
        usual, found = rig.backend.rules, {}
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


def _sample_of_hundred(random: np.random.Generator, i: int) -> Sample:
    return Sample(
        sample_id=f"h{i}",
        prompt_tokens=3,
        token_ids=random.integers(2, 99, 103),
        loss_mask=np.ones(100, dtype=bool),
        logprobs=np.zeros(100, dtype=np.float32),
    )


@pytest.mark.parametrize(("pipeline", "data"), [(1, 1), (1, 2), (2, 2)])
def test_token_mean_is_032_and_never_040(pool, pipeline, data):
    for found in pool.run(pipeline * data, thousand_tokens, pipeline, timeout_s=60):
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
            shares = bool(np.isin(step.order, np.flatnonzero(~signal)).any())
            assert shares == (mode == "off" or repack == "false")
            old = rig.backend.logprobs(rig.batch, np.ones(8, dtype=bool)).flat + np.float32(0.3)
            advantages = Advantages(of_sample=ADVANTAGES)
            inputs = loss_inputs(rig.backend.config, rig.batch.facts, step, advantages, signal, old=old)
            rig.backend.forward_backward(rig.batch, step, inputs, fingerprint=plan.fingerprints()[0])
            found.append(dict(rig.backend.optim_step(step.kind).sums))
            found[-1]["wanted tokens"] = float(rig.batch.facts.loss_tokens[signal | (mode == "off")].sum())
    return found


@pytest.mark.parametrize(("mode", "world"), [("exact", 1), ("exact", 2), ("off", 1)])
def test_metrics_count_survivors_alone_whoever_shares_their_micro_batches(pool, mode, world):
    """Sums of some 60 float32 numbers in another order; the dense run (``skip.mode=off``) measures everything."""
    for repacked, shared in pool.run(world, step_sums, mode, timeout_s=60):
        assert shared["tokens"] == repacked["tokens"] == repacked["wanted tokens"] > 0
        assert shared == pytest.approx(repacked, rel=1e-5)
