"""The own methods of TRL's GRPOTrainer and RLOOTrainer, on stand-ins for the trainer: our losses and advantages."""

import dataclasses
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.distillation import distillation_advantages
from megatron_rl.algorithm.importance import off_policy
from megatron_rl.algorithm.objective import Objective
from megatron_rl.config import CorrectionConfig, LossConfig
from tests.oracles import batch as sides
from tests.oracles.batch import SEEDS, Batch, Outcome, assert_same, close, correction_weights, ours, outcome
from tests.oracles.trl_trainer import double_by_default, generating_trainer, one_process, trl, trl_scored

CLIP_LOW, CLIP_HIGH = 0.2, 0.3
CLIP = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}
REDUCTIONS = {"grpo": "sequence_mean", "dr_grpo": "sequence_sum_norm", "luspo": "sequence_sum_mean"}
REDUCTIONS |= {"bnpo": "token_mean", "dapo": "token_mean"}
LEVELS = {"token": "ppo", "sequence": "gspo"}
CORRECTED = {"use_vllm": True, "vllm_importance_sampling_correction": True}
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def make_trainer(batch: Batch, *, args: dict | None = None, **changed) -> SimpleNamespace:
    """Make the trainer that GRPOTrainer._compute_loss reads, at the values that switch every option off."""
    settings = dict(delta=None, use_bias_correction_kl=False, steps_per_generation=1) | (args or {})
    trainer = dict(
        accelerator=one_process(), model=SimpleNamespace(training=True), args=SimpleNamespace(**settings),
        loss_type="grpo", importance_sampling_level="token", epsilon_low=CLIP_LOW, epsilon_high=CLIP_HIGH, beta=0.0,
        current_gradient_accumulation_steps=1, max_completion_length=batch.max_response_tokens,
        off_policy_mask_threshold=None, get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask,
        top_entropy_quantile=1.0, _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    off = ("use_vllm", "vllm_importance_sampling_correction", "aux_loss_enabled", "_entropy_bonus_enabled")
    return SimpleNamespace(**trainer | dict.fromkeys((*off, "use_adaptive_entropy"), False) | changed)


def trl_loss(batch: Batch, trainer: SimpleNamespace, *, num_items: int | None = None, **inputs) -> Outcome:
    """Return the outcome of GRPOTrainer._compute_loss; holes are TRL's tool mask, which the model reads untrained."""
    ones = torch.ones(len(batch.groups), 1, dtype=torch.long)
    num_items = int(batch.mask.sum()) if num_items is None else num_items
    inputs = dict(
        prompt_ids=ones, prompt_mask=ones, completion_ids=batch.inside.long(), completion_mask=batch.inside.long(),
        tool_mask=batch.mask.long(), advantages=batch.advantage_tensor, old_per_token_logps=batch.old,
        sampling_per_token_logps=batch.rollout, ref_per_token_logps=batch.reference,
        num_items_in_batch=torch.tensor(num_items), **inputs,
    )  # fmt: skip

    def loss_of(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logprobs, entropy, None)
        return trl.GRPOTrainer._compute_loss(trainer, None, inputs)

    return outcome(batch, loss_of)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", REDUCTIONS)
def test_loss_types_equal_reductions(batch: Batch, loss_type: str, level: str) -> None:
    """At level `sequence` TRL differentiates the sequence's ratio, our gspo each token's (arXiv:2507.18071, eq. 14)."""
    config = LossConfig(policy=LEVELS[level], reduction=REDUCTIONS[loss_type], **CLIP)
    trainer = make_trainer(batch, loss_type=loss_type, importance_sampling_level=level)
    assert_same(trl_loss(batch, trainer), ours(batch, config))


def test_delta_equals_dual_clip(batch: Batch) -> None:
    """Where δ > 1 + ε_high, as in INTELLECT-2's two-sided clip; below that TRL's δ clips A > 0 too."""
    found = trl_loss(batch, make_trainer(batch, args={"delta": 1.8}))
    assert_same(found, ours(batch, LossConfig(reduction="sequence_mean", dual_clip=1.8, **CLIP)))


@pytest.mark.parametrize("cap", [1.3, 5.0])
def test_cispo_equals_cispo_without_lower_bound(batch: Batch, cap: float) -> None:
    """TRL's `epsilon_high` is the cap itself (ScaleRL's ε_max); a lower bound of 0 is ours at clip_low = 1."""
    found = trl_loss(batch, make_trainer(batch, loss_type="cispo", epsilon_high=cap))
    assert_same(found, ours(batch, LossConfig(policy="cispo", clip_low=1.0, clip_high=cap - 1)))


@pytest.mark.parametrize("loss_type", REDUCTIONS)
def test_trl_counts_samples_without_loss_tokens(holed: Batch, loss_type: str) -> None:
    """By definition its means over sequences divide by all rows, ours by those with a loss token (semantics §1)."""
    found = trl_loss(holed, make_trainer(holed, loss_type=loss_type))
    wanted = ours(holed, LossConfig(reduction=REDUCTIONS[loss_type], **CLIP))
    share = 1.0 if REDUCTIONS[loss_type] == "token_mean" else holed.present / len(holed.groups)
    wanted = dataclasses.replace(wanted, loss=share * wanted.loss, gradient=share * wanted.gradient)
    assert_same(found, wanted)


@pytest.mark.parametrize("loss_type", REDUCTIONS)
def test_accumulated_micro_batches(batch: Batch, loss_type: str) -> None:
    """Halves of equally many samples equal our one sum; bnpo alone is the mean of each half's token mean."""
    count = len(batch.groups) // 2
    halves = [batch.select(list(range(count))), batch.select(list(range(count, 2 * count)))]
    whole = batch.select(list(range(2 * count)))
    config = LossConfig(reduction=REDUCTIONS[loss_type], **CLIP)
    settings = dict(loss_type=loss_type, current_gradient_accumulation_steps=2, args={"steps_per_generation": 2})
    found = [trl_loss(half, make_trainer(half, **settings), num_items=int(whole.mask.sum())) for half in halves]
    wanted = ours(whole, config)
    loss, gradient = wanted.loss, wanted.gradient
    if loss_type == "bnpo":
        parts = [ours(half, config) for half in halves]
        loss, gradient = sum(part.loss for part in parts) / 2, torch.cat([part.gradient for part in parts]) / 2
    close(found[0].loss + found[1].loss, loss)
    close(torch.cat([f.gradient for f in found]), gradient)


@pytest.mark.parametrize("estimator", ["k3", "unbiased"])
def test_kl_in_the_loss(batch: Batch, estimator: str) -> None:
    """`use_bias_correction_kl` multiplies k3 by π_θ/π_old, gradient and all (DeepSeek-V3.2, eq. 7), never clipped."""
    args = {"use_bias_correction_kl": estimator == "unbiased", "delta": 1.8}
    config = LossConfig(dual_clip=1.8, kl_coefficient=0.3, kl_estimator=estimator, **CLIP)
    assert_same(trl_loss(batch, make_trainer(batch, loss_type="dapo", beta=0.3, args=args)), ours(batch, config))


def test_unbiased_kl_of_gspo_keeps_the_token_ratio_in_ours(batch: Batch) -> None:
    """By definition TRL multiplies each token's k3 by the sequence's ratio, and says that it is then biased."""
    args = {"use_bias_correction_kl": True}
    found = trl_loss(batch, make_trainer(batch, importance_sampling_level="sequence", beta=0.3, args=args))
    kl = dict(kl_coefficient=0.3, kl_estimator="unbiased")
    wanted = ours(batch, LossConfig(policy="gspo", reduction="sequence_mean", **kl, **CLIP))
    single = (batch.mask.sum(1) == 1)[:, None]  # where the two ratios are one
    close(found.gradient * single, wanted.gradient * single)
    assert not torch.allclose(found.gradient, wanted.gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_entropy_bonus(batch: Batch, loss_type: str) -> None:
    """TRL's entropy bonus is a token mean whatever the loss type, so it is ours under token_mean alone."""
    found = trl_loss(batch, make_trainer(batch, loss_type=loss_type, _entropy_bonus_enabled=True, entropy_coef=0.01))
    assert_same(found, ours(batch, LossConfig(entropy_coefficient=0.01, **CLIP)))


def test_off_policy_mask(batch: Batch) -> None:
    """Ours is decided on π_old, before the forward: TRL's own function there, and its loss at π_θ = π_old."""
    given = (batch.advantage_tensor[:, None], batch.old, batch.rollout, batch.mask.long())
    keeps = trl.GRPOTrainer.get_off_policy_mask(*given, 0.1)[:, 0]
    gap = ((batch.old - batch.rollout) * batch.mask).sum(1) / batch.mask.sum(1)
    assert np.array_equal(off_policy(batch.advantages, gap.numpy(), 0.1), keeps.numpy() == 0)
    first_step = batch.change(logprobs=batch.old)
    trainer = make_trainer(first_step, off_policy_mask_threshold=0.1, beta=0.3, args={"use_bias_correction_kl": True})
    config = LossConfig(reduction="sequence_mean", kl_coefficient=0.3, kl_estimator="unbiased", **CLIP)
    assert_same(trl_loss(first_step, trainer), ours(first_step, config, CorrectionConfig(off_policy_delta=0.1)))


def test_the_off_policy_mask_masks_something() -> None:
    config = CorrectionConfig(off_policy_delta=0.1)
    dropped = [correction_weights(sides.random_batch(s), config).sum(1) == 0 for s in SEEDS]
    assert 0.05 < torch.cat(dropped).double().mean() < 0.5


def trl_importance(batch: Batch, correction: CorrectionConfig) -> torch.Tensor:
    """Return TRL's importance weights, [S, T] or [S, 1]."""
    changed = dict(vllm_importance_sampling_mode=correction.mode, vllm_importance_sampling_clip_min=correction.floor,
                   vllm_importance_sampling_clip_max=correction.cap)
    return trl_scored(batch, sides.random_rewards(batch, 0), **changed)["importance_sampling_ratio"]


@pytest.mark.parametrize("floor", [None, 0.6])
@pytest.mark.parametrize("mode", MODES)
def test_importance_sampling_modes(batch: Batch, mode: str, floor: float | None) -> None:
    """The loss has a KL that the weights do not weigh; a mask keeps its tokens in every denominator."""
    correction = CorrectionConfig(mode=mode, cap=1.5, floor=floor)
    ratio = trl_importance(batch, correction)
    close(torch.where(batch.mask, ratio, 0.0), correction_weights(batch, correction))
    for level, policy in LEVELS.items():
        if policy == "gspo" and mode.startswith("token"):
            continue  # the test below
        trainer = make_trainer(batch, loss_type="dapo", beta=0.3, importance_sampling_level=level, **CORRECTED)
        found = trl_loss(batch, trainer, importance_sampling_ratio=ratio)
        assert_same(found, ours(batch, LossConfig(policy=policy, kl_coefficient=0.3, **CLIP), correction))


@pytest.mark.parametrize("mode", MODES)
def test_caps_and_masks_are_met(mode: str) -> None:
    met = []
    for batch in map(sides.random_batch, SEEDS):
        capped, plain = (correction_weights(batch, CorrectionConfig(mode=mode, cap=cap)) for cap in (1.5, 100.0))
        met.append((capped != plain)[batch.mask])
    assert 0.05 < torch.cat(met).double().mean() < 0.6


def test_token_weights_under_a_sequence_ratio_are_averaged_in_trl(batch: Batch) -> None:
    """By definition: each token gets its sequence's mean weight; in ours its own (arXiv:2507.18071, section 4.3)."""
    correction = CorrectionConfig(mode="token_truncate", cap=1.5)
    trainer = make_trainer(batch, importance_sampling_level="sequence", **CORRECTED)
    found = trl_loss(batch, trainer, importance_sampling_ratio=trl_importance(batch, correction))
    config = LossConfig(policy="gspo", reduction="sequence_mean", **CLIP)
    mean = (correction_weights(batch, correction).sum(1) / batch.mask.sum(1)).numpy()
    assert_same(found, ours(batch.change(advantages=batch.advantages * mean), config))
    close(found.loss, ours(batch, config, correction).loss)


TRL_EPSILON = 1e-4  # what TRL adds to every standard deviation


def with_gaps(rewards: np.ndarray, seed: int) -> np.ndarray:
    """Return rewards with gaps: some functions do not apply to some samples, and none does to some others."""
    random = np.random.default_rng(seed + 2000)
    rewards = np.where(random.random(rewards.shape) < 0.15, np.nan, rewards)
    rewards[random.integers(len(rewards))] = np.nan
    rewards[-1] = 1.0  # somebody is scored
    return rewards


@pytest.mark.parametrize(("scale", "estimator"), [("group", "grpo"), ("none", "dr_grpo")])
def test_group_advantages(batch: Batch, seed: int, scale: str, estimator: str) -> None:
    rewards = with_gaps(sides.random_rewards(batch, seed, num_functions=2), seed)
    found = trl_scored(batch, rewards, scale_rewards=scale)["advantages"]
    close(found, sides.our_advantages(batch, rewards, estimator, epsilon=TRL_EPSILON))


def test_batch_scale_equals_batch_std_of_equal_means(batch: Batch, seed: int) -> None:
    """By definition TRL divides by the rewards' spread, ours by that of r − mean_g: one where groups share a mean."""
    random = np.random.default_rng(seed)
    size = int((batch.groups == 0).sum())
    own = sides.random_rewards(batch, seed)[-size:, 0]
    shared = np.concatenate([random.permutation(own) for _ in range(len(batch.groups) // size)])[:, None]
    found = trl_scored(batch, shared, scale_rewards="batch")["advantages"]
    close(found, sides.our_advantages(batch, shared, "batch_std", epsilon=TRL_EPSILON))
    rewards = sides.random_rewards(batch, seed)
    found = trl_scored(batch, rewards, scale_rewards="batch")["advantages"]
    close(found * (rewards.std(ddof=1) + TRL_EPSILON), sides.our_advantages(batch, rewards, "dr_grpo"))


def test_rloo_advantages(batch: Batch, seed: int) -> None:
    rewards = with_gaps(sides.random_rewards(batch, seed), seed)
    completions = [[1] * n for n in batch.response_tokens]
    generated = ([[1]] * len(completions), completions, [""] * len(completions))
    with double_by_default():
        trainer = generating_trainer(batch, rewards, _generate=lambda prompts: generated)
        found = trl.RLOOTrainer._generate_and_score_completions(trainer, [{"prompt": ""}] * len(completions))
    close(found["advantages"], sides.our_advantages(batch, rewards, "rloo"))


def test_normalize_then_sum_equals_gdpo_over_samples(batch: Batch, seed: int) -> None:
    """GDPO (arXiv:2601.05242) whitens over samples, as TRL; with loss_tokens ours is weighted by them, as verl's."""
    rewards = with_gaps(sides.random_rewards(batch, seed, num_functions=2), seed)
    weights = torch.tensor([0.5, 2.0], dtype=torch.float64)
    found = trl_scored(batch, rewards, multi_objective_aggregation="normalize_then_sum", reward_weights=weights)
    settings = dict(epsilon=TRL_EPSILON, whiten="center_and_scale", function_weights=(0.5, 2.0))
    close(found["advantages"], sides.our_advantages(batch, rewards, "gdpo", **settings))


VOCABULARY = 11


def distilling_loss(logits, tokens, mask, teacher, student) -> torch.Tensor:
    from trl.experimental.iw_opd import IWOPDTrainer

    trainer = SimpleNamespace(
        temperature=1.0, iw_opd_epsilon=1e-8, iw_opd_gamma=0.0, model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    given = (logits, tokens, torch.where(mask, tokens, -100), teacher, student)
    return IWOPDTrainer._compute_iw_opd_loss(trainer, *given, num_items_in_batch=mask.sum())


@pytest.mark.parametrize("policy", ["reinforce", "importance_sampling", "ppo"])
def test_distillation_equals_the_reverse_kl_per_token(batch: Batch, seed: int, policy: str) -> None:
    """Value (of ``reinforce``) and gradient by every logit, γ = 0; on-policy the three terms have one gradient."""
    random = torch.Generator().manual_seed(seed)
    shape, mask = batch.mask.shape, batch.mask
    tokens = torch.randint(0, VOCABULARY, shape, generator=random)
    logits = torch.randn(*shape, VOCABULARY, generator=random, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(*shape, VOCABULARY, generator=random, dtype=torch.float64).log_softmax(-1)
    of_teacher = teacher.gather(-1, tokens[..., None])[..., 0]
    logprobs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    old = logprobs.detach()
    found = distilling_loss(logits, tokens, mask, of_teacher, old)
    (wanted,) = torch.autograd.grad(found, logits)

    inside = batch.inside
    flat = [x[inside].numpy() for x in (old, of_teacher, mask)]
    advantages = distillation_advantages(*flat, batch.response_tokens, discount=0.0)
    count = int(mask.sum())
    chosen = mask[inside]
    given = SimpleNamespace(
        num_sequences=shape[0],
        sequences=torch.from_numpy(np.repeat(np.arange(shape[0]), batch.response_tokens))[chosen],
        advantages=torch.from_numpy(advantages)[chosen] / count,
        weights=torch.full((count,), 1 / count, dtype=torch.float64), old_logprobs=old[inside][chosen],
        rollout_logprobs=old[inside][chosen], reference_logprobs=None, kl_coefficient=None, measured=None,
    )  # fmt: skip
    own = logprobs[inside][chosen]
    loss, _ = Objective(LossConfig(policy=policy)).policy(given, own, torch.zeros_like(own))
    close(torch.autograd.grad(loss, logits)[0], wanted)
    if policy == "reinforce":
        close(loss, found)
