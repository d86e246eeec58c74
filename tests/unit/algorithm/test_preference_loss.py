"""algorithm/preference_loss.py against each paper's equation, pair by pair, and its numbered invariants."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.linear_loss import linearised
from megatron_rl.algorithm.preference_loss import PairScores, compare, pair_metrics
from megatron_rl.config import PAIR_LOSSES, PreferenceConfig
from megatron_rl.errors import ConfigError, NonFiniteAdvantage
from tests.naive_pairs import naive_loss

# Both sides in double; what differs is log σ from exp and log: 1e-14 was seen.
DOUBLE = {"rtol": 1e-10, "atol": 1e-12}
SETTINGS = {"dpo": dict(beta=0.3, margin=0.2, label_smoothing=0.1),
            "hinge": dict(beta=0.3),
            "ipo": dict(beta=0.3),
            "simpo": dict(beta=2.0, margin=0.5, label_smoothing=0.1),
            "bradley_terry": dict(margin=0.1)}
CONFIGS = [PreferenceConfig(loss=name, **given) for name, given in SETTINGS.items()]
PLAIN = [PreferenceConfig(loss=name) for name in PAIR_LOSSES]


def drawn(seed: int, pairs: int = 6) -> PairScores:
    random = np.random.default_rng(seed)
    scale = random.choice([0.1, 3.0, 30.0])
    return PairScores(sums=-20 + scale * random.normal(size=2 * pairs),
                      reference=-20 + scale * random.normal(size=2 * pairs),
                      loss_tokens=random.integers(1, 30, 2 * pairs))


def test_every_loss_is_tried_here_and_worked_examples_hold() -> None:
    assert tuple(SETTINGS) == PAIR_LOSSES
    scores = PairScores(sums=np.array([-4.0, -9.0]), reference=np.array([-5.0, -8.0]), loss_tokens=np.array([3, 4]))
    found = compare(scores, PreferenceConfig(loss="dpo"))
    assert found.rewards.tolist() == pytest.approx([0.1, -0.1]) and found.losses[0] == pytest.approx(0.59814, abs=1e-5)
    metrics = pair_metrics(found, scores, suffix="_before")
    assert metrics["preference/accuracy_before"] == 1 and metrics["preference/margin_before"] == pytest.approx(0.2)
    linear = linearised(lambda s: -torch.nn.functional.logsigmoid(s[:1] - s[1:]), np.array([-1.0, -3.0]))
    assert linear.terms[0] == pytest.approx(0.126928) and linear.coefficients == pytest.approx([0.119203, -0.119203])


@pytest.mark.parametrize("config", [*CONFIGS, *PLAIN], ids=lambda c: c.loss)
@pytest.mark.parametrize("seed", range(3))
def test_losses_and_coefficients_equal_the_equations(config: PreferenceConfig, seed: int) -> None:
    """Loss by loss, and −∂(Σ losses)/∂log π of every response by autograd through the equation."""
    scores = drawn(seed)
    found = compare(scores, config)
    sums = torch.from_numpy(scores.sums).requires_grad_()
    losses = [
        naive_loss(config, sums[i], sums[i + 1], *scores.reference[i : i + 2], *scores.loss_tokens[i : i + 2].tolist())
        for i in range(0, len(sums), 2)
    ]
    sum(losses).backward()
    np.testing.assert_allclose(found.losses, [float(x) for x in losses], **DOUBLE)
    np.testing.assert_allclose(found.coefficients, -sums.grad.numpy(), **DOUBLE)


def assert_invariants(config: PreferenceConfig, scores: PairScores) -> None:
    found = compare(scores, config)
    chosen, rejected = found.coefficients[0::2], found.coefficients[1::2]

    def chosen_from(rows) -> PairScores:
        return PairScores(sums=scores.sums[rows], reference=scores.reference[rows],
                          loss_tokens=scores.loss_tokens[rows])

    for i in range(0, len(scores.sums), 2):  # 1
        pair = slice(i, i + 2)
        assert np.array_equal(compare(chosen_from(pair), config).coefficients, found.coefficients[pair])
    if config.label_smoothing == 0 and config.loss != "ipo":  # 2
        assert (chosen >= 0).all() and (rejected <= 0).all()
    if config.loss == "hinge":  # 3
        assert np.array_equal(chosen == 0, found.margins >= 1) and np.array_equal(rejected == 0, found.margins >= 1)
    swapped = chosen_from(np.arange(len(scores.sums)).reshape(-1, 2)[:, ::-1].ravel())
    assert np.array_equal(compare(swapped, config).margins, -found.margins)  # 4


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6), number=st.integers(0, len(CONFIGS) + len(PLAIN) - 1))
def test_invariants(seed: int, number: int) -> None:
    assert_invariants([*CONFIGS, *PLAIN][number], drawn(seed))


def test_faults_are_named() -> None:
    sums = np.array([-1.0, -np.inf])
    bad = PairScores(sums=sums, reference=np.zeros(2), loss_tokens=np.ones(2), sample_ids=("a", "b"))
    with pytest.raises(NonFiniteAdvantage, match="of sample b is -inf"):
        compare(bad, PreferenceConfig(loss="ipo"))
    with pytest.raises(ValueError, match="3 responses are no pairs"):
        compare(PairScores(sums=np.zeros(3), reference=None, loss_tokens=np.ones(3)), PreferenceConfig(loss="simpo"))
    with pytest.raises(ConfigError, match="preference.margin=0.5 is read by .* and the loss is ipo"):
        PreferenceConfig(loss="ipo", margin=0.5)
    with pytest.raises(ConfigError, match="preference.beta=0.2 is read by .* and the loss is none"):
        PreferenceConfig(beta=0.2)
