"""TRL's GRPOTrainer and RLOOTrainer against our losses and advantages.

Their own methods are driven on stand-ins for the trainer.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.importance import off_policy
from megatron_rl.config import CorrectionConfig, LossConfig
from tests.oracles.batch import (
    DOUBLE,
    SEEDS,
    Batch,
    Outcome,
    assert_same,
    correction_weights,
    ours,
    outcome,
    random_batch,
    random_rewards,
)
from tests.oracles.trl_trainer import one_process, trl, trl_scored

CLIP_LOW, CLIP_HIGH = 0.2, 0.3
CLIP = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}
REDUCTIONS = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dr_grpo": "sequence_sum_norm",
    "dapo": "token_mean",
    "luspo": "sequence_sum_mean",
}
LEVELS = {"token": "ppo", "sequence": "gspo"}
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def make_trainer(batch: Batch, *, args: dict | None = None, **changed) -> SimpleNamespace:
    """Make the trainer that GRPOTrainer._compute_loss reads, at the values that switch every option off."""
    settings = dict(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    trainer = dict(
        accelerator=one_process(),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(**{**settings, **(args or {})}),
        loss_type="grpo",
        importance_sampling_level="token",
        epsilon_low=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        beta=0.0,
        current_gradient_accumulation_steps=1,
        max_completion_length=batch.max_response_tokens,
        off_policy_mask_threshold=None,
        get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    return SimpleNamespace(**{**trainer, **changed})


def trl_loss(batch: Batch, trainer: SimpleNamespace, *, num_items: int | None = None, **inputs) -> Outcome:
    """Return the outcome of GRPOTrainer._compute_loss.

    A batch's holes are TRL's tool mask, whose tokens the model reads and does not train.
    """
    inside = torch.arange(batch.mask.shape[1]) < torch.from_numpy(batch.response_tokens)[:, None]
    ones = torch.ones(len(batch.groups), 1, dtype=torch.long)
    num_items = int(batch.mask.sum()) if num_items is None else num_items
    inputs = dict(
        prompt_ids=ones,
        prompt_mask=ones,
        completion_ids=inside.long(),
        completion_mask=inside.long(),
        tool_mask=batch.mask.long(),
        advantages=batch.advantage_tensor,
        old_per_token_logps=batch.old,
        sampling_per_token_logps=batch.rollout,
        ref_per_token_logps=batch.reference,
        num_items_in_batch=torch.tensor(num_items),
        **inputs,
    )

    def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logprobs, entropy, None)
        return trl.GRPOTrainer._compute_loss(trainer, None, inputs)

    return outcome(batch, loss_of)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", REDUCTIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_loss_types_equal_reductions(seed: int, loss_type: str, level: str) -> None:
    """TRL's loss types equal our reductions, at both levels of importance sampling.

    `importance_sampling_level=sequence` differentiates the sequence's ratio, our gspo each token's own
    (arXiv:2507.18071, eq. 14).
    """
    batch = random_batch(seed)
    config = LossConfig(policy=LEVELS[level], reduction=REDUCTIONS[loss_type], **CLIP)
    assert_same(
        trl_loss(batch, make_trainer(batch, loss_type=loss_type, importance_sampling_level=level)), ours(batch, config)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_delta_equals_dual_clip(seed: int) -> None:
    """TRL's δ equals our dual clip where δ > 1 + ε_high, as in INTELLECT-2's two-sided clip.

    Below that TRL's δ clips A > 0 too, and the dual clip does not.
    """
    batch = random_batch(seed)
    found = trl_loss(batch, make_trainer(batch, args={"delta": 1.8}))
    assert_same(found, ours(batch, LossConfig(reduction="sequence_mean", dual_clip=1.8, **CLIP)))


@pytest.mark.parametrize("cap", [1.3, 5.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_equals_cispo_without_lower_bound(seed: int, cap: float) -> None:
    """TRL's CISPO equals ours without a lower bound.

    TRL's `epsilon_high` is the cap itself (ScaleRL's ε_max), not its distance from 1; a lower bound of 0 is ours at
    clip_low = 1.
    """
    batch = random_batch(seed)
    found = trl_loss(batch, make_trainer(batch, loss_type="cispo", epsilon_high=cap))
    assert_same(found, ours(batch, LossConfig(policy="cispo", clip_low=1.0, clip_high=cap - 1)))


@pytest.mark.parametrize("loss_type", REDUCTIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_trl_counts_samples_without_loss_tokens(seed: int, loss_type: str) -> None:
    """TRL counts samples without loss tokens, and ours does not: the two differ by definition.

    TRL's means over sequences divide by all rows, ours by the samples that have a loss token (semantics §1).
    """
    batch = random_batch(seed, num_empty=1)
    found = trl_loss(batch, make_trainer(batch, loss_type=loss_type))
    wanted = ours(batch, LossConfig(reduction=REDUCTIONS[loss_type], **CLIP))
    share = 1.0 if REDUCTIONS[loss_type] == "token_mean" else batch.present / len(batch.groups)
    assert_same(
        found,
        Outcome(loss=share * wanted.loss, gradient=share * wanted.gradient, entropy_gradient=wanted.entropy_gradient),
    )


@pytest.mark.parametrize("loss_type", REDUCTIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_accumulated_micro_batches(seed: int, loss_type: str) -> None:
    """Halves of equally many samples equal our one sum, for all loss types but bnpo.

    bnpo is the mean of each half's token mean.
    """
    whole = random_batch(seed)
    count = len(whole.groups) // 2
    halves = [whole.select(list(range(count))), whole.select(list(range(count, 2 * count)))]
    whole = whole.select(list(range(2 * count)))
    config = LossConfig(reduction=REDUCTIONS[loss_type], **CLIP)
    settings = dict(loss_type=loss_type, current_gradient_accumulation_steps=2, args={"steps_per_generation": 2})
    found = [trl_loss(half, make_trainer(half, **settings), num_items=int(whole.mask.sum())) for half in halves]
    wanted = ours(whole, config)
    parts = [ours(half, config) for half in halves]
    gradient = wanted.gradient if loss_type != "bnpo" else torch.cat([part.gradient for part in parts]) / 2
    loss = wanted.loss if loss_type != "bnpo" else sum(part.loss for part in parts) / 2
    torch.testing.assert_close(found[0].loss + found[1].loss, loss, **DOUBLE)
    torch.testing.assert_close(torch.cat([f.gradient for f in found]), gradient, **DOUBLE)


@pytest.mark.parametrize("estimator", ["k3", "unbiased"])
@pytest.mark.parametrize("seed", SEEDS)
def test_kl_in_the_loss(seed: int, estimator: str) -> None:
    """The KL in TRL's loss equals ours.

    TRL's KL is k3; `use_bias_correction_kl` multiplies it by π_θ/π_old, gradient and all (DeepSeek-V3.2, eq. 7), never
    clipped.
    """
    batch = random_batch(seed)
    args = {"use_bias_correction_kl": estimator == "unbiased", "delta": 1.8}
    config = LossConfig(dual_clip=1.8, kl_coefficient=0.3, kl_estimator=estimator, **CLIP)
    assert_same(trl_loss(batch, make_trainer(batch, loss_type="dapo", beta=0.3, args=args)), ours(batch, config))


@pytest.mark.parametrize("seed", SEEDS)
def test_unbiased_kl_of_gspo_keeps_the_token_ratio_in_ours(seed: int) -> None:
    """gspo's unbiased KL keeps the token's ratio in ours, and not in TRL: the two differ by definition.

    At sequence level TRL multiplies each token's k3 by the sequence's ratio, and says that it is then biased.
    """
    batch = random_batch(seed)
    args, reduction = {"use_bias_correction_kl": True}, "sequence_mean"
    found = trl_loss(batch, make_trainer(batch, importance_sampling_level="sequence", beta=0.3, args=args))
    wanted = ours(
        batch, LossConfig(policy="gspo", reduction=reduction, kl_coefficient=0.3, kl_estimator="unbiased", **CLIP)
    )
    single = (batch.mask.sum(1) == 1)[:, None]  # where the two ratios are one
    torch.testing.assert_close(found.gradient * single, wanted.gradient * single, **DOUBLE)
    assert not torch.allclose(found.gradient, wanted.gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
@pytest.mark.parametrize("seed", SEEDS)
def test_entropy_bonus(seed: int, loss_type: str) -> None:
    """TRL's entropy bonus is a token mean whatever the loss type, so it is ours under token_mean alone."""
    batch = random_batch(seed)
    found = trl_loss(batch, make_trainer(batch, loss_type=loss_type, _entropy_bonus_enabled=True, entropy_coef=0.01))
    assert_same(found, ours(batch, LossConfig(entropy_coefficient=0.01, **CLIP)))


