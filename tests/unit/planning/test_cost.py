"""planning/cost.py: its invariants under Hypothesis, its fits, and its closed form.

Fits are compared with the models that generated them, the closed form with planning/timeline.py's clock.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.planning.cost import (
    MOST_MICROBATCHES,
    NUM_SUMS,
    CostFit,
    CostModel,
    StageCost,
    _nonnegative,
    measured,
    plan_seconds,
    prior,
)
from megatron_rl.planning.plan import PlanRules
from megatron_rl.planning.timeline import simulate
from megatron_rl.planning.tokens import SampleTokens
from tests.unit.planning.lockstep import one_step, pipeline

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True, database=None)
PRIOR = prior([(6.0, 6.0, 6.0)] * 2, virtual=1, overhead_tokens=256, square_share=1e-3, head_layers=1.5)


@st.composite
def models(draw) -> CostModel:
    """Draw one to five stages, some without a fixed cost: the slowest one depends on the number of micro-batches."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    number = draw(st.integers(1, 5))
    stages = tuple(StageCost(overhead=random.choice([0.0, random.uniform(0, 300)]), token=random.uniform(0.1, 3.0),
                             square=random.choice([0.0, random.uniform(0, 1e-2)]))
                   for _ in range(number))
    return CostModel(stages=stages, virtual=draw(st.integers(1, 3)) if number > 1 else 1)


