"""The gradient of the loss's KL and entropy terms on real Megatron equals a plain loop's over Hugging Face models."""

import copy

import pytest
import torch

from megatron_rl.trainer.reference_policy import ReferencePolicy
from tests.equality.layouts import TOLERANCE
from tests.equality.rig import Rig, open_rig, ragged_advantages
from tests.equality.rows import measured
from tests.pairwise import pairwise, quick
from tests.reference import near_policy, reference_gradient, reference_logprobs, relative_error

NUM_SAMPLES, BETA, ENTROPY = 7, 0.7, 0.05
LAYOUTS = ("DP2", "TP2-PP2", "TP2-SP-PP2-VPP2")
QUICK = {*(("DP2", "fixed", "k1"), ("DP2", "adaptive", "k2"), ("DP2", "adaptive", "k3")),
         ("TP2-SP-PP2-VPP2", "adaptive", "unbiased")}
COMMON = ("skip.mode=off", "optimizer.lr=0.003", f"loss.kl_coefficient={BETA}", f"loss.entropy_coefficient={ENTROPY}")
ADAPTIVE = ("reference.controller=adaptive", "reference.kl_target=0.01", "reference.kl_horizon=640")
ESTIMATORS = ("k1", "k2", "k3", "unbiased")


def moved_policy(rig: Rig) -> torch.nn.Module:
    """Keep the reference, take two steps of the policy away from it, and return the policy as a Hugging Face model."""
    rig.backend.keep_reference()
    for _ in range(2):
        rig.step(ragged_advantages(NUM_SAMPLES), drops=False)
    policy = copy.deepcopy(rig.model)
    missing = policy.load_state_dict({name: x.float() for name, x in rig.weights().items()}, strict=False)
    assert not missing.unexpected_keys
    return policy


def terms(rank, world, family, layout, controller, estimator, placement) -> dict[str, float]:
    extra = ADAPTIVE if controller == "adaptive" else ()
    given = (*COMMON, *extra, f"loss.kl_estimator={estimator}", f"reference.placement={placement}")
    with open_rig(family, *layout, *given, samples=NUM_SAMPLES) as rig:
        settings = rig.backend.config
        reference = ReferencePolicy(settings.loss, settings.reference, rig.backend)
        policy = moved_policy(rig)
        rig.take(near_policy(policy, rig.samples, seed=2))
        reference.observe(0.02, 160)
        flat = reference.logprobs(rig.batch, rig.everyone)
        advantages = ragged_advantages(NUM_SAMPLES)
        plan = rig.plan(advantages, drops=False)
        terms = {"reference_logprobs": flat, "kl_coefficient": reference.loss_coefficient}
        gradient = rig.gradient(advantages, plan, **terms)
        rig.accumulate(advantages, rig.plan(advantages, drops=False), **terms)
        sums = dict(rig.backend.optim_step(plan.mini_batches[0].kind).sums)
        with torch.no_grad():
            kept = [reference_logprobs(rig.model, s)[0] for s in rig.samples]
            entropies = [reference_logprobs(policy, s)[1][torch.from_numpy(s.loss_mask)] for s in rig.samples]
        kl = (reference.coefficient, estimator, kept)
        wanted, loss = reference_gradient(policy, rig.samples, rig.groups, list(advantages), kl=kl,
                                          entropy_coefficient=ENTROPY)
        no_kl, _ = reference_gradient(policy, rig.samples, rig.groups, list(advantages), entropy_coefficient=ENTROPY)
        no_bonus, _ = reference_gradient(policy, rig.samples, rig.groups, list(advantages), kl=kl)
        return {"gradient": relative_error(gradient, wanted),
                "size of kl": relative_error(no_kl, wanted),
                "size of bonus": relative_error(no_bonus, wanted),
                "loss": abs(sums["loss"] - loss),
                "entropy": abs(sums["entropy"] / float(torch.cat(entropies).sum()) - 1),
                "coefficient": reference.coefficient}


# Every estimator, either controller, the largest layout: an estimator is a function of a token, which no layout cuts.
@pytest.mark.parametrize(("layout", "controller", "estimator"),
                         pairwise(LAYOUTS, ["fixed", "adaptive"], ESTIMATORS, kept=QUICK))
def test_kl_and_entropy_in_the_loss_equal_a_plain_loop(pool, layout, controller, estimator):
    placement = "device" if controller == "adaptive" else "host"
    for found in measured(pool, f"{layout} qwen2_tied", terms, controller, estimator, placement):
        assert max(found["gradient"], found["loss"], found["entropy"]) < TOLERANCE, found
        assert min(found["size of kl"], found["size of bonus"]) > 1e-3, found  # neither is lost in the rest
        assert found["coefficient"] == (BETA if controller == "fixed" else BETA * (1 + 0.2 * 160 / 640))


def entropy_metric(rank: int, world: int, family: str, layout: tuple[str, ...]) -> dict[str, float]:
    """Return what one step without coefficient or KL reports of entropy, and how often its schedule ran."""
    with open_rig(family, *layout, samples=NUM_SAMPLES) as rig:
        advantages, runs = ragged_advantages(NUM_SAMPLES), []
        plan, run = rig.plan(advantages, drops=True), rig.backend.schedule.run
        rig.backend.schedule.run = lambda *args, **kwargs: runs.append(kwargs) or run(*args, **kwargs)
        rig.accumulate(advantages, plan)
        result = rig.backend.optim_step(plan.mini_batches[0].kind)
        trained = [rig.samples[i] for i in plan.mini_batches[0].order]
        with torch.no_grad():
            naive = torch.cat([reference_logprobs(rig.model, s)[1][torch.from_numpy(s.loss_mask)] for s in trained])
        return {"found": result.sums["entropy"] / result.sums["tokens"],
                "wanted": float(naive.mean()),
                "tokens": result.sums["tokens"],
                "count": len(naive),
                "runs": len(runs),
                "dropped": len(plan.mini_batches[0].dropped)}


@pytest.mark.parametrize("layout", quick(LAYOUTS, "DP2"))
def test_entropy_is_measured_without_a_coefficient_and_without_a_pass(pool, layout):
    for found in measured(pool, f"{layout} qwen3", entropy_metric):
        assert found["found"] == pytest.approx(found["wanted"], rel=TOLERANCE)
        assert found["tokens"] == found["count"] > 10 and found["runs"] == 1 and found["dropped"] == 3, found
