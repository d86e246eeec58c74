"""The sections of what is trained: advantages, the loss, and what of a batch is skipped."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.checks import at_least, choose
from megatron_rl.errors import ConfigError

REDUCTIONS = ("token_sum", "token_mean", "sequence_mean", "sequence_sum_mean", "sequence_sum_norm", "prompt_mean")
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "batch_std", "rloo", "reinforce_plus_plus", "gdpo")
ESTIMATORS = (*GROUP_ESTIMATORS, "gae")
POLICIES = ("ppo", "gspo", "cispo", "importance_sampling", "dro", "reinforce")


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Semantics §6. ``epsilon`` is added to the standard deviation; ``noise_std`` to advantages, for the first
    ``noise_steps`` steps.

    ``whiten``: of ``reinforce_plus_plus``, ``gdpo`` and ``gae``. ``gamma``, ``lam``: the discount and λ of ``gae``.
    """

    estimator: str = "grpo"
    epsilon: float = 1e-6
    whiten: str = "scale"
    gamma: float = 1.0
    lam: float = 1.0
    noise_std: float = 0.0
    noise_steps: int = 0

    def __post_init__(self) -> None:
        choose("advantage.estimator", self.estimator, ESTIMATORS)
        choose("advantage.whiten", self.whiten, ("none", "scale", "center_and_scale"))
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"advantage.{name}={value} must be from 0 to 1 (1: nothing is discounted)")
        at_least("advantage.epsilon", self.epsilon, 0.0)
        at_least("advantage.noise_std", self.noise_std, 0.0)
        at_least("advantage.noise_steps", self.noise_steps, 0)
        if self.noise_std and not self.noise_steps:
            raise ConfigError(
                f"advantage.noise_std={self.noise_std} is added for the first advantage.noise_steps=0 steps, which is "
                "never; say how many"
            )


@dataclass(frozen=True, kw_only=True)
class SkipConfig:
    """Semantics §2 and §3: what is dropped, and what a step without signal does."""

    mode: str = "exact"
    steps: str = "match"
    ghost: str = "dense"
    advantage_epsilon: float = 0.0
    logprob_passes: bool = True

    def __post_init__(self) -> None:
        choose("skip.mode", self.mode, ("exact", "approximate", "off"))
        choose("skip.steps", self.steps, ("match", "merge"))
        choose("skip.ghost", self.ghost, ("dense", "freeze"))
        at_least("skip.advantage_epsilon", self.advantage_epsilon, 0.0)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Semantics §1 and §7. ``mask_truncated``: a sample that ``rollout.max_response_tokens`` cut off carries no loss
    token."""

    policy: str = "ppo"
    reduction: str = "token_mean"
    denominator: str = "original"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    dro_beta: float = 0.1
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    entropy_coefficient: float = 0.0
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        choose("loss.policy", self.policy, POLICIES)
        choose("loss.reduction", self.reduction, REDUCTIONS)
        choose("loss.denominator", self.denominator, ("original", "kept"))
        choose("loss.kl_estimator", self.kl_estimator, ("k1", "k2", "k3", "unbiased"))
        at_least("loss.clip_low", self.clip_low, 0.0)
        at_least("loss.clip_high", self.clip_high, 0.0)
        at_least("loss.kl_coefficient", self.kl_coefficient, 0.0)
        if self.dual_clip is not None and self.policy != "ppo":
            raise ConfigError(
                f"loss.dual_clip={self.dual_clip} belongs to loss.policy=ppo and the policy is {self.policy}; set it "
                "to null"
            )
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ConfigError(f"loss.dual_clip={self.dual_clip} must be above 1 (3 is usual), or null")
