"""algorithm/gae.py: every invariant under Hypothesis, the recursion, and whitening.

The recursion is compared with a sum per token written from the paper, whitening with numpy.
"""

import dataclasses
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm import gae
from megatron_rl.algorithm.gae import generalised_advantages, token_rewards, whiten_tokens

# Derandomized: the same cases on every machine, so that a failure is never a matter of luck.
SETTINGS = settings(max_examples=80, deadline=None, derandomize=True, database=None)
# Sums of at most 12 numbers below 10, in double, in another order.
ROUNDING = {"rtol": 1e-12, "atol": 1e-12}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    rewards: np.ndarray
    values: np.ndarray
    mask: np.ndarray
    response_tokens: np.ndarray
    gamma: float
    lam: float

    def run(self, **changed) -> tuple[np.ndarray, np.ndarray]:
        case = dataclasses.replace(self, **changed)
        return generalised_advantages(case.rewards, case.values, case.mask, case.response_tokens, gamma=case.gamma,
                                      lam=case.lam)

    @property
    def slices(self) -> list[slice]:
        stops = np.cumsum(self.response_tokens)
        return [slice(stop - count, stop) for stop, count in zip(stops, self.response_tokens, strict=True)]


@st.composite
def cases(draw) -> Case:
    """Draw sizes by Hypothesis, numbers by a seed: holes anywhere, samples without a loss token, NaN outside masks."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = random.integers(0, 12, draw(st.integers(0, 7)))
    total = int(lengths.sum())
    mask = random.random(total) < draw(st.sampled_from([1.0, 0.7, 0.2]))
    mask &= np.repeat(random.random(len(lengths)) < 0.8, lengths)
    rewards, values = random.normal(size=(2, total)) * 3
    rewards[~mask], values[~mask] = random.choice([np.nan, np.inf, 7.0], (2, int((~mask).sum())))
    edges = st.sampled_from([0.0, 0.5, 0.95, 1.0])
    return Case(rewards=rewards, values=values, mask=mask, response_tokens=lengths, gamma=draw(edges), lam=draw(edges))


def naive_advantages(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return A_t = Σ_l (γλ)^l δ_{t+l} (eq. 16) and returns, each sum written out; time counts loss tokens."""
    advantages, returns = np.zeros(len(case.mask)), np.zeros(len(case.mask))
    for part in case.slices:
        steps = [t for t in range(part.start, part.stop) if case.mask[t]]
        value = [*(case.values[t] for t in steps), 0.0]
        errors = [case.rewards[t] + case.gamma * value[k + 1] - value[k] for k, t in enumerate(steps)]
        for k, t in enumerate(steps):
            advantages[t] = sum((case.gamma * case.lam) ** (j - k) * errors[j] for j in range(k, len(steps)))
            returns[t] = advantages[t] + value[k]
    return advantages, returns


def assert_invariants(case: Case) -> None:
    """Assert every numbered invariant of algorithm/gae.py on one batch, but for 7 and 8, which are tested below."""
    advantages, returns = both = np.stack(case.run())
    mask = case.mask
    assert (both[:, ~mask] == 0).all()  # 1

    def chosen(part, counts) -> np.ndarray:
        own = {name: getattr(case, name)[part] for name in ("rewards", "values", "mask")}
        return np.stack(case.run(**own, response_tokens=np.array(counts, dtype=np.int64)))

    for part in case.slices:  # 2
        assert np.array_equal(chosen(part, [part.stop - part.start]), both[:, part])
    assert np.array_equal(chosen(mask, [mask[part].sum() for part in case.slices]), both[:, mask])  # 3
    np.testing.assert_allclose((returns - advantages)[mask], case.values[mask], **ROUNDING)  # 4
    _, whole = case.run(gamma=1.0, lam=1.0)
    for part in case.slices:  # 5
        rewards = case.rewards[part][mask[part]]
        np.testing.assert_allclose(whole[part][mask[part]], np.cumsum(rewards[::-1])[::-1], **ROUNDING)
    one_step, _ = case.run(lam=0.0)
    for part in case.slices:  # 6
        value = np.append(case.values[part][mask[part]], 0.0)
        wanted = case.rewards[part][mask[part]] + case.gamma * value[1:] - value[:-1]
        np.testing.assert_allclose(one_step[part][mask[part]], wanted, **ROUNDING)


@SETTINGS
@given(cases())
def test_advantages_equal_the_sum_per_token(case: Case) -> None:
    """And every numbered invariant holds."""
    assert_invariants(case)
    for found, wanted in zip(case.run(), naive_advantages(case), strict=True):
        np.testing.assert_allclose(found, wanted, **ROUNDING)


