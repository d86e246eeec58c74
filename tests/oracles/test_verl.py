"""verl's core algorithms and rollout corrections against our reductions, losses, importance weights and advantages."""

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.kl import kl_per_token
from megatron_rl.config import CorrectionConfig, LossConfig
from tests.oracles import batch as sides
from tests.oracles.batch import DOUBLE, REDUCTIONS, Batch, Outcome, assert_same, close, correction_weights, ours

algorithms = pytest.importorskip("verl.trainer.ppo.core_algos", reason=sides.MISSING)
corrections = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason=sides.MISSING)
actor = pytest.importorskip("verl.workers.config.actor", reason=sides.MISSING)

CLIP = {"clip_low": 0.2, "clip_high": 0.3}

# Where verl goes by way of float32, whose rounding is 6e-8, over some ten operations.
SINGLE = {"rtol": 1e-6, "atol": 1e-6}


def verl_config(batch: Batch, *, low: float = 0.2, high: float = 0.3, dual: float = 1e9, dro_beta: float | None = None):
    """Return verl's configuration, which always clips twice, at 3 unless told; 1e9 is never met."""
    clips = dict(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual)
    policy, counts = actor.PolicyLossConfig(dro_beta=dro_beta), {"loss_scale_factor": batch.max_response_tokens}
    fixed = dict(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
    return actor.ActorConfig(**fixed, **clips, policy_loss=policy, global_batch_info=counts)


def verl_loss(batch: Batch, name: str, mode: str, weights: torch.Tensor | None = None, **settings) -> Outcome:
    config = verl_config(batch, **settings)
    advantages = batch.advantage_tensor[:, None].expand_as(batch.old)
    term = algorithms.compute_policy_loss_reinforce if name == "reinforce" else algorithms.get_policy_loss_fn(name)

    settings = dict(loss_agg_mode=mode, config=config, rollout_is_weights=weights)
    return sides.outcome(batch, lambda logprobs, _: term(batch.old, logprobs, advantages, batch.mask, **settings)[0])


@pytest.mark.parametrize("mode", REDUCTIONS)
def test_agg_loss_equals_reduction_weights(holed: Batch, mode: str) -> None:
    """A sample without loss token is in no mean, unless a `global_batch_size` says so."""
    losses = holed.logprobs.clone().requires_grad_()
    settings = dict(loss_agg_mode=mode, loss_scale_factor=holed.max_response_tokens)
    found = algorithms.agg_loss(losses, holed.mask, **settings)
    weights = sides.token_weights(holed, REDUCTIONS[mode])[:, None] * holed.mask
    close(found.detach(), (weights * holed.logprobs).sum())
    close(torch.autograd.grad(found, losses)[0], weights)
    nominal = algorithms.agg_loss(holed.logprobs, holed.mask, global_batch_size=len(holed.groups), **settings)
    share = holed.present / len(holed.groups) if mode.startswith("seq-") else 1.0
    close(nominal, share * found.detach())


@pytest.mark.parametrize("mode", REDUCTIONS)
def test_micro_batches_on_two_ranks_add_up_to_one_sum(batch: Batch, mode: str) -> None:
    """verl's counts are of the whole mini-batch times dp_size, averaged over two ranks of two micro-batches each."""
    every = list(range(len(batch.groups)))
    counts = dict(batch_num_tokens=int(batch.mask.sum()), global_batch_size=len(every))
    counts["loss_scale_factor"] = batch.max_response_tokens
    parts = [batch.select(every[start::4]) for start in range(4)]
    ranks = [sum(algorithms.agg_loss(p.logprobs, p.mask, mode, dp_size=2, **counts) for p in parts[r::2])
             for r in range(2)]
    wanted = (sides.token_weights(batch, REDUCTIONS[mode])[:, None] * batch.mask * batch.logprobs).sum()
    close(sum(ranks) / 2, wanted)


POLICIES = {
    "vanilla": (LossConfig(**CLIP), {}), "vanilla_dual_clip": (LossConfig(dual_clip=1.8, **CLIP), {"dual": 1.8}),
    "vanilla_small_dual_clip": (LossConfig(dual_clip=1.1, **CLIP), {"dual": 1.1}),
    "vanilla_never_clipped": (LossConfig(policy="importance_sampling"), {"low": 1.0, "high": 1e9}),
    "gspo": (LossConfig(policy="gspo", **CLIP), {}), "cispo": (LossConfig(policy="cispo", **CLIP), {}),
    "gpg": (LossConfig(policy="reinforce"), {}), "reinforce": (LossConfig(policy="reinforce"), {}),
}  # fmt: skip


def reduced(config: LossConfig, reduction: str, **changed) -> LossConfig:
    kept = {name: getattr(config, name) for name in ("policy", "clip_low", "clip_high", "dual_clip")}
    return LossConfig(**{**kept, "reduction": reduction, **changed})


@pytest.mark.parametrize("mode", REDUCTIONS)
@pytest.mark.parametrize("name", POLICIES)
def test_policy_losses(holed: Batch, name: str, mode: str) -> None:
    config, settings = POLICIES[name]
    found = verl_loss(holed, name.split("_")[0], mode, **settings)
    assert_same(found, ours(holed, reduced(config, REDUCTIONS[mode])))


@pytest.mark.parametrize("mode", REDUCTIONS)
def test_dro(batch: Batch, mode: str) -> None:
    """Both quadratics are against what is passed; verl passes π_old, ours is μ (semantics §7), here the same."""
    batch = batch.change(old=batch.rollout)
    config = LossConfig(policy="dro", dro_beta=0.3, reduction=REDUCTIONS[mode])
    assert_same(verl_loss(batch, "dro", mode, dro_beta=0.3), ours(batch, config))


ESTIMATORS = ("k1", "k2", "k3")


def test_kl_penalty_is_bounded_in_verl_alone() -> None:
    """By definition verl cuts k3 at 10, from d = 2.6 on, and such a token's KL has no gradient; ours grows on."""
    logprobs = torch.tensor([-3.0, -6.0], dtype=torch.float64, requires_grad=True)
    reference = torch.full((2,), -0.5, dtype=torch.float64)
    found = algorithms.kl_penalty(logprobs, reference, "k3")
    wanted = kl_per_token(logprobs, reference, reference, estimator="k3")
    close(found, wanted.clamp(max=10))
    gradients = [torch.autograd.grad(x.sum(), logprobs)[0] for x in (found, wanted)]
    close(gradients[0], gradients[1] * torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("mode", REDUCTIONS)
def test_kl_and_entropy_take_the_reduction_of_the_policy(batch: Batch, mode: str, estimator: str) -> None:
    """verl aggregates all three terms alike, as one weight w_t does; importance weights reach the policy's alone."""
    correction = CorrectionConfig(mode="token_truncate", cap=1.5)
    importance = correction_weights(batch, correction)
    advantages = batch.advantage_tensor[:, None].expand_as(batch.old)
    config = verl_config(batch)

    def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        def summed(terms: torch.Tensor) -> torch.Tensor:
            return algorithms.agg_loss(terms, batch.mask, mode, **config.global_batch_info)

        given = (batch.old, logprobs, advantages, batch.mask, mode, config)
        policy, _ = algorithms.compute_policy_loss_vanilla(*given, rollout_is_weights=importance)
        kl = algorithms.kl_penalty(logprobs, batch.reference, estimator)
        return policy - 0.01 * summed(entropy) + 0.3 * summed(kl)

    terms = dict(entropy_coefficient=0.01, kl_coefficient=0.3, kl_estimator=estimator)
    wanted = LossConfig(reduction=REDUCTIONS[mode], **terms, **CLIP)
    assert_same(sides.outcome(batch, loss_of), ours(batch, wanted, correction))


@pytest.mark.parametrize("policy", ["vanilla", "gspo", "cispo", "gpg"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", ["1.5", "0.6_1.5"])
def test_rollout_weights(holed: Batch, threshold: str, level: str, policy: str) -> None:
    """One number truncates, two mask (IcePop); the loss's denominators keep what is masked."""
    found, _ = corrections.compute_rollout_correction_weights(holed.old - holed.rollout, holed.mask, level, threshold)
    floor = 0.6 if "_" in threshold else None
    correction = CorrectionConfig(mode=f"{level}_mask" if floor else f"{level}_truncate", cap=1.5, floor=floor)
    close(found, correction_weights(holed, correction))
    config = reduced(POLICIES[policy][0], "sequence_mean")
    assert_same(verl_loss(holed, policy, "seq-mean-token-mean", found), ours(holed, config, correction))


@pytest.mark.parametrize(("option", "level"),
                         [("token_k1", "token"), ("seq_sum_k1", "sequence"), ("seq_mean_k1", "geometric")])
def test_rejection_keeps_what_our_masks_keep(batch: Batch, option: str, level: str) -> None:
    """verl bounds μ/π_old, ours π_old/μ: the thresholds are each other's inverses. By definition, verl takes what it
    rejects out of the token counts as well and weighs what it keeps by `rollout_is` alone; ours keeps the counts and
    weighs by the same ratio.
    """
    ratio, bounds = batch.old - batch.rollout, f"{1 / 1.2}_{1 / 0.8}"
    kept, _ = corrections.compute_rollout_rejection_mask(ratio, batch.mask, option, bounds)
    weights = correction_weights(batch, CorrectionConfig(mode=f"{level}_mask", cap=1.2, floor=0.8))
    assert torch.equal(kept, weights != 0)


def test_rejection_rejects_some() -> None:
    config = CorrectionConfig(mode="geometric_mask", cap=1.2, floor=0.8)
    kept = [correction_weights(sides.random_batch(seed), config).sum(1) != 0 for seed in sides.SEEDS]
    assert 0.2 < torch.cat(kept).double().mean() < 0.8


def verl_advantages(case: Batch, rewards: np.ndarray, name: str, **settings) -> torch.Tensor:
    """Return verl's advantages, [S, T]; the reward stands on the last response token."""
    scores = torch.zeros_like(case.old)
    scores[torch.arange(len(case.groups)), torch.from_numpy(case.response_tokens) - 1] = torch.from_numpy(rewards[:, 0])
    estimator = algorithms.get_adv_estimator_fn(name)
    return estimator(token_level_rewards=scores, response_mask=case.mask.long(), index=case.groups, **settings)[0]


def on_tokens(batch: Batch, values: torch.Tensor) -> torch.Tensor:
    return values[:, None] * batch.mask


CENTRED = {"norm_adv_by_std_in_grpo": False}
ESTIMATED = [("grpo", "grpo", {}, DOUBLE), ("grpo", "dr_grpo", CENTRED, DOUBLE)]
ESTIMATED += [("rloo", "rloo", {}, DOUBLE), ("rloo_vectorized", "rloo", {}, DOUBLE)]
# its group statistics are in float32
ESTIMATED += [("grpo_vectorized", "grpo", {}, SINGLE), ("grpo_vectorized", "dr_grpo", CENTRED, SINGLE)]


@pytest.mark.parametrize(("name", "estimator", "settings", "tolerance"), ESTIMATED)
def test_advantages(holed: Batch, seed: int, name: str, estimator: str, settings: dict, tolerance: dict) -> None:
    rewards = sides.random_rewards(holed, seed)
    found = verl_advantages(holed, rewards, name, **settings)
    close(found, on_tokens(holed, sides.our_advantages(holed, rewards, estimator, epsilon=1e-6)), tolerance)


@pytest.mark.parametrize(("name", "estimator"),
                         [("reinforce_plus_plus_baseline", "reinforce_plus_plus"), ("gdpo", "gdpo")])
def test_whitened_advantages(holed: Batch, seed: int, name: str, estimator: str) -> None:
    """With `advantage.whiten=center_and_scale`, weighted by loss tokens; `scale` is ours alone, to keep zeros at 0."""
    rewards = sides.random_rewards(holed, seed)
    found = verl_advantages(holed, rewards, name, epsilon=1e-9)
    settings = dict(epsilon=1e-9, whiten="center_and_scale", loss_tokens=holed.loss_tokens)
    close(found, on_tokens(holed, sides.our_advantages(holed, rewards, estimator, **settings)), sides.WHITENED)


def test_gdpo_of_two_functions(batch: Batch, seed: int) -> None:
    rewards = sides.random_rewards(batch, seed, num_functions=2)
    counted = torch.ones(len(batch.groups), 1 + batch.mask.shape[1], dtype=torch.long)
    found = verl_advantages(
        batch, rewards, "gdpo", epsilon=1e-9,
        config={"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [0.5, 2.0]},
        non_tensor_batch={"a": rewards[:, 0], "b": rewards[:, 1]},
        batch={"prompts": counted[:, :1], "attention_mask": counted},
    )  # fmt: skip
    settings = dict(epsilon=1e-9, whiten="center_and_scale", loss_tokens=batch.loss_tokens, function_weights=(0.5, 2.0))
    wanted = on_tokens(batch, sides.our_advantages(batch, rewards, "gdpo", **settings))
    close(found, wanted, SINGLE, check_dtype=False)


def test_a_group_of_one_trains_in_verl_alone() -> None:
    """By definition verl gives such a sample its reward itself (vectorised RLOO: 0); ours has no baseline."""
    batch = sides.random_batch(0).select([0])
    rewards = np.array([[0.75]])
    for name, value in {"grpo": 0.75 / (1 + 1e-6), "rloo": 0.75, "rloo_vectorized": 0.0}.items():
        assert verl_advantages(batch, rewards, name)[batch.mask].unique().item() == pytest.approx(value, rel=1e-6)
    for estimator in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus"):
        assert sides.our_advantages(batch, rewards, estimator).item() == 0.0
