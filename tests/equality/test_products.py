"""loss.reduction × loss.denominator × skip.steps equal a plain loop over the Hugging Face model.

They go through train.py's loop on real schedules. Compared are the gradient of each step, the norms that the optimizer
met, and all weights after the rollout's real and ghost steps.
"""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.advantage import loss_inputs
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.types import Advantages, StepKind
from tests.equality.given_run import fresh_run, train_once
from tests.equality.given_samples import (
    ADVANTAGES,
    BOUND,
    CLIP,
    FAMILY,
    GROUPS,
    PER_MINI_BATCH,
    SETTINGS,
    drawn,
    plain_steps,
)
from tests.equality.layouts import PP2, REDUCTIONS, TP2
from tests.equality.rig import equal_by_name, open_rig
from tests.pairwise import covering
from tests.reference import gradient_of, reference_logprobs, relative_error
from tests.unit.algorithm.naive_steps import DENOMINATORS, STEPS, naive_steps

FACTORS = (REDUCTIONS, DENOMINATORS, STEPS)
PRODUCTS = list(itertools.product(*FACTORS))
# what test_reductions.py takes in ``make test``
TAKEN = [tuple(values[i] for values, i in zip(FACTORS, row, strict=True)) for row in covering(FACTORS, 2)]
OTHERS = [product for product in PRODUCTS if product not in TAKEN]
GIVEN = (*SETTINGS, "correction.old_logprobs=rollout")


def settings_of(reduction: str, denominator: str, steps: str) -> tuple[str, ...]:
    mode = "approximate" if denominator == "kept" else "exact"
    product = (f"loss.reduction={reduction}", f"loss.denominator={denominator}", f"skip.steps={steps}")
    return (*GIVEN, *product, f"skip.mode={mode}")


def add_gradient(weights: dict[int, float]) -> None:
    """Add Σ_i w_i Σ_t −min(r·A, clip(r)·A) to the model's gradients, token by token; a ghost adds nothing."""
    model, samples = drawn()
    for i, weight in weights.items():
        logprobs, _ = reference_logprobs(model, samples[i])
        advantage, loss = float(ADVANTAGES[i]), torch.zeros(())
        for t in np.flatnonzero(samples[i].loss_mask).tolist():
            ratio = (logprobs[t] - float(samples[i].logprobs[t])).exp()
            loss = loss - weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss.backward()


@functools.cache
def wanted(product: tuple[str, str, str]) -> tuple[list[dict[str, torch.Tensor]], list[float], dict[str, torch.Tensor]]:
    """Return (each step's gradient at the first weights, norms before clipping, last weights) by torch's AdamW."""
    model, samples = drawn()
    names = dict(zip(("reduction", "denominator", "steps"), product, strict=True))
    given = ([s.loss_mask for s in samples], GROUPS, ADVANTAGES.tolist(), PER_MINI_BATCH)
    weights, gradients = [each for _, each in naive_steps(*given, **names)], []
    for each in weights:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        add_gradient(each)
        gradients.append(gradient_of(model))
    ended, norms = plain_steps(weights, add_gradient)
    return gradients, norms, ended


def step_gradients(rig, run, advantages) -> tuple[list[StepKind], list[dict[str, torch.Tensor]]]:
    """Return each planned step's gradient at the first weights under the loop's inputs; a ghost's are zeros."""
    signal, found = has_signal(advantages, rig.batch.facts.loss_tokens), []
    plan, old = rig.plan_of(signal, drops=run.rule.drops), np.concatenate([s.logprobs for s in rig.samples])
    for position, step in enumerate(plan.mini_batches):
        wanted = Advantages(of_sample=advantages)
        limits = dict(drops=run.rule.drops, max_response_tokens=run.config.rollout.max_response_tokens)
        inputs = loss_inputs(run.config.loss, rig.batch.facts, step, wanted, signal, **limits)
        rig.run(plan, dataclasses.replace(inputs, old_logprobs=old), position)
        found.append(rig.backend.gradient())
        rig.backend.zero_grad()
    return [mini_batch.kind for mini_batch in plan.mini_batches], found


def error_of(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Return the relative error; of a ghost, the largest number that should be 0."""
    is_ghost = not any(bool(x.any()) for x in want.values())
    return max(float(x.abs().max()) for x in found.values()) if is_ghost else relative_error(found, want)


def measured(rank: int, world: int, products: list[tuple[str, str, str]], *layout: str) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    with open_rig(FAMILY, *layout, *GIVEN) as rig:
        rig.take(drawn()[1], GROUPS)
        for product in products:
            run = fresh_run(rig, ADVANTAGES, *settings_of(*product))
            kinds, gradients = step_gradients(rig, run, ADVANTAGES)
            train_once(run)
            weights = rig.weights()
            assert [result.kind for result in run.results] == kinds and all(result.applied for result in run.results)
            if rig.is_main:
                want_gradients, want_norms, want_weights = wanted(product)
                found[" ".join(product)] = {
                    "kinds": [kind.value for kind in kinds],
                    "silent": [mini_batch.silent_ranks for mini_batch in run.plan.mini_batches],
                    "gradient": max(error_of(a, b) for a, b in zip(gradients, want_gradients, strict=True)),
                    "norm": max(abs(r.grad_norm - n) / max(n, 1e-9)
                                for r, n in zip(run.results, want_norms, strict=True)),
                    "weights": relative_error(weights, {name: want_weights[name] for name in weights}),
                    "clipped": sum(n > CLIP for n in want_norms),
                }
        found["nothing dropped"] = {reduction: whole_batches_agree(rig, reduction) for reduction in REDUCTIONS}
    return found


def whole_batches_agree(rig, reduction: str) -> bool:
    """Return whether ``kept`` equals ``original``, bit by bit, where every sample has signal."""
    alive, pairs, samples = np.delete(np.where(ADVANTAGES == 0, 0.25, ADVANTAGES), 12), [], drawn()[1]
    rig.take([*samples[:12], *samples[13:]], [*GROUPS[:12], *GROUPS[13:]])
    for denominator in DENOMINATORS:
        run = fresh_run(rig, alive, *settings_of(reduction, denominator, "match"))
        kinds, gradients = step_gradients(rig, run, alive)
        assert kinds == [StepKind.REAL] * 4
        pairs.append(gradients)
    return all(equal_by_name(a, b) for a, b in zip(*pairs, strict=True))


@pytest.mark.parametrize(("layout", "products"), [
    pytest.param((), OTHERS, id="DP2-others", marks=pytest.mark.long),
    pytest.param((), PRODUCTS, id="DP2", marks=pytest.mark.long),
    pytest.param((TP2, PP2), PRODUCTS, id="TP2-PP2", marks=pytest.mark.long),
])
def test_every_product_equals_the_plain_loop(pool, layout, products):
    """In ``make test`` those that test_reductions.py does not take there: every two values meet in either half."""
    found = pool.run(4 if layout else 2, measured, products, *layout, timeout_s=120)[0]
    assert all(found.pop("nothing dropped").values()) and len(found) == len(products)
    for product, cell in found.items():
        merged = product.endswith("merge")
        assert cell["kinds"] == (["REAL"] if merged else ["REAL", "GHOST", "REAL", "REAL"]), (product, cell)
        assert cell["silent"] == ([0] if merged else [0, 0, 0, 0 if layout else 1]), (product, cell)
        assert cell["gradient"] < BOUND and cell["weights"] < BOUND, (product, cell)
        assert cell["norm"] < 1e-4, (product, cell)  # at weights that AdamW has already moved by rounding
    assert {cell["clipped"] > 0 for cell in found.values()} == {True, False}  # both sides of the clip
