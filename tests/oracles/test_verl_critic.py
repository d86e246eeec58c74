"""verl's critic against ours.

Compared are generalised advantages, their whitening, the clipped value loss, the KL in the reward and its controller.
"""

from __future__ import annotations

import ast
import importlib.util
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.gae import generalised_advantages, token_rewards, whiten_tokens
from megatron_rl.algorithm.kl import kl_per_token
from megatron_rl.algorithm.kl_controller import KLCoefficient
from megatron_rl.algorithm.value_loss import value_loss
from tests.oracles.batch import DOUBLE, MISSING, REDUCTIONS, SEEDS, WHITENED, Batch, random_batch, token_weights

algorithms = pytest.importorskip("verl.trainer.ppo.core_algos", reason=MISSING)
protocol = pytest.importorskip("verl.protocol", reason=MISSING)

DISCOUNTS = [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.5)]


def inside(batch: Batch) -> torch.Tensor:
    """Return where a response token stands, bool [S, T]."""
    return torch.arange(batch.mask.shape[1]) < torch.from_numpy(batch.response_tokens)[:, None]


def flat(batch: Batch, values: torch.Tensor) -> np.ndarray:
    return values[inside(batch)].numpy()


def drawn(batch: Batch, seed: int, *, spread: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Draw rewards, values, old values and returns, each [S, T], of any number where no response token stands."""
    random = torch.Generator().manual_seed(seed + 500)
    return tuple(spread * torch.randn(4, *batch.mask.shape, generator=random, dtype=torch.float64))


def our_advantages(
    batch: Batch, rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    arrays = [flat(batch, x) for x in (rewards, values, batch.mask)]
    return generalised_advantages(*arrays, batch.response_tokens, gamma=gamma, lam=lam)


@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_gae_before_whitening(seed: int, gamma: float, lam: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """GAE before whitening equals verl's: advantages and returns at loss tokens, with holes in the masks.

    By definition, at other tokens verl leaves what stands after them, which its losses mask; ours are 0.
    """
    monkeypatch.setattr(algorithms.verl_F, "masked_whiten", lambda advantages, mask: advantages)
    batch = random_batch(seed, num_empty=1)
    rewards, values, _, _ = drawn(batch, seed)
    found = algorithms.compute_gae_advantage_return(rewards, values, batch.mask.double(), gamma, lam)
    for theirs, ours in zip(found, our_advantages(batch, rewards, values, gamma, lam), strict=True):
        torch.testing.assert_close(theirs[batch.mask].numpy(), ours[flat(batch, batch.mask)], **DOUBLE)


@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_gae_as_verl_gives_it(seed: int, gamma: float, lam: float) -> None:
    """GAE as verl gives it, whitened over loss tokens, equals ours under ``center_and_scale``.

    Returns are not whitened.
    """
    batch = random_batch(seed, num_empty=1)
    rewards, values, _, _ = drawn(batch, seed)
    found, found_returns = algorithms.compute_gae_advantage_return(rewards, values, batch.mask.double(), gamma, lam)
    advantages, returns = our_advantages(batch, rewards, values, gamma, lam)
    mask = flat(batch, batch.mask)
    torch.testing.assert_close(
        found[batch.mask].numpy(), whiten_tokens(advantages, mask, "center_and_scale", 0.0)[mask], **WHITENED
    )
    torch.testing.assert_close(found_returns[batch.mask].numpy(), returns[mask], **DOUBLE)


@pytest.mark.parametrize("seed", SEEDS)
def test_scale_is_masked_whiten_without_its_shift(seed: int) -> None:
    """Our ``scale`` is verl's masked_whiten without its shift, but for the mean.

    verl's ``shift_mean=False`` adds the mean back after scaling, ours scales it too: the two differ by mean·(1/std −
    1).
    """
    batch = random_batch(seed)
    values, _, _, _ = drawn(batch, seed)
    found = algorithms.verl_F.masked_whiten(values, batch.mask, shift_mean=False)
    inside_mask = values[batch.mask]
    mean, spread = inside_mask.mean(), inside_mask.std()
    ours = whiten_tokens(flat(batch, values), flat(batch, batch.mask), "scale", 0.0)[flat(batch, batch.mask)]
    torch.testing.assert_close(found[batch.mask] + mean * (1 / spread - 1), torch.from_numpy(ours), **WHITENED)


def test_a_reward_on_a_token_without_loss_is_lost_in_verl_alone() -> None:
    """A reward on a token without loss is lost in verl alone, by definition.

    verl puts the score on the last response token; where a tool wrote that one, its recursion passes it over, and no
    token of the sample learns of the score. Ours puts it on the last token that the policy wrote.
    """
    mask = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    scores, values = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    _, returns = algorithms.compute_gae_advantage_return(scores, values, mask, 1.0, 1.0)
    assert returns[0, :2].tolist() == [0.0, 0.0]
    ours = token_rewards(np.ones(1), np.array([True, True, False]), np.array([3]))
    advantages, _ = generalised_advantages(
        ours, np.zeros(3), np.array([True, True, False]), np.array([3]), gamma=1.0, lam=1.0
    )
    assert advantages.tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("clip", [0.2, 1.0, 1e9])
@pytest.mark.parametrize("mode", REDUCTIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss(seed: int, mode: str, clip: float) -> None:
    """The value loss equals verl's in value, gradient and share of clipped tokens.

    verl always clips, and 1e9 is never met: our None.
    """
    batch = random_batch(seed, num_empty=1)
    values, old, returns, _ = drawn(batch, seed)
    values.requires_grad_()
    found, share = algorithms.compute_value_loss(
        values, returns, old, batch.mask, clip, loss_agg_mode=mode, loss_scale_factor=batch.max_response_tokens
    )
    weights = token_weights(batch, REDUCTIONS[mode])[:, None].expand_as(old)
    chosen = [x[batch.mask] for x in (values, old, returns, weights)]
    wanted = value_loss(*chosen, clip=None if clip == 1e9 else clip)
    torch.testing.assert_close(found, wanted.loss, **DOUBLE)
    torch.testing.assert_close(*(torch.autograd.grad(x, values)[0] for x in (found, wanted.loss)), **DOUBLE)
    # verl's share is in float32
    assert float(share) == pytest.approx(wanted.clipped.double().mean().item(), rel=1e-6)


def test_value_clip_clips() -> None:
    batch = random_batch(0)
    values, old, returns, weights = (x[batch.mask] for x in drawn(batch, 0))
    assert 0.2 < value_loss(values, old, returns, weights, clip=0.2).clipped.double().mean() < 0.8


@pytest.mark.parametrize("seed", SEEDS)
def test_adaptive_coefficient(seed: int) -> None:
    """The adaptive coefficient equals verl's after every one of 50 updates, above and below the target and its clip."""
    random = np.random.default_rng(seed)
    theirs, ours = (
        algorithms.AdaptiveKLController(0.2, 0.1, 10_000),
        KLCoefficient(value=0.2, target=0.1, horizon=10_000),
    )
    for kl in random.normal(0.1, 0.1, 50):
        count = int(random.integers(1, 1024))
        theirs.update(kl, count)
        ours = ours.updated(float(kl), count)
        assert ours.value == pytest.approx(theirs.value, rel=1e-12)
    assert ours.value != pytest.approx(0.2, rel=1e-3)
    fixed = algorithms.FixedKLController(0.2)
    fixed.update(9.0, 64)
    assert KLCoefficient(value=0.2).updated(9.0, 64).value == fixed.value


