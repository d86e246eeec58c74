"""loss.reduction × loss.denominator × skip.steps against a naive loop from semantics §1 and §3.

The loop says which samples run in which step, with which weight. tests/equality/test_products.py takes the same
products through real schedules.
"""

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.advantage import loss_inputs
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.config import REDUCTIONS, Config, load_config
from megatron_rl.planning.num_steps import steps_per_rollout
from megatron_rl.planning.plan import PlanRules, plan_steps, split_mini_batches
from megatron_rl.types import Advantages, BatchFacts, BatchPlan, StepKind
from tests.pairwise import pairwise
from tests.unit.algorithm.facts import make_facts
from tests.unit.algorithm.naive_steps import DENOMINATORS, MAX_RESPONSE_TOKENS, STEPS, naive_steps

# Derandomized: the same cases on every machine, so that a failure is never a matter of luck.
SETTINGS = settings(max_examples=20, deadline=None, derandomize=True, database=None)
every_product = pytest.mark.parametrize("reduction, denominator, steps", pairwise(REDUCTIONS, DENOMINATORS, STEPS))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch: masks per sample, groups, advantages, and its cut. Mini-batches cut through groups."""

    masks: list[np.ndarray]
    groups: np.ndarray
    advantages: np.ndarray
    samples_per_mini_batch: int | None
    rules: PlanRules

    @property
    def facts(self) -> BatchFacts:
        return make_facts(self.groups, [m.sum() for m in self.masks], [len(m) for m in self.masks])

    def plan(self, *, steps: str = "match", drops: bool = True, advantages: np.ndarray | None = None) -> BatchPlan:
        """Plan as the backend does: nothing is merged where nothing is dropped."""
        facts = self.facts
        signal = has_signal(self.advantages if advantages is None else advantages, facts.loss_tokens)
        merge = drops and steps == "merge"
        mini_batches = split_mini_batches(np.arange(facts.num_samples), self.samples_per_mini_batch, merge=merge)
        return plan_steps("train", mini_batches, facts.total_tokens, signal, self.rules, drops=drops)


@st.composite
def cases(draw) -> Case:
    """Draw ragged masks with holes, some of them empty, and drop patterns from none to all."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, 20))
    masks = [random.random(random.integers(1, 12)) < random.choice([0.9, 0.9, 0.0]) for _ in range(count)]
    size = draw(st.sampled_from([None, 1, 3, 5]))
    advantages = random.normal(size=count)
    match draw(st.sampled_from(["none", "some", "a mini-batch", "a group", "all"])):
        case "some":
            advantages[random.random(count) < 0.6] = 0.0
        case "a mini-batch":
            advantages[: size or count // 2] = 0.0
        case "a group":
            advantages[2:4] = 0.0
        case "all":
            advantages[:] = 0.0
    rules = PlanRules(data_size=draw(st.sampled_from([1, 2])), max_tokens=draw(st.sampled_from([1, 40])))
    groups = np.arange(count) // 2
    return Case(masks=masks, groups=groups, advantages=advantages, samples_per_mini_batch=size, rules=rules)


@functools.cache
def config_of(reduction: str, denominator: str, mode: str) -> Config:
    given = [f"loss.reduction={reduction}", f"loss.denominator={denominator}", f"skip.mode={mode}"]
    return load_config(None, [*given, f"rollout.max_response_tokens={MAX_RESPONSE_TOKENS}"])


def weights_of(case: Case, plan: BatchPlan, reduction: str, denominator: str, advantages: np.ndarray | None = None, *,
               mode: str = "approximate") -> list[np.ndarray]:
    """Return the weights [S] that the run's loop gives to the loss in each step."""
    config, values = config_of(reduction, denominator, mode), case.advantages if advantages is None else advantages
    signal = has_signal(values, case.facts.loss_tokens)
    found = []
    for mini_batch in plan.mini_batches:
        limits = dict(drops=mode != "off", max_response_tokens=MAX_RESPONSE_TOKENS)
        inputs = loss_inputs(config.loss, case.facts, mini_batch, Advantages(of_sample=values), signal, **limits)
        assert np.array_equal(inputs.advantages, values * inputs.weights)
        found.append(inputs.weights)
    return found


@every_product
@SETTINGS
@given(case=cases())
def test_steps_and_weights_equal_the_naive_loop(case: Case, reduction: str, denominator: str, steps: str) -> None:
    plan, product = case.plan(steps=steps), dict(reduction=reduction, denominator=denominator, steps=steps)
    batch = case.masks, case.groups.tolist(), case.advantages.tolist(), case.samples_per_mini_batch
    wanted, found = [*naive_steps(*batch, **product)], weights_of(case, plan, reduction, denominator)
    assert len(plan.mini_batches) == len(wanted)
    for mini_batch, weights, (live, naive) in zip(plan.mini_batches, found, wanted, strict=True):
        assert (mini_batch.kind is StepKind.GHOST) == (not live) and sorted(mini_batch.order.tolist()) == live
        # one division of exact integers
        np.testing.assert_allclose(weights[live], [naive[i] for i in live], rtol=1e-14)


@every_product
@SETTINGS
@given(case=cases())
def test_kept_equals_original_when_nothing_is_dropped(case: Case, reduction: str, denominator: str, steps: str) -> None:
    """Bit by bit in each step: of a whole batch with signal, and under skip.mode=off of any batch."""
    alive = np.where(case.advantages == 0, 1.0, case.advantages)
    for plan, values, mode in (
        (case.plan(steps=steps, advantages=alive), alive, "approximate"),
        (case.plan(steps=steps, drops=False), None, "off"),
    ):
        for found, wanted in zip(
            *(weights_of(case, plan, reduction, d, values, mode=mode) for d in (denominator, "original")), strict=True
        ):
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@SETTINGS
@given(case=cases(), size=st.integers(1, 4))
def test_kept_denominators_do_not_depend_on_the_cut(case: Case, reduction: str, size: int) -> None:
    """Without repacking, samples without signal run beside survivors, and are counted no more than otherwise."""
    whole = dataclasses.replace(case.rules, repack=False, max_tokens=10_000, samples_per_microbatch=size)
    cut = dataclasses.replace(case, rules=whole).plan()
    for found, wanted in zip(*(weights_of(case, plan, reduction, "kept") for plan in (cut, case.plan())), strict=True):
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@SETTINGS
@given(case=cases())
def test_match_with_original_denominators_equals_the_dense_run(case: Case, reduction: str) -> None:
    """As many steps, and in each the dense run's weights, bit by bit: the skip is lossless."""
    skip, dense = (weights_of(case, case.plan(drops=drops), reduction, "original") for drops in (True, False))
    assert len(skip) == len(dense) and all(np.array_equal(a, b) for a, b in zip(skip, dense, strict=True))


@pytest.mark.parametrize("reduction, denominator", pairwise(REDUCTIONS, DENOMINATORS, strength=1))
@SETTINGS
@given(case=cases())
def test_merge_equals_match_on_one_mini_batch(case: Case, reduction: str, denominator: str) -> None:
    """One step, its denominators those of the merged mini-batch, a ghost only where nothing of the batch has signal."""
    merged, whole = case.plan(steps="merge"), dataclasses.replace(case, samples_per_mini_batch=None).plan()
    assert len(merged.mini_batches) == 1 and merged.fingerprints() == whole.fingerprints()
    (found,), (wanted,) = (weights_of(case, plan, reduction, denominator) for plan in (merged, whole))
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("mode", "steps", "wanted"),
    [("exact", "match", 8), ("exact", "merge", 2), ("approximate", "merge", 2), ("off", "merge", 8)],
)
def test_merge_has_one_step_an_epoch(mode: str, steps: str, wanted: int) -> None:
    """Where nothing is dropped nothing is merged: 16 prompts of 4 in mini-batches of 16, and two epochs."""
    sizes = ["prompts_per_rollout=16", "samples_per_mini_batch=16", "epochs_per_rollout=2"]
    given = [f"skip.mode={mode}", f"skip.steps={steps}", "rollout.samples_per_prompt=4", *(f"train.{x}" for x in sizes)]
    config = load_config(None, given)
    assert steps_per_rollout(config.train, config.rollout, config.skip) == wanted
