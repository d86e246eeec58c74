"""verl's critic against ours: advantages, their whitening, the value loss, the KL in the reward, its controller."""

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
from tests.oracles.batch import MISSING, REDUCTIONS, WHITENED, Batch, close, random_batch, token_weights

algorithms = pytest.importorskip("verl.trainer.ppo.core_algos", reason=MISSING)
protocol = pytest.importorskip("verl.protocol", reason=MISSING)

DISCOUNTS = [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.5)]


def drawn(batch: Batch, seed: int, *, spread: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Draw rewards, values, old values and returns, each [S, T], of any number where no response token stands."""
    random = torch.Generator().manual_seed(seed + 500)
    return tuple(spread * torch.randn(4, *batch.mask.shape, generator=random, dtype=torch.float64))


def our_advantages(batch: Batch, rewards: torch.Tensor, values: torch.Tensor, gamma: float,
                   lam: float) -> tuple[np.ndarray, np.ndarray]:
    arrays = [batch.flat(x) for x in (rewards, values, batch.mask)]
    return generalised_advantages(*arrays, batch.response_tokens, gamma=gamma, lam=lam)


@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
def test_gae_before_and_after_whitening(holed: Batch, seed: int, gamma: float, lam: float, monkeypatch) -> None:
    """At loss tokens: elsewhere verl leaves what stands after them, by definition. Returns are not whitened."""
    rewards, values, _, _ = drawn(holed, seed)
    given = (rewards, values, holed.mask.double(), gamma, lam)
    ours, mask = our_advantages(holed, rewards, values, gamma, lam), holed.flat(holed.mask)
    whitened, returns = algorithms.compute_gae_advantage_return(*given)
    close(whitened[holed.mask].numpy(), whiten_tokens(ours[0], mask, "center_and_scale", 0.0)[mask], WHITENED)
    close(returns[holed.mask].numpy(), ours[1][mask])
    monkeypatch.setattr(algorithms.verl_F, "masked_whiten", lambda advantages, mask: advantages)
    for found, wanted in zip(algorithms.compute_gae_advantage_return(*given), ours, strict=True):
        close(found[holed.mask].numpy(), wanted[mask])


def test_scale_is_masked_whiten_without_its_shift(batch: Batch, seed: int) -> None:
    """verl's ``shift_mean=False`` adds the mean back after scaling, ours scales it too: mean·(1/std − 1) apart."""
    values, _, _, _ = drawn(batch, seed)
    found = algorithms.verl_F.masked_whiten(values, batch.mask, shift_mean=False)
    inside_mask = values[batch.mask]
    mean, spread = inside_mask.mean(), inside_mask.std()
    ours = whiten_tokens(batch.flat(values), batch.flat(batch.mask), "scale", 0.0)[batch.flat(batch.mask)]
    close(found[batch.mask] + mean * (1 / spread - 1), torch.from_numpy(ours), WHITENED)


def test_a_reward_on_a_token_without_loss_is_lost_in_verl_alone() -> None:
    """By definition verl's recursion passes over a score on a tool's last token; ours is on the policy's last."""
    mask = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    scores, values = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    _, returns = algorithms.compute_gae_advantage_return(scores, values, mask, 1.0, 1.0)
    assert returns[0, :2].tolist() == [0.0, 0.0]
    trained, lengths = np.array([True, True, False]), np.array([3])
    ours = token_rewards(np.ones(1), trained, lengths)
    advantages, _ = generalised_advantages(ours, np.zeros(3), trained, lengths, gamma=1.0, lam=1.0)
    assert advantages.tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("clip", [0.2, 1.0, 1e9])
@pytest.mark.parametrize("mode", REDUCTIONS)
def test_value_loss(holed: Batch, seed: int, mode: str, clip: float) -> None:
    """Value, gradient and share of clipped tokens; verl always clips, and 1e9 is never met: our None."""
    values, old, returns, _ = drawn(holed, seed)
    values.requires_grad_()
    found, share = algorithms.compute_value_loss(values, returns, old, holed.mask, clip, loss_agg_mode=mode,
                                                 loss_scale_factor=holed.max_response_tokens)
    weights = token_weights(holed, REDUCTIONS[mode])[:, None].expand_as(old)
    wanted = value_loss(*[x[holed.mask] for x in (values, old, returns, weights)], clip=None if clip == 1e9 else clip)
    close(found, wanted.loss)
    close(*(torch.autograd.grad(x, values)[0] for x in (found, wanted.loss)))
    # verl's share is in float32
    assert float(share) == pytest.approx(wanted.clipped.double().mean().item(), rel=1e-6)


def test_value_clip_clips() -> None:
    batch = random_batch(0)
    values, old, returns, weights = (x[batch.mask] for x in drawn(batch, 0))
    assert 0.2 < value_loss(values, old, returns, weights, clip=0.2).clipped.double().mean() < 0.8


def test_adaptive_coefficient(seed: int) -> None:
    """The adaptive coefficient equals verl's after every one of 50 updates, above and below the target and its clip."""
    random = np.random.default_rng(seed)
    theirs = algorithms.AdaptiveKLController(0.2, 0.1, 10_000)
    ours = KLCoefficient(value=0.2, target=0.1, horizon=10_000)
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
    """By definition: verl's turns NaN with one KL, and negative with 5 horizons of samples at once."""
    for kl, count, is_lost in ((float("nan"), 8, np.isnan), (0.0, 600, lambda value: value < 0)):
        theirs = algorithms.AdaptiveKLController(0.2, 0.1, 100)
        theirs.update(kl, count)
        assert is_lost(theirs.value)
        with pytest.raises(ValueError, match="KL"):
            KLCoefficient(value=0.2, target=0.1, horizon=100).updated(kl, count)


def apply_kl_penalty() -> Callable:
    """Return the function of verl's trainer, compiled from its file alone: the module imports a cluster's packages."""
    (folder,) = importlib.util.find_spec("verl.trainer.ppo").submodule_search_locations
    tree = ast.parse((pathlib.Path(folder) / "ray_trainer.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "apply_kl_penalty"]
    names = {"core_algos": algorithms, "DataProto": protocol.DataProto, "torch": torch}
    names["masked_mean"] = algorithms.verl_F.masked_mean
    exec(compile(tree, "ray_trainer.py", "exec"), names)
    return names["apply_kl_penalty"]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_reward(batch: Batch, estimator: str) -> None:
    """verl steers by the mean over samples of each one's mean over its tokens, and so is the controller given it."""
    last = np.array([np.flatnonzero(row)[-1] for row in batch.mask.numpy()])
    totals, everyone = batch.advantages, np.arange(len(batch.groups))
    scores = torch.zeros_like(batch.old)
    scores[everyone, last] = torch.from_numpy(totals)
    given = {"response_mask": batch.mask.double(), "token_level_scores": scores}
    given |= {"old_log_probs": batch.old, "ref_log_prob": batch.reference}
    controller = algorithms.AdaptiveKLController(0.3, 0.05, 10_000)
    done, said = apply_kl_penalty()(protocol.DataProto.from_dict(tensors=given), controller, kl_penalty=estimator)
    kl = kl_per_token(batch.old, batch.reference, batch.old, estimator=estimator)
    found = token_rewards(totals, batch.flat(batch.mask), batch.response_tokens, 0.3 * batch.flat(kl))
    close(done.batch["token_level_rewards"][batch.inside].numpy(), found)
    mean = float(np.mean([kl[i][batch.mask[i]].mean() for i in everyone]))
    assert said["actor/reward_kl_penalty"] == pytest.approx(mean, rel=1e-7)  # verl divides by its count plus 1e-8
    after = KLCoefficient(value=0.3, target=0.05, horizon=10_000).updated(mean, len(everyone))
    assert controller.value == pytest.approx(after.value, rel=1e-7)
