"""verl's core algorithms and rollout corrections against our reductions, losses, importance weights and advantages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.kl import kl_per_token
from megatron_rl.config import CorrectionConfig, LossConfig
from tests.oracles.batch import (
    DOUBLE,
    MISSING,
    REDUCTIONS,
    SEEDS,
    WHITENED,
    Batch,
    Outcome,
    assert_same,
    correction_weights,
    our_advantages,
    ours,
    outcome,
    random_batch,
    random_rewards,
    token_weights,
)

algorithms = pytest.importorskip("verl.trainer.ppo.core_algos", reason=MISSING)
corrections = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason=MISSING)
actor = pytest.importorskip("verl.workers.config.actor", reason=MISSING)

CLIP = {"clip_low": 0.2, "clip_high": 0.3}

# Where verl goes by way of float32, whose rounding is 6e-8, over some ten operations.
SINGLE = {"rtol": 1e-6, "atol": 1e-6}


def verl_config(batch: Batch, *, low: float = 0.2, high: float = 0.3, dual: float = 1e9, dro_beta: float | None = None):
    """Return verl's configuration, which always clips twice, at 3 unless told; 1e9 is never met."""
    return actor.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
        policy_loss=actor.PolicyLossConfig(dro_beta=dro_beta),
        global_batch_info={"loss_scale_factor": batch.max_response_tokens},
    )


def verl_loss(batch: Batch, name: str, mode: str, weights: torch.Tensor | None = None, **settings) -> Outcome:
    config = verl_config(batch, **settings)
    advantages = batch.advantage_tensor[:, None].expand_as(batch.old)
    term = algorithms.compute_policy_loss_reinforce if name == "reinforce" else algorithms.get_policy_loss_fn(name)

    def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return term(
            batch.old, logprobs, advantages, batch.mask, loss_agg_mode=mode, config=config, rollout_is_weights=weights
        )[0]

    return outcome(batch, loss_of)