def test_a_lost_coefficient_is_an_error_in_ours_alone() -> None:
    """A lost coefficient is an error in ours alone, by definition.

    verl's turns NaN with one KL, and negative with 5 horizons of samples at once.
    """
    for kl, count, is_lost in ((float("nan"), 8, np.isnan), (0.0, 600, lambda value: value < 0)):
        theirs = algorithms.AdaptiveKLController(0.2, 0.1, 100)
        theirs.update(kl, count)
        assert is_lost(theirs.value)
        with pytest.raises(ValueError, match="KL"):
            KLCoefficient(value=0.2, target=0.1, horizon=100).updated(kl, count)


def apply_kl_penalty() -> Callable:
    """Return the function of verl's trainer, compiled from its file alone.

    The module imports a whole cluster's worth of packages.
    """
    (folder,) = importlib.util.find_spec("verl.trainer.ppo").submodule_search_locations
    tree = ast.parse((pathlib.Path(folder) / "ray_trainer.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "apply_kl_penalty"]
    names = {
        "core_algos": algorithms,
        "DataProto": protocol.DataProto,
        "masked_mean": algorithms.verl_F.masked_mean,
        "torch": torch,
    }
    exec(compile(tree, "ray_trainer.py", "exec"), names)
    return names["apply_kl_penalty"]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("seed", SEEDS)
def test_kl_in_the_reward(seed: int, estimator: str) -> None:
    """The KL in the reward equals verl's ``apply_kl_penalty``: rewards at loss tokens, and the coefficient after it.

    verl steers by the mean over samples of each one's mean over its tokens; the controller takes whatever KL it is
    given, in the unit of its target.
    """
    batch = random_batch(seed)
    last = np.array([np.flatnonzero(row)[-1] for row in batch.mask.numpy()])
    totals, everyone = batch.advantages, np.arange(len(batch.groups))
    scores = torch.zeros_like(batch.old)
    scores[everyone, last] = torch.from_numpy(totals)
    given = {
        "response_mask": batch.mask.double(),
        "token_level_scores": scores,
        "old_log_probs": batch.old,
        "ref_log_prob": batch.reference,
    }
    controller = algorithms.AdaptiveKLController(0.3, 0.05, 10_000)
    done, said = apply_kl_penalty()(protocol.DataProto.from_dict(tensors=given), controller, kl_penalty=estimator)
    kl = kl_per_token(batch.old, batch.reference, batch.old, estimator=estimator)
    found = token_rewards(totals, flat(batch, batch.mask), batch.response_tokens, 0.3 * flat(batch, kl))
    torch.testing.assert_close(done.batch["token_level_rewards"][inside(batch)].numpy(), found, **DOUBLE)
    mean = float(np.mean([kl[i][batch.mask[i]].mean() for i in everyone]))
    assert said["actor/reward_kl_penalty"] == pytest.approx(mean, rel=1e-7)  # verl divides by its count plus 1e-8
    after = KLCoefficient(value=0.3, target=0.05, horizon=10_000).updated(mean, len(everyone))
    assert controller.value == pytest.approx(after.value, rel=1e-7)
