"""The sections ``advantage``, ``skip`` (which samples are dropped) and ``loss``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_rl.config.checks import Range, choose, choose_or_own
from megatron_rl.errors import ConfigError
from megatron_rl.users_code import is_own

REDUCTIONS = ("token_sum", "token_mean", "sequence_mean", "sequence_sum_mean", "sequence_sum_norm", "prompt_mean")
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "batch_std", "rloo", "reinforce_plus_plus", "gdpo")
ESTIMATORS = (*GROUP_ESTIMATORS, "gae", "distillation")
POLICIES = ("ppo", "gspo", "cispo", "importance_sampling", "dro", "reinforce")


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Turns rewards, or under `distillation` a teacher's log-probs, into advantages (docs/semantics.md#6-advantages).

    `gae` needs a critic (docs/ppo.md), `distillation` a teacher (docs/supervised.md#on-policy-distillation).
    Only `reinforce_plus_plus`, `gdpo` and `gae` whiten advantages. `advantage.noise_std` adds Gaussian noise to
    the non-zero advantages, for comparisons and not for training (docs/skip.md#the-loss-is-0-and-it-learns).
    """

    estimator: str = "grpo"
    """`grpo`, `dr_grpo`, `batch_std`, `rloo`, `reinforce_plus_plus`, `gdpo`, `gae`, `distillation`, or your own."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of an estimator of your own, by name (docs/your-own.md)."""
    moves_equal_rewards: bool = False
    """Whether your own estimator may give a group of equal rewards non-zero advantages; if so, it gets those groups."""
    epsilon: Annotated[float, Range(0, 1)] = 1e-6
    """ε, added to a standard deviation (unbiased, n − 1) before a division by it."""
    whiten: str = "scale"
    """Whitening: `scale`: divide by σ, so zeros stay 0; `center_and_scale`: (A − mean) / σ, as published; `none`."""
    gamma: Annotated[float, Range(0, 1)] = 1.0
    """`gae`: discount γ over loss tokens; 1: no discount."""
    lam: Annotated[float, Range(0, 1)] = 1.0
    """`gae`: λ of the advantages' recursion over loss tokens."""
    noise_std: Annotated[float, Range(0, 10**6)] = 0.0
    """Standard deviation of the noise on advantages; 0: no noise."""
    noise_steps: Annotated[int, Range(0)] = 0
    """A rollout's advantages get noise if RL took fewer optimizer steps than this before the rollout; 0: no noise."""

    def __post_init__(self) -> None:
        choose_or_own("advantage.estimator", self.estimator, ESTIMATORS)
        choose("advantage.whiten", self.whiten, ("none", "scale", "center_and_scale"))
        for name, value in (("arguments", self.arguments), ("moves_equal_rewards", self.moves_equal_rewards)):
            if value and not is_own(self.estimator):
                raise ConfigError(
                    f"advantage.{name}={value} belongs to an estimator of your own, and advantage.estimator="
                    f"{self.estimator} is built in; leave it out"
                )
        if self.noise_std and not self.noise_steps:
            raise ConfigError(
                f"advantage.noise_std={self.noise_std} has no effect with advantage.noise_steps=0; set "
                "advantage.noise_steps to the number of steps with noise"
            )


@dataclass(frozen=True, kw_only=True)
class SkipConfig:
    """Decides which samples are dropped, and what an optimizer step does if all its samples are dropped.

    Such a step is called a ghost step. docs/skip.md#what-is-lossless-when tells when a run equals the
    same run without drops.
    """

    mode: str = "exact"
    """Drops: `exact`: samples whose gradient is provably 0; `approximate`: samples of zero advantage; `off`: none."""
    steps: str = "match"
    """Optimizer steps if samples are dropped: `match`: as many as without drops; `merge`: one per rollout and epoch."""
    ghost: str = "dense"
    """If all samples of a step are dropped: `dense`: step on a zero gradient, as without drops; `freeze`: no step."""
    advantage_epsilon: Annotated[float, Range(0, 10**6)] = 0.0
    """`approximate`: an advantage of at most this size counts as zero."""
    logprob_passes: bool = True
    """Whether dropped samples are left out of log-prob passes too."""
    merge_repeats: bool = True
    """Whether of a step's equal samples of a group one runs, and counts as often as there are (docs/skip.md)."""

    def __post_init__(self) -> None:
        choose("skip.mode", self.mode, ("exact", "approximate", "off"))
        choose("skip.steps", self.steps, ("match", "merge"))
        choose("skip.ghost", self.ghost, ("dense", "freeze"))


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Sums the policy term, the KL and the entropy over loss tokens (docs/semantics.md#1-the-loss-is-a-token-sum).

    The ratio π_θ/π_old is clipped to [1 − `loss.clip_low`, 1 + `loss.clip_high`] by `ppo`, `gspo`
    and `cispo`. `loss.mask_truncated` is DAPO's overlong filtering
    (docs/semantics.md#overlong-responses).
    """

    policy: str = "ppo"
    """Policy term: `ppo`, `gspo`, `cispo`, `importance_sampling`, `dro`, `reinforce`, or your own `module:function`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of a policy term of your own, by name (docs/your-own.md)."""
    reduction: str = "token_mean"
    """A token's weight in the loss: `token_mean`, `token_sum`, `prompt_mean`, `sequence_{mean,sum_mean,sum_norm}`."""
    denominator: str = "original"
    """Samples that count in the reduction's divisor: `original`: all before the drop; `kept`: those not dropped."""
    clip_low: Annotated[float, Range(0, 1000)] = 0.2
    """Distance from 1 of the lower bound of the ratio π_θ/π_old."""
    clip_high: Annotated[float, Range(0, 1000)] = 0.2
    """Distance from 1 of the upper bound of the ratio π_θ/π_old."""
    dual_clip: Annotated[float, Range(1, 1000, open_low=True)] | None = None
    """`ppo`: c > 1 (3 is usual): for A < 0 the loss is at most −cA; null: no such bound."""
    dro_beta: Annotated[float, Range(0, 1000)] = 0.1
    """`dro`: β of the quadratic β/2 · (log π_θ − log μ)²."""
    kl_coefficient: Annotated[float, Range(0, 1000)] = 0.0
    """β of the KL to the reference, the policy at RL's start (docs/ppo.md#the-reference-policy); 0: no KL."""
    kl_estimator: str = "k3"
    """Estimator of the KL: `k1`, `k2`, `k3`, or `unbiased`: π_θ/π_old times `k3`."""
    entropy_coefficient: Annotated[float, Range(-100, 100)] = 0.0
    """Coefficient of the entropy bonus; 0: none."""
    mask_truncated: bool = False
    """Whether responses cut off at `rollout.max_response_tokens` have no loss; their rewards still count."""

    def __post_init__(self) -> None:
        choose_or_own("loss.policy", self.policy, POLICIES)
        if self.arguments and not is_own(self.policy):
            raise ConfigError(
                f"loss.arguments={self.arguments} belongs to a policy term of your own, and loss.policy={self.policy} "
                "is built in; leave it out"
            )
        choose("loss.reduction", self.reduction, REDUCTIONS)
        choose("loss.denominator", self.denominator, ("original", "kept"))
        choose("loss.kl_estimator", self.kl_estimator, ("k1", "k2", "k3", "unbiased"))
        if self.dual_clip is not None and self.policy != "ppo":
            raise ConfigError(
                f"loss.dual_clip={self.dual_clip} belongs to loss.policy=ppo and the policy is {self.policy}; set it "
                "to null"
            )
