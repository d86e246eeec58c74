"""algorithm/noise.py: every invariant under Hypothesis, the distribution, and runs with noise on several layouts."""

import math
import pathlib
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.noise import standard_normal, with_noise
from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError
from tests.runs.command import arguments, command_line, rows_of, weights_of

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True, database=None)
HIGHEST = 8.3  # of 52 random bits: the inverse at 2^-53 is −8.21


def assert_invariants(advantages: np.ndarray, signal: np.ndarray, ids: list[str], std: float, seed: int) -> None:
    """Assert every numbered invariant of algorithm/noise.py on one batch."""
    given_advantages = advantages.copy()
    found = with_noise(advantages, signal, ids, std=std, seed=seed)

    assert np.array_equal(found[~signal], advantages[~signal])  # 1

    order = np.argsort(ids)[::2]  # 2: half of the batch, in another order
    part = with_noise(advantages[order], signal[order], [ids[i] for i in order], std=std, seed=seed)
    assert np.array_equal(part, found[order])
    if std and signal.any():
        assert not np.array_equal(found[signal], with_noise(advantages, signal, ids, std=std, seed=seed + 1)[signal])

    drawn = np.array([standard_normal(seed, name) for name in ids])  # 3
    assert np.array_equal(found, np.where(signal, advantages + std * drawn, advantages))
    assert np.array_equal(with_noise(advantages, signal, ids, std=0.0, seed=seed), advantages)

    assert np.array_equal(advantages, given_advantages) and found.dtype == np.float64  # 4
    assert np.isfinite(found).all() and (np.abs(found - advantages) <= HIGHEST * std + 1e-12).all()


@SETTINGS
@given(seed=st.integers(-(2**31), 2**63), count=st.integers(0, 12), std=st.sampled_from([0.0, 1e-3, 0.5]),
       share=st.sampled_from([0.0, 0.6, 1.0]))
def test_noise_has_its_invariants(seed: int, count: int, std: float, share: float) -> None:
    random = np.random.default_rng(abs(seed))
    ids = [f"{i}@0#{random.integers(8)}" for i in random.permutation(count)]
    signal = random.random(count) < share
    assert_invariants(np.where(signal, random.normal(size=count), 0.0), signal, ids, std, seed)


def test_noise_is_normal_and_pinned_and_refused_without_steps() -> None:
    """Mean and deviation are within five standard errors, and each quantile within Kolmogorov's bound for 1e-6."""
    count = 4_000
    numbers = np.sort([standard_normal(7, f"{i}@0#0") for i in range(count)])
    assert abs(numbers.mean()) < 5 / math.sqrt(count) and abs(numbers.std() - 1) < 5 / math.sqrt(2 * count)
    ranks = np.array([NormalDist().cdf(x) for x in numbers])
    assert np.abs(ranks - (np.arange(count) + 0.5) / count).max() < math.sqrt(math.log(2 / 1e-6) / 2 / count)
    # The draws of a run must not change with a version. Pinned are a tail (a logarithm, whose last bit is the
    # library's) and the middle.
    for name, value in {"17@0#19": 2.7173410046028237, "17@0.1#3": -0.7336562692372715}.items():
        assert standard_normal(0, name) == pytest.approx(value, rel=1e-14)
    with pytest.raises(ConfigError, match=r"advantage\.noise_std=0\.1 .* advantage\.noise_steps=0"):
        load_config(None, ["advantage.noise_std=0.1"])
    with pytest.raises(ConfigError, match=r"advantage\.noise_std=-1"):
        load_config(None, ["advantage.noise_std=-1", "advantage.noise_steps=3"])
    assert load_config(None, ["advantage.noise_steps=3"]).advantage.noise_std == 0.0


WHOLE = ("loss.reduction=sequence_mean", "train.samples_per_mini_batch=null", "sft.steps=2", "sft.samples_per_step=8")
NOISE = (*WHOLE, "advantage.noise_std=0.2", "advantage.noise_steps=1")


@pytest.fixture(scope="module")
def noisy(pool, arithmetic, tmp_path_factory) -> pathlib.Path:
    """Make a run with noise for one step, counted after the warm-up."""
    folder = tmp_path_factory.mktemp("noisy")
    ((code, said),) = pool.run(1, command_line, arguments(arithmetic, folder, *NOISE), timeout_s=60)
    assert code == 0, said
    return folder


def test_first_losses_are_zero_without_noise_and_only_the_first_with_it(pool, arithmetic, noisy, tmp_path):
    """One step a rollout on whole groups has Σ A = 0, so the loss is 0 to rounding, and the gradient is not.

    Noise moves the first loss and the second not; the first step drops as many samples as without it.
    """
    ((code, said),) = pool.run(1, command_line, arguments(arithmetic, tmp_path, *WHOLE), timeout_s=60)
    assert code == 0, said
    plain, noisy = ([row for row in rows_of(folder) if row["phase"] == "rl"] for folder in (tmp_path, noisy))
    assert all(abs(row["train/loss"]) < 1e-6 < 1e-2 < row["train/grad_norm"] for row in plain)
    assert abs(noisy[0]["train/loss"]) > 1e-3 and abs(noisy[1]["train/loss"]) < 1e-6
    assert noisy[0]["skip/samples_dropped"] == plain[0]["skip/samples_dropped"] > 0
    assert noisy[0]["reward/mean"] == plain[0]["reward/mean"]


@pytest.mark.parametrize("pipeline", [1, pytest.param(2, marks=pytest.mark.long)])
def test_noise_is_the_same_on_every_layout(pool, arithmetic, noisy, tmp_path, pipeline):
    given = arguments(arithmetic, tmp_path, *NOISE, f"parallel.pipeline={pipeline}")
    results = pool.run(2, command_line, given, timeout_s=120)
    assert [code for code, _ in results] == [0, 0], results
    found, wanted = (torch.cat([x.flatten() for x in weights_of(folder).values()]) for folder in (tmp_path, noisy))
    # As test_another_layout_trains_the_same_run: AdamW amplifies the summation order where gradients are near zero.
    assert (found - wanted).norm() / wanted.norm() < 1e-5