@pytest.mark.parametrize("mode", REDUCTIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_agg_loss_equals_reduction_weights(seed: int, mode: str) -> None:
    """The gradient of verl's agg_loss equals our reduction weights.

    A sample without loss token is in no mean, unless a `global_batch_size` says so.
    """
    batch = random_batch(seed, num_empty=1)
    losses = batch.logprobs.clone().requires_grad_()
    settings = dict(loss_agg_mode=mode, loss_scale_factor=batch.max_response_tokens)
    found = algorithms.agg_loss(losses, batch.mask, **settings)
    weights = token_weights(batch, REDUCTIONS[mode])[:, None] * batch.mask
    torch.testing.assert_close(found.detach(), (weights * batch.logprobs).sum(), **DOUBLE)
    torch.testing.assert_close(torch.autograd.grad(found, losses)[0], weights, **DOUBLE)
    nominal = algorithms.agg_loss(batch.logprobs, batch.mask, global_batch_size=len(batch.groups), **settings)
    share = batch.present / len(batch.groups) if mode.startswith("seq-") else 1.0
    torch.testing.assert_close(nominal, share * found.detach(), **DOUBLE)


@pytest.mark.parametrize("mode", REDUCTIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_micro_batches_on_two_ranks_add_up_to_one_sum(seed: int, mode: str) -> None:
    """Micro-batches on two ranks add up to one sum.

    verl's counts are of the whole mini-batch times dp_size, averaged over two ranks of two micro-batches each.
    """
    batch = random_batch(seed)
    every = list(range(len(batch.groups)))
    counts = dict(
        batch_num_tokens=int(batch.mask.sum()),
        global_batch_size=len(every),
        loss_scale_factor=batch.max_response_tokens,
    )
    parts = [batch.select(every[start::4]) for start in range(4)]
    ranks = [
        sum(algorithms.agg_loss(p.logprobs, p.mask, mode, dp_size=2, **counts) for p in parts[r::2]) for r in range(2)
    ]
    wanted = (token_weights(batch, REDUCTIONS[mode])[:, None] * batch.mask * batch.logprobs).sum()
    torch.testing.assert_close(sum(ranks) / 2, wanted, **DOUBLE)


POLICIES = {
    "vanilla": (LossConfig(**CLIP), {}),
    "vanilla_dual_clip": (LossConfig(dual_clip=1.8, **CLIP), {"dual": 1.8}),
    "vanilla_small_dual_clip": (LossConfig(dual_clip=1.1, **CLIP), {"dual": 1.1}),
    "vanilla_never_clipped": (LossConfig(policy="importance_sampling"), {"low": 1.0, "high": 1e9}),
    "gspo": (LossConfig(policy="gspo", **CLIP), {}),
    "cispo": (LossConfig(policy="cispo", **CLIP), {}),
    "gpg": (LossConfig(policy="reinforce"), {}),
    "reinforce": (LossConfig(policy="reinforce"), {}),
}


def reduced(config: LossConfig, reduction: str, **changed) -> LossConfig:
    kept = {name: getattr(config, name) for name in ("policy", "clip_low", "clip_high", "dual_clip")}
    return LossConfig(**{**kept, "reduction": reduction, **changed})


@pytest.mark.parametrize("mode", REDUCTIONS)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_policy_losses(seed: int, name: str, mode: str) -> None:
    batch, (config, settings) = random_batch(seed, num_empty=1), POLICIES[name]
    found = verl_loss(batch, name.split("_")[0], mode, **settings)
    assert_same(found, ours(batch, reduced(config, REDUCTIONS[mode])), DOUBLE)


@pytest.mark.parametrize("mode", REDUCTIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_dro(seed: int, mode: str) -> None:
    """verl's dro equals ours where π_old is μ.

    Both quadratics are against what is passed; verl passes π_old, ours is μ (semantics §7).
    """
    batch = random_batch(seed)
    batch = batch.change(old=batch.rollout)
    config = LossConfig(policy="dro", dro_beta=0.3, reduction=REDUCTIONS[mode])
    assert_same(verl_loss(batch, "dro", mode, dro_beta=0.3), ours(batch, config), DOUBLE)


ESTIMATORS = ("k1", "k2", "k3")


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", SEEDS)
def test_kl_penalty(seed: int, estimator: str) -> None:
    batch = random_batch(seed)
    logprobs = batch.logprobs.clone().requires_grad_()
    found = algorithms.kl_penalty(logprobs, batch.reference, estimator)
    wanted = kl_per_token(logprobs, batch.reference, batch.old, estimator=estimator)
    torch.testing.assert_close(found, wanted, **DOUBLE)
    gradients = [torch.autograd.grad(x.sum(), logprobs)[0] for x in (found, wanted)]
    torch.testing.assert_close(*gradients, **DOUBLE)


def test_kl_penalty_is_bounded_in_verl_alone() -> None:
    """The KL penalty is bounded in verl alone, by definition.

    verl cuts k3 at 10, from d = 2.6 on, and such a token's KL has no gradient; ours grows on.
    """
    logprobs = torch.tensor([-3.0, -6.0], dtype=torch.float64, requires_grad=True)
    reference = torch.full((2,), -0.5, dtype=torch.float64)
    found = algorithms.kl_penalty(logprobs, reference, "k3")
    wanted = kl_per_token(logprobs, reference, reference, estimator="k3")
    torch.testing.assert_close(found, wanted.clamp(max=10), **DOUBLE)
    gradients = [torch.autograd.grad(x.sum(), logprobs)[0] for x in (found, wanted)]
    torch.testing.assert_close(gradients[0], gradients[1] * torch.tensor([1.0, 0.0]), **DOUBLE)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("mode", REDUCTIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_kl_and_entropy_take_the_reduction_of_the_policy(seed: int, mode: str, estimator: str) -> None:
    """KL and entropy take the reduction of the policy.

    verl aggregates all three terms alike, and so does one weight w_t. Importance weights reach the policy's term alone.
    """
    batch = random_batch(seed)
    correction = CorrectionConfig(mode="token_truncate", cap=1.5)
    importance = correction_weights(batch, correction)
    advantages = batch.advantage_tensor[:, None].expand_as(batch.old)
    config = verl_config(batch)

    def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        def summed(terms: torch.Tensor) -> torch.Tensor:
            return algorithms.agg_loss(terms, batch.mask, mode, **config.global_batch_info)

        policy, _ = algorithms.compute_policy_loss_vanilla(
            batch.old, logprobs, advantages, batch.mask, mode, config, rollout_is_weights=importance
        )
        return (
            policy - 0.01 * summed(entropy) + 0.3 * summed(algorithms.kl_penalty(logprobs, batch.reference, estimator))
        )

    wanted = LossConfig(
        reduction=REDUCTIONS[mode], entropy_coefficient=0.01, kl_coefficient=0.3, kl_estimator=estimator, **CLIP
    )
    assert_same(outcome(batch, loss_of), ours(batch, wanted, correction), DOUBLE)


@pytest.mark.parametrize("policy", ["vanilla", "gspo", "cispo", "gpg"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", ["1.5", "0.6_1.5"])
@pytest.mark.parametrize("seed", SEEDS)
def test_rollout_weights(seed: int, threshold: str, level: str, policy: str) -> None:
    """verl's rollout weights equal ours, and so does the loss under them.

    One number truncates, two mask (IcePop); the loss's denominators keep what is masked.
    """
    batch = random_batch(seed, num_empty=1)
    found, _ = corrections.compute_rollout_correction_weights(batch.old - batch.rollout, batch.mask, level, threshold)
    floor = 0.6 if "_" in threshold else None
    correction = CorrectionConfig(mode=f"{level}_mask" if floor else f"{level}_truncate", cap=1.5, floor=floor)
    torch.testing.assert_close(found, correction_weights(batch, correction), **DOUBLE)
    config = reduced(POLICIES[policy][0], "sequence_mean")
    assert_same(verl_loss(batch, policy, "seq-mean-token-mean", found), ours(batch, config, correction), DOUBLE)


@pytest.mark.parametrize(
    ("option", "level"), [("token_k1", "token"), ("seq_sum_k1", "sequence"), ("seq_mean_k1", "geometric")]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_rejection_keeps_what_our_masks_keep(seed: int, option: str, level: str) -> None:
    """verl's rejection keeps what our masks keep.

    verl bounds μ/π_old, ours π_old/μ: the thresholds are each other's inverses. By definition, verl takes what it
    rejects out of the token counts as well and weighs what it keeps by `rollout_is` alone; ours keeps the counts and
    weighs by the same ratio.
    """
    batch = random_batch(seed)
    kept, _ = corrections.compute_rollout_rejection_mask(
        batch.old - batch.rollout, batch.mask, option, f"{1 / 1.2}_{1 / 0.8}"
    )
    weights = correction_weights(batch, CorrectionConfig(mode=f"{level}_mask", cap=1.2, floor=0.8))
    assert torch.equal(kept, weights != 0)


def test_rejection_rejects_some() -> None:
    config = CorrectionConfig(mode="geometric_mask", cap=1.2, floor=0.8)
    shares = [(correction_weights(random_batch(seed), config).sum(1) != 0).double().mean() for seed in SEEDS]
    assert 0.2 < torch.stack(shares).mean() < 0.8


def verl_advantages(case: Batch, rewards: np.ndarray, name: str, **settings) -> torch.Tensor:
    """Return verl's advantages, [S, T]; the reward stands on the last response token."""
    scores = torch.zeros_like(case.old)
    scores[torch.arange(len(case.groups)), torch.from_numpy(case.response_tokens) - 1] = torch.from_numpy(rewards[:, 0])
    estimator = algorithms.get_adv_estimator_fn(name)
    return estimator(token_level_rewards=scores, response_mask=case.mask.long(), index=case.groups, **settings)[0]


def on_tokens(batch: Batch, values: torch.Tensor) -> torch.Tensor:
    return values[:, None] * batch.mask


ESTIMATED = [
    ("grpo", "grpo", {}, DOUBLE),
    ("grpo", "dr_grpo", {"norm_adv_by_std_in_grpo": False}, DOUBLE),
    ("grpo_vectorized", "grpo", {}, SINGLE),  # its group statistics are in float32
    ("grpo_vectorized", "dr_grpo", {"norm_adv_by_std_in_grpo": False}, SINGLE),
    ("rloo", "rloo", {}, DOUBLE),
    ("rloo_vectorized", "rloo", {}, DOUBLE),
]


@pytest.mark.parametrize(("name", "estimator", "settings", "tolerance"), ESTIMATED)
@pytest.mark.parametrize("seed", SEEDS)
def test_advantages(seed: int, name: str, estimator: str, settings: dict, tolerance: dict) -> None:
    batch = random_batch(seed, num_empty=1)
    rewards = random_rewards(batch, seed)
    found = verl_advantages(batch, rewards, name, **settings)
    torch.testing.assert_close(
        found, on_tokens(batch, our_advantages(batch, rewards, estimator, epsilon=1e-6)), **tolerance
    )


@pytest.mark.parametrize(
    ("name", "estimator"), [("reinforce_plus_plus_baseline", "reinforce_plus_plus"), ("gdpo", "gdpo")]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_whitened_advantages(seed: int, name: str, estimator: str) -> None:
    """verl's whitened advantages equal ours with `advantage.whiten=center_and_scale`.

    They are weighted by loss tokens, and centred. `scale` is ours alone, to keep zeros at 0.
    """
    batch = random_batch(seed, num_empty=1)
    rewards = random_rewards(batch, seed)
    found = verl_advantages(batch, rewards, name, epsilon=1e-9)
    settings = dict(epsilon=1e-9, whiten="center_and_scale", loss_tokens=batch.loss_tokens)
    torch.testing.assert_close(
        found, on_tokens(batch, our_advantages(batch, rewards, estimator, **settings)), **WHITENED
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_of_two_functions(seed: int) -> None:
    batch = random_batch(seed)
    rewards = random_rewards(batch, seed, num_functions=2)
    counted = torch.ones(len(batch.groups), 1 + batch.mask.shape[1], dtype=torch.long)
    found = verl_advantages(
        batch,
        rewards,
        "gdpo",
        epsilon=1e-9,
        config={"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [0.5, 2.0]},
        non_tensor_batch={"a": rewards[:, 0], "b": rewards[:, 1]},
        batch={"prompts": counted[:, :1], "attention_mask": counted},
    )
    settings = dict(epsilon=1e-9, whiten="center_and_scale", loss_tokens=batch.loss_tokens, function_weights=(0.5, 2.0))
    wanted = on_tokens(batch, our_advantages(batch, rewards, "gdpo", **settings))
    torch.testing.assert_close(found, wanted, check_dtype=False, **SINGLE)


def test_a_group_of_one_trains_in_verl_alone() -> None:
    """A group of one trains in verl alone, by definition.

    verl gives such a sample its reward itself (its vectorised RLOO: 0); ours has no baseline, so no signal.
    """
    batch = random_batch(0).select([0])
    rewards = np.array([[0.75]])
    wanted = {"grpo": 0.75 / (1 + 1e-6), "rloo": 0.75, "rloo_vectorized": 0.0}
    for name, value in wanted.items():
        assert verl_advantages(batch, rewards, name)[batch.mask].unique().item() == pytest.approx(value, rel=1e-6)
    for estimator in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus"):
        assert our_advantages(batch, rewards, estimator).item() == 0.0