def microbatches(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and Σ l² of ragged micro-batches of one to eight sequences each."""
    random = np.random.default_rng(seed)
    lengths = [random.integers(1, 500, random.integers(1, 9)) for _ in range(count)]
    return np.array([x.sum() for x in lengths], dtype=float), np.array([(x**2).sum() for x in lengths], dtype=float)


def step_of(model: CostModel, tokens: np.ndarray, squares: np.ndarray, *, noise: float = 0.0,
            seed: int = 0) -> np.ndarray:
    """Return the sums [stages, NUM_SUMS] that ranks would measure under ``model``, a third of its seconds forward."""
    random, rows = np.random.default_rng(seed), []
    for stage in model.stages:
        forward = stage.seconds(tokens, squares) / 3 * random.uniform(1 - noise, 1 + noise, len(tokens))
        rows.append(measured(tokens, squares, forward, 2 * forward.sum()))
    return np.stack(rows)


@SETTINGS
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.sampled_from([0.0, 0.5, 0.99]))
def test_coefficients_are_never_negative(seed, count, noise) -> None:
    """Even where times fall with tokens."""
    random = np.random.default_rng(seed)
    tokens, squares = microbatches(seed, count)
    shrink, fit = 1 if noise < 0.9 else 1 / tokens, CostFit(prior=PRIOR)
    forward = random.uniform(0, 1, (2, count)) * shrink
    fit.add(np.stack([measured(tokens, squares, each, random.uniform(0, 2)) for each in forward]))
    found = np.array([dataclasses.astuple(stage) for stage in fit.model().stages])
    assert (found >= 0).all() and np.isfinite(found).all()  # 1


def test_without_measurements_the_prior_stands() -> None:
    fit = CostFit(prior=PRIOR)
    assert fit.model() == PRIOR  # 1
    fit.add(np.zeros((2, NUM_SUMS)))  # a ghost step
    assert fit.model() == PRIOR
    one_stage = step_of(PRIOR, *microbatches(0, 4))
    one_stage[1] = 0.0
    fit.add(one_stage)
    assert fit.model() == PRIOR  # a stage that nobody measured has no seconds to stand beside the other's


@SETTINGS
@given(models(), st.integers(0, 2**32 - 1), st.integers(1, 8))
def test_more_work_never_takes_less_on_a_stage(model, seed, count) -> None:
    tokens, squares = microbatches(seed, count)
    for stage in model.stages:
        least = stage.seconds(tokens, squares)
        for more in ((tokens + 1, squares), (tokens, squares + 1)):
            assert (stage.seconds(*more) >= least).all()  # 2
        assert stage.seconds(np.append(tokens, 1.0), np.append(squares, 1.0)).sum() >= least.sum()


@SETTINGS
@given(models(), st.integers(1, 20_000), st.integers(0, 2_000_000), st.floats(0, 1))
def test_best_count_is_the_least_predicted_time(model, tokens, squares, share) -> None:
    """It is compared with every count to 4 above it and with powers of two beyond."""
    longest = float(int(share * tokens))
    found = model.best_count(tokens, squares, longest)
    possible = min(tokens, MOST_MICROBATCHES)
    others = np.array([m for m in (*range(1, min(found + 5, 400)), *(2**k for k in range(13))) if m <= possible])
    least = model.count_seconds(np.array([found]), tokens, squares, longest)
    assert (least <= model.count_seconds(others, tokens, squares, longest) * (1 + 1e-12)).all()  # 3


@SETTINGS
@given(models(), st.integers(1, 40), st.integers(1, 20_000), st.integers(0, 2_000_000))
def test_seconds_of_a_count_equal_the_ranks_that_runs_so_many(model, count, tokens, squares) -> None:
    each = np.full(count, 1 / count)
    (found,) = model.count_seconds(np.array([count]), tokens, squares)
    assert found == pytest.approx(model.rank_seconds(each * tokens, each * squares), rel=1e-12)


def test_a_longest_sample_asks_for_fewer_and_an_unmeasured_fixed_cost_stays_the_priors() -> None:
    """Beyond the count at which all others are as short, more micro-batches only cost their overhead."""
    model = CostModel(stages=(StageCost(overhead=10, token=1, square=0),) * 4)
    assert model.best_count(10_000, 0) == 55 and model.best_count(10_000, 0, longest=2_500) == 4
    # worth 256 tokens, where the laps have no fixed cost at all; tokens cost what was measured
    truth = CostModel(stages=(StageCost(overhead=0.0, token=2e-5, square=0.0),) * 2)
    fit = CostFit(prior=PRIOR)
    fit.add(step_of(truth, *microbatches(1, 2000)))
    for stage, before in zip(fit.model().stages, PRIOR.stages, strict=True):
        assert stage.token == pytest.approx(2e-5, rel=0.03)
        assert stage.overhead == pytest.approx(before.overhead / before.token * stage.token, rel=1e-9)


@SETTINGS
@given(st.integers(0, 2**32 - 1), st.integers(2, 12))
def test_the_priors_own_proportions_are_found_again(seed, count) -> None:
    """Equal to rounding, in seconds: the ridge draws towards the prior's shape, which is the truth here."""
    tokens, squares = microbatches(seed, count)
    seconds = [[1e-5 * x for x in dataclasses.astuple(stage)] for stage in PRIOR.stages]
    truth = CostModel(stages=tuple(StageCost(overhead=o, token=t, square=s) for o, t, s in seconds))
    fit, again = CostFit(prior=PRIOR), CostFit(prior=PRIOR)
    for each in (fit, again):
        each.add(step_of(truth, tokens, squares))
    assert fit.model() == again.model()  # 4: bit for bit
    for found, wanted in zip(fit.model().stages, truth.stages, strict=True):
        np.testing.assert_allclose(dataclasses.astuple(found), dataclasses.astuple(wanted), rtol=1e-6)


def test_older_steps_weigh_less_and_a_ghost_forgets_nothing() -> None:
    """The sums are Σ over the steps of forget^(steps measured since) · sums, one step at a time."""
    steps = [step_of(PRIOR, *microbatches(seed, 3)) for seed in range(4)]
    fit = CostFit(prior=PRIOR, forget=0.5)
    for step in (steps[0], np.zeros((2, NUM_SUMS)), *steps[1:], np.zeros((2, NUM_SUMS))):
        fit.add(step)
    np.testing.assert_allclose(fit.sums, sum(0.5 ** (3 - i) * step for i, step in enumerate(steps)), rtol=1e-12)
    assert CostFit(prior=PRIOR).forget < 1  # machines slow down and speed up: the first measurements must fade


def test_other_proportions_are_found_from_enough_microbatches() -> None:
    """From 2,000 with ±10 % of noise, within 1 % of a mean micro-batch; the ridge weighs one of them."""
    truth = CostModel(
        stages=(StageCost(overhead=8e-3, token=2e-5, square=4e-8), StageCost(overhead=9e-3, token=3e-5, square=1e-8))
    )
    fit = CostFit(prior=PRIOR)
    fit.add(step_of(truth, *microbatches(1, 2000), noise=0.1))
    tokens, squares = microbatches(2, 50)
    for found, wanted in zip(fit.model().stages, truth.stages, strict=True):
        expected = wanted.seconds(tokens, squares)
        np.testing.assert_allclose(found.seconds(tokens, squares), expected, rtol=0, atol=0.01 * expected.mean())


@SETTINGS
@given(st.integers(0, 2**32 - 1))
def test_nonnegative_least_squares_meets_its_conditions(seed) -> None:
    """Karush, Kuhn and Tucker: no slope where x > 0, and an upward one where x = 0."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(6, 3)) * [1.0, 1e3, 1e5]
    gram, moment = x.T @ x, x.T @ random.normal(size=6)
    found = _nonnegative(gram, moment)
    slope = (gram @ found - moment) / np.sqrt(np.diag(gram))
    assert (found >= 0).all() and (np.abs(slope[found > 0]) < 1e-6).all() and (slope[found == 0] > -1e-6).all()


@pytest.mark.parametrize("stages", [1, 3])
def test_a_mini_batch_takes_as_long_as_its_slowest_rank(stages) -> None:
    """Rank by rank and micro-batch by micro-batch, of a plan whose last rank is silent."""
    model, lengths = pipeline(stages, overhead=10, square=1e-2, last=1.5), np.array([900, 40, 30, 20, 70, 80])
    rules = PlanRules(data_size=3, cost=model, max_tokens=100)
    signal = np.array([True, True, False, False, False, False])
    for drops in (True, False):
        one, each = one_step(lengths, rules, signal=signal, drops=drops), []
        for rank in range(3):
            tokens, squares = (np.array([float((lengths[m.samples] ** power).sum()) for m in one.microbatches(rank)])
                               for power in (1, 2))
            each.append(model.rank_seconds(tokens, squares))
        assert min(each) < max(each) and (min(each) == 0.0) == drops
        assert plan_seconds(model, one, SampleTokens.alone(lengths)) == pytest.approx(max(each), rel=1e-12)
    assert plan_seconds(model, one_step(lengths, rules, signal=np.zeros(6)), SampleTokens.alone(lengths)) == 0.0


def clock_seconds(model: CostModel, tokens: np.ndarray, squares: np.ndarray) -> float:
    """Return the schedule's makespan: a stage's time is spread evenly over its chunks, a third of it forward."""
    each = np.array([s.seconds(tokens, squares) for s in model.stages]) / model.virtual
    every = np.concatenate([each] * model.virtual)
    return simulate(every / 3, every * 2 / 3, pipeline=len(model.stages)).makespan


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("heavier", [1.0, 1.4])
def test_rank_seconds_equals_the_clock_for_equal_microbatches(virtual, heavier) -> None:
    """All stages are equal, or the last one carries more (the LM head)."""
    for stages in (1, 2, 4, 8) if virtual == 1 else (2, 4, 8):
        for count in (1, 2, 5) if virtual == 1 else (stages, 3 * stages):
            model = dataclasses.replace(pipeline(stages, overhead=10, square=1e-3, last=heavier), virtual=virtual)
            given = np.full(count, 1000.0), np.full(count, 2e5)
            assert model.rank_seconds(*given) == pytest.approx(clock_seconds(model, *given), rel=1e-12)


@pytest.mark.parametrize(("spread", "median", "worst"), [(0.05, 0.03, 0.10), (0.2, 0.08, 0.20), (0.5, 0.12, 0.30)])
def test_rank_seconds_is_near_the_clock_for_ragged_microbatches(spread, median, worst) -> None:
    """1F1B with equal stages and the costliest micro-batch in the middle, as the planner orders them."""
    random, errors = np.random.default_rng(0), []
    for _ in range(40):
        stages, count = int(random.choice([2, 4, 8])), int(random.integers(1, 33))
        rising = np.sort(1000.0 * np.exp(random.normal(0, spread, count)))
        tokens = np.concatenate([rising[::2], rising[1::2][::-1]])
        model = pipeline(stages, overhead=10, square=1e-3)
        errors.append(model.rank_seconds(tokens, tokens * 200) / clock_seconds(model, tokens, tokens * 200) - 1)
    assert np.median(np.abs(errors)) < median and np.abs(errors).max() < worst, errors
