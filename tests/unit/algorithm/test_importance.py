"""algorithm/importance.py: every mode against a loop over tokens, the effect of masks, and refusals.

Masks change the signal and the denominators; settings that cannot work are refused.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.importance import correction_metrics, importance_weights
from megatron_rl.algorithm.signal import has_signal
from megatron_rl.config import CORRECTIONS, CorrectionConfig, load_config
from megatron_rl.errors import ConfigError
from megatron_rl.trainer import corrections
from megatron_rl.trainer.corrections import CorrectedSignal, apply_corrections
from megatron_rl.types import Advantages, LossInputs
from tests.reference import make_samples
from tests.unit.algorithm.naive_importance import naive
from tests.unit.backend.packed import run_pack

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True, database=None)

# The loop's exp and its sums are Python's, in double as numpy's: a few roundings apart.
CLOSE = {"rtol": 1e-13, "atol": 0.0}


def run(config: CorrectionConfig, advantages: list[float], gaps: list[list[float]], masks: list[list[bool]]):
    """Return the correction of samples by their gaps: the engine said −2 at every token, the trainer says −2 + gap."""
    flat = np.array([d for sample in gaps for d in sample])
    mask = np.array([m for sample in masks for m in sample], dtype=bool)
    old = np.where(mask, flat - 2.0, np.nan)  # a token without loss may have any number
    lengths = np.array([len(d) for d in gaps], dtype=np.int64)
    passed, engine = np.ones(len(lengths), dtype=bool), np.full(len(flat), -2.0)
    return importance_weights(old, engine, mask, lengths, np.array(advantages), passed, config)


# sums and −2 + d are exact in double
numbers = st.sampled_from([-3.0, -1.0, -0.75, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 3.0])
samples = st.lists(
    st.tuples(st.sampled_from([-1.5, 0.0, 1.0]), st.lists(st.tuples(numbers, st.booleans()), min_size=1, max_size=5)),
    max_size=6,
)


@SETTINGS
@given(drawn=samples, mode=st.sampled_from(CORRECTIONS), cap=st.sampled_from([1.0, 2.0, 5.0]),
       floor=st.sampled_from([None, 0.4, 1.0]), delta=st.sampled_from([None, 0.0, 0.5, 1.0]))
def test_weights_equal_a_loop_over_tokens(drawn, mode, cap, floor, delta) -> None:
    """Samples are ragged, some tokens have no loss, and A has both signs."""
    config = CorrectionConfig(mode=mode, cap=cap, floor=None if mode == "none" else floor, off_policy_delta=delta)
    advantages = [a for a, _ in drawn]
    gaps, masks = [[d for d, _ in tokens] for _, tokens in drawn], [[m for _, m in tokens] for _, tokens in drawn]
    found, wanted = run(config, advantages, gaps, masks), naive(config, advantages, gaps, masks)
    np.testing.assert_allclose(found.weights, wanted, **CLOSE)
    assert np.array_equal(found.weights == 0, np.array(wanted) == 0)  # a mask zeroes, exactly
    assert (found.weights <= cap).all() and not found.capped[found.weights == 0].any()
    bounds = np.cumsum([0, *(len(d) for d in gaps)])
    largest = Advantages(of_sample=np.array(advantages)).largest(np.array([len(m) for m in masks]), found.weights)
    signal = has_signal(largest, np.array([sum(m) for m in masks], dtype=np.int64))
    for i, (a, mask) in enumerate(zip(advantages, masks, strict=True)):
        own = wanted[bounds[i] : bounds[i + 1]]
        assert signal[i] == any(m and w * a != 0 for m, w in zip(mask, own, strict=True))


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_equal_logprobs_give_weights_of_exactly_one(mode: str) -> None:
    config = CorrectionConfig(mode=mode, cap=1.0, off_policy_delta=0.0)
    found = run(config, [-1.0, 1.0], [[0.0] * 3, [0.0]], [[True] * 3, [True]])
    assert found.weights.tolist() == [1.0] * 4 and not found.capped.any()


def test_off_policy_masking_takes_negative_advantages_only() -> None:
    """mean(log μ − log π_old) is 1; a gap the other way never counts, and 0 is not below 0."""
    advantages, gaps = [-1.0, 1.0, 0.0, -1.0], [[-0.5, -1.5], [-1.0], [-1.0], [2.0]]
    masks = [[True] * len(d) for d in gaps]
    for delta, wanted in ((0.9, [0.0, 0.0, 1.0, 1.0, 1.0]), (1.0, [1.0] * 5), (0.0, [0.0, 0.0, 1.0, 1.0, 1.0])):
        assert run(CorrectionConfig(off_policy_delta=delta), advantages, gaps, masks).weights.tolist() == wanted
    both = CorrectionConfig(mode="token_truncate", off_policy_delta=0.9)
    wanted = [0.0, 0.0, math.exp(-1), math.exp(-1), 2.0]
    np.testing.assert_allclose(run(both, advantages, gaps, masks).weights, wanted, **CLOSE)


def test_tokens_without_loss_are_in_no_sum_and_no_mean() -> None:
    gaps, masks = [[0.5, 100.0, 0.25, -100.0]], [[True, False, True, False]]
    for mode, level in (("sequence_truncate", 0.75), ("geometric_truncate", 0.375)):
        weights = run(CorrectionConfig(mode=mode, cap=5.0), [1.0], gaps, masks).weights
        np.testing.assert_allclose(weights, [math.exp(level), 0.0, math.exp(level), 0.0], **CLOSE)


def test_samples_not_passed_have_weight_zero_an_impossible_token_is_capped_and_nan_is_named() -> None:
    """Their π_old is unknown (0 in the flat array), so nothing may be trained on it."""
    flat = np.zeros(4), np.full(4, -1.0), np.ones(4, dtype=bool)
    samples = np.array([2, 2]), np.array([1.0, 0.0]), np.array([True, False])
    found = importance_weights(*flat, *samples, CorrectionConfig(mode="token_truncate", cap=5.0))
    np.testing.assert_allclose(found.weights, [math.e, math.e, 0.0, 0.0], **CLOSE)
    # the engine says −inf and the trainer does not: capped or masked. Where both do, the gap is NaN.
    for mode, wanted in (("token_truncate", 2.0), ("sequence_mask", 0.0)):
        assert run(CorrectionConfig(mode=mode), [1.0], [[math.inf]], [[True]]).weights.tolist() == [wanted]
    with pytest.raises(ValueError, match="sample index 1 is NaN"):
        run(CorrectionConfig(mode="token_mask"), [1.0, 1.0], [[0.0], [math.nan]], [[True], [True]])


def test_the_default_corrects_nothing_and_metrics_are_of_the_tokens_with_an_advantage() -> None:
    assert not CorrectionConfig().is_on
    assert CorrectionConfig(mode="token_mask").is_on and CorrectionConfig(off_policy_delta=0.0).is_on
    # of 8 tokens, 5 loss tokens have A ≠ 0: e^1 > 2, 1, 1 and, of the sample wholly masked, twice e^1
    gaps, masks = [[1.0, 0.0, 9.0, 0.0], [1.0, 1.0], [1.0, 0.0]], [[True, True, False, True], [True] * 2, [True] * 2]
    flat = np.array(sum(masks, [])), np.array([4, 2, 2])
    for mode, mean, masked, capped in (("token_mask", 0.4, 0.6, 0.0), ("token_truncate", 8 / 5, 0.0, 0.6)):
        correction = run(CorrectionConfig(mode=mode), [1.0, -1.0, 0.0], gaps, masks)
        wanted = dict(weight_mean=mean, masked_share=masked, capped_share=capped)
        found = correction_metrics(correction, *flat, np.array([True, True, False]))
        assert found == {f"correction/{name}": share for name, share in wanted.items()}
        assert correction_metrics(correction, *flat, np.zeros(3, dtype=bool)) == {}


def test_packed_advantages_equal_weight_times_advantage_per_token() -> None:
    """Each loss token takes the weight of its own place in the flat array; weights of 1 change no bit."""
    drawn, folded = make_samples(5), np.linspace(-1.0, 1.0, 5)
    starts = np.cumsum([0] + [len(s.loss_mask) for s in drawn])
    importance = np.random.default_rng(0).uniform(0.0, 2.0, starts[-1])
    plain, ones, found = (
        run_pack(drawn, [3, 1, 4], inputs=LossInputs(advantages=folded, weights=np.ones(5), importance_weights=x))
        for x in (None, np.ones(starts[-1]), importance)
    )
    assert torch.equal(ones.advantages, plain.advantages) and torch.equal(found.weights, plain.weights)
    wanted = [folded[i] * importance[starts[i] + t] for i in (3, 1, 4) for t in np.flatnonzero(drawn[i].loss_mask)]
    assert found.advantages.tolist() == pytest.approx(wanted, rel=1e-6)  # float32


@pytest.mark.parametrize(("overrides", "words"), [
    (["correction.mode=token"], ["correction.mode='token'", "token_mask"]),
    (["correction.cap=0.5"], ["correction.cap=0.5", "at least 1"]),
    (["correction.mode=token_mask", "correction.floor=0"], ["correction.floor=0", "above 0"]),
    (["correction.mode=token_mask", "correction.floor=1.5"], ["correction.floor=1.5", "at most 1", "null"]),
    (["correction.floor=0.5"], ["correction.floor=0.5", "correction.mode", "none", "null"]),
    (["correction.old_logprobs=rollout", "correction.mode=geometric_mask"],
     ["correction.mode=geometric_mask", "correction.old_logprobs=recompute", "correction.mode=none"]),
    (["correction.old_logprobs=rollout", "correction.off_policy_delta=0.1"],
     ["correction.off_policy_delta=0.1", "old_logprobs=recompute", "correction.off_policy_delta=null"]),
])
def test_settings_that_cannot_work_are_refused_with_the_ways_out(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    assert all(word in str(error.value) for word in words), str(error.value)


def of_rollout(monkeypatch: pytest.MonkeyPatch, gaps: list[list[float]],
               rank_0s: Callable[[np.ndarray], np.ndarray]) -> CorrectedSignal:
    """Correct samples of advantages 1, of which the last has no signal.

    rank_0s: this rank's weights → the weights that rank 0 has.
    """
    lengths, flat = np.array([len(x) for x in gaps]), np.concatenate(gaps)
    facts = SimpleNamespace(response_tokens=lengths, loss_tokens=lengths, sample_ids=())
    backend = SimpleNamespace(gather_rollout_logprobs=lambda batch: np.zeros(len(flat)),
                              gather_loss_mask=lambda batch: np.ones(len(flat), dtype=bool))
    monkeypatch.setattr(corrections.collectives, "broadcast_from_rank0", rank_0s)
    return apply_corrections(CorrectionConfig(mode="sequence_mask", cap=2.0), backend, SimpleNamespace(facts=facts),
                             advantages=Advantages(of_sample=np.ones(len(gaps))),
                             signal=np.arange(len(gaps)) < len(gaps) - 1, passed=np.ones(len(gaps), dtype=bool),
                             old_logprobs=flat)


def test_every_rank_takes_rank_0s_weights_and_decides_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three samples this rank would mask the second; rank 0, whose exponential rounds otherwise, masks the first."""
    wanted = np.array([0.0, 0.0, 1.5, 1.0])
    found = of_rollout(monkeypatch, [[0.0, 0.0], [3.0], [0.0]], lambda own: wanted)
    assert found.weights.tolist() == wanted.tolist() and found.signal.tolist() == [False, True, False]