@pytest.mark.parametrize(("which", "name"), [(0, "reward"), (1, "value")])
def test_non_finite_number_at_a_loss_token_names_the_sample(which: int, name: str) -> None:
    arrays = [np.zeros(5), np.zeros(5)]
    arrays[which][3] = np.nan
    mask = np.array([True, True, False, True, True])  # 7
    for sample_ids, called in (((), "index 1"), (("7@0#0", "7@0#1"), "7@0#1")):
        with pytest.raises(ValueError, match=f"the {name} of loss token 0 of sample {called} is nan"):
            generalised_advantages(*arrays, mask, np.array([3, 2]), gamma=1.0, lam=1.0, sample_ids=sample_ids)


def test_lengths_that_do_not_fit_are_errors_and_one_token_or_equal_ones_are_not_whitened() -> None:
    with pytest.raises(ValueError, match=r"values has shape \(2,\), and response_tokens sum to 3"):
        generalised_advantages(np.zeros(3), np.zeros(2), np.ones(3, dtype=bool), np.array([3]), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="loss_mask has dtype int64"):
        token_rewards(np.ones(1), np.ones(3, dtype=np.int64), np.array([3]))
    # there is no spread to divide by: one token stays as it is, and so do equal tokens without an ε
    assert whiten_tokens(np.array([5.0, 3.0]), np.array([True, False]), "center_and_scale", 0.0).tolist() == [5.0, 0.0]
    assert whiten_tokens(np.array([3.0, 3.0]), np.array([True, True]), "scale", 0.0).tolist() == [3.0, 3.0]
    with pytest.raises(ValueError, match="advantage.whiten='centre'"):
        whiten_tokens(np.zeros(1), np.ones(1, dtype=bool), "centre", 0.0)


@SETTINGS
@given(cases(), st.booleans())
def test_token_rewards_equal_a_loop(case: Case, penalised: bool) -> None:
    """The total is on the last loss token; a sample that is taken out (NaN) has none, and its rewards are 0."""
    random = np.random.default_rng(0)
    trained = np.array([case.mask[part].any() for part in case.slices], dtype=bool)
    totals = np.where(trained, random.normal(size=len(trained)), np.nan)
    found = token_rewards(totals, case.mask, case.response_tokens, case.values if penalised else None)
    wanted = np.zeros(len(case.mask))
    for i, part in enumerate(case.slices):
        steps = [t for t in range(part.start, part.stop) if case.mask[t]]
        for t in steps:
            wanted[t] = (-case.values[t] if penalised else 0.0) + (totals[i] if t == steps[-1] else 0.0)
    assert np.array_equal(found, wanted)


@SETTINGS
@given(cases(), st.sampled_from([0.0, 1e-6]))
def test_whitening_is_over_loss_tokens(case: Case, epsilon: float) -> None:
    """Whitening in each mode equals numpy's own mean and deviation of the tokens with loss."""
    advantages, _ = case.run()
    advantages[np.flatnonzero(case.mask)[:1]] = 0.0
    noisy = np.where(case.mask, advantages, case.rewards)
    found = {mode: whiten_tokens(noisy, case.mask, mode, epsilon) for mode in ("none", "scale", "center_and_scale")}
    assert all(np.array_equal(x[~case.mask], np.zeros((~case.mask).sum())) for x in found.values())
    assert np.array_equal(found["none"], advantages)
    assert np.array_equal(found["scale"] == 0, advantages == 0)  # 8
    inside = advantages[case.mask]
    if len(inside) > 1:
        spread = np.std(inside, ddof=1) + epsilon
        np.testing.assert_allclose(found["scale"][case.mask], inside / spread, **ROUNDING)
        centred = inside - np.mean(inside)
        np.testing.assert_allclose(found["center_and_scale"][case.mask], centred / spread, **ROUNDING)


def test_a_million_tokens_are_no_loop_over_tokens() -> None:
    """Some lines run for each place in the longest of 500 samples, where a loop runs one for each token at least."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 4001, 500)
    total = int(lengths.sum())
    rewards, values, mask = random.normal(size=total), random.normal(size=total), random.random(total) < 0.9
    case = Case(rewards=rewards, values=values, mask=mask, response_tokens=lengths, gamma=0.99, lam=0.95)
    lines = []

    def trace(frame, event: str, _: object):
        lines.append(event)
        return trace if frame.f_code.co_filename == gae.__file__ else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        advantages, _ = case.run()
    finally:
        sys.settrace(before)
    assert total > 900_000 and 1000 < len(lines) < total / 20, len(lines)
    first = slice(0, int(lengths[0]))
    alone, _ = case.run(rewards=rewards[first], values=values[first], mask=mask[first], response_tokens=lengths[:1])
    assert np.array_equal(alone, advantages[first])
