"""The check of ``rollout.group_sizes=adaptive``: what keeps its expected gradient equal to that of equal groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.config import RolloutConfig, TrainConfig

UNBIASED = ("rloo", "dr_grpo")


def adaptive_sizes(rollout: RolloutConfig, train: TrainConfig, estimator: str, denominator: str) -> str | None:
    """Return an error message if adaptive group sizes would change the expected gradient, or do not fit, else None.

    estimator, denominator: ``advantage.estimator`` and ``loss.denominator``.
    """
    key, mean = "rollout.group_sizes=adaptive", rollout.samples_per_prompt
    least, most = rollout.adaptive_groups.min_samples, rollout.largest_group
    if estimator not in UNBIASED:
        return (
            f"{key} with advantage.estimator={estimator}: the expected advantage of that estimator depends on the "
            f"number of samples of a group, so the gradient would be biased; take one of {', '.join(UNBIASED)}, or "
            "rollout.group_sizes=fixed"
        )
    if denominator == "kept":
        return (
            f"{key} with loss.denominator=kept: how many samples are kept depends on the sizes of the groups, so the "
            "gradient would be biased; set loss.denominator=original"
        )
    if rollout.dynamic_sampling.max_rounds:
        return (
            f"{key} with rollout.dynamic_sampling.max_rounds={rollout.dynamic_sampling.max_rounds}: whether a group is "
            "replaced depends on its size, so the gradient would be biased; set one of them to fixed or 0"
        )
    if not least <= mean <= most:
        return (
            f"rollout.samples_per_prompt={mean} must be from rollout.adaptive_groups.min_samples={least} to "
            f"rollout.adaptive_groups.max_samples={most}, since it is the mean of what prompts get"
        )
    if train.samples_per_mini_batch is not None and train.samples_per_mini_batch % mean:
        return (
            f"train.samples_per_mini_batch={train.samples_per_mini_batch} must be a multiple of "
            f"rollout.samples_per_prompt={mean} under {key}, since a mini-batch has whole groups"
        )
    return None