@pytest.mark.parametrize("seed", SEEDS)
def test_off_policy_mask(seed: int) -> None:
    """Our off-policy mask equals TRL's own function at π_old, and TRL's loss at π_θ = π_old.

    Ours is decided on π_old, so that it is known before the forward.
    """
    batch = random_batch(seed)
    keeps = trl.GRPOTrainer.get_off_policy_mask(
        batch.advantage_tensor[:, None], batch.old, batch.rollout, batch.mask.long(), 0.1
    )[:, 0]
    gap = ((batch.old - batch.rollout) * batch.mask).sum(1) / batch.mask.sum(1)
    assert np.array_equal(off_policy(batch.advantages, gap.numpy(), 0.1), keeps.numpy() == 0)
    first_step = batch.change(logprobs=batch.old)
    trainer = make_trainer(first_step, off_policy_mask_threshold=0.1, beta=0.3, args={"use_bias_correction_kl": True})
    config = LossConfig(reduction="sequence_mean", kl_coefficient=0.3, kl_estimator="unbiased", **CLIP)
    assert_same(trl_loss(first_step, trainer), ours(first_step, config, CorrectionConfig(off_policy_delta=0.1)))


def test_the_off_policy_mask_masks_something() -> None:
    dropped = [
        (correction_weights(random_batch(s), CorrectionConfig(off_policy_delta=0.1)).sum(1) == 0).double().mean()
        for s in SEEDS
    ]
    assert 0.05 < torch.stack(dropped).mean() < 0.5