def test_the_shares_of_a_rollout_count_the_samples_that_its_weights_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 tokens with signal 3 are masked (e^{1.5 + 1.5} > 2); the sample without signal is in none of the shares."""
    found = of_rollout(monkeypatch, [[1.5, 1.5], [0.0], [9.0], [9.0] * 5], lambda own: own)
    assert found.signal.tolist() == [False, True, False, False]
    assert found.metrics == {"correction/weight_mean": 0.25, "correction/masked_share": 0.75,
                             "correction/capped_share": 0.0, "correction/masked_samples": 2.0}


@pytest.mark.parametrize("mode", ["sequence_truncate", "geometric_truncate"])
@pytest.mark.parametrize("num_samples", [1, 2, 6])
def test_the_mean_weight_of_sequences_equals_the_loop_over_tokens(mode: str, num_samples: int) -> None:
    """Each token counts its sequence's weight once, in a batch of any size."""
    gaps = [[0.1 * (k + 1), -0.2, 0.3][: 1 + k % 3] for k in range(num_samples)]
    masks = [[True] * len(own) for own in gaps]
    correction = run(CorrectionConfig(mode=mode, cap=5.0), [1.0] * num_samples, gaps, masks)
    lengths = np.array([len(own) for own in gaps])
    found = correction_metrics(correction, np.array(sum(masks, [])), lengths, np.ones(num_samples, dtype=bool))
    weights = [math.exp(sum(own) / (len(own) if mode == "geometric_truncate" else 1)) for own in gaps for _ in own]
    assert found["correction/weight_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-12)