def trl_importance(batch: Batch, correction: CorrectionConfig) -> torch.Tensor:
    """Return TRL's importance weights, [S, T] or [S, 1]."""
    changed = dict(
        vllm_importance_sampling_mode=correction.mode,
        vllm_importance_sampling_clip_min=correction.floor,
        vllm_importance_sampling_clip_max=correction.cap,
    )
    return trl_scored(batch, random_rewards(batch, 0), **changed)["importance_sampling_ratio"]


@pytest.mark.parametrize("floor", [None, 0.6])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_importance_sampling_modes(seed: int, mode: str, floor: float | None) -> None:
    """The importance sampling modes give TRL's weights, and its loss with them.

    The loss has a KL that the weights do not weigh; a mask keeps its tokens in every denominator.
    """
    batch = random_batch(seed)
    correction = CorrectionConfig(mode=mode, cap=1.5, floor=floor)
    ratio = trl_importance(batch, correction)
    weights = correction_weights(batch, correction)
    torch.testing.assert_close(torch.where(batch.mask, ratio, 0.0), weights, **DOUBLE)
    for level, policy in LEVELS.items():
        if policy == "gspo" and mode.startswith("token"):
            continue  # the test below
        settings = dict(
            use_vllm=True, vllm_importance_sampling_correction=True, beta=0.3, importance_sampling_level=level
        )
        found = trl_loss(batch, make_trainer(batch, loss_type="dapo", **settings), importance_sampling_ratio=ratio)
        assert_same(found, ours(batch, LossConfig(policy=policy, kl_coefficient=0.3, **CLIP), correction))


@pytest.mark.parametrize("mode", MODES)
def test_caps_and_masks_are_met(mode: str) -> None:
    plain = CorrectionConfig(mode=mode, cap=100.0)
    moved = [
        correction_weights(random_batch(s), CorrectionConfig(mode=mode, cap=1.5))
        != correction_weights(random_batch(s), plain)
        for s in SEEDS
    ]
    met = torch.cat([m[random_batch(s).mask] for m, s in zip(moved, SEEDS, strict=True)])
    assert 0.05 < met.double().mean() < 0.6


@pytest.mark.parametrize("seed", SEEDS)
def test_token_weights_under_a_sequence_ratio_are_averaged_in_trl(seed: int) -> None:
    """Token weights under a sequence ratio are averaged in TRL, and not in ours: the two differ by definition.

    TRL's sequence ratio spreads its gradient, so each token gets its sequence's mean weight; GSPO-token, ours and
    verl's, keeps each token's own (arXiv:2507.18071, section 4.3).
    """
    batch = random_batch(seed)
    correction = CorrectionConfig(mode="token_truncate", cap=1.5)
    settings = dict(use_vllm=True, vllm_importance_sampling_correction=True, importance_sampling_level="sequence")
    found = trl_loss(
        batch, make_trainer(batch, **settings), importance_sampling_ratio=trl_importance(batch, correction)
    )
    config = LossConfig(policy="gspo", reduction="sequence_mean", **CLIP)
    mean = (correction_weights(batch, correction).sum(1) / batch.mask.sum(1)).numpy()
    assert_same(found, ours(batch.change(advantages=batch.advantages * mean), config))
    torch.testing.assert_close(found.loss, ours(batch, config, correction).loss, **DOUBLE)
