"""What is done about the engine's log-probs not being the trainer's. Semantics §7."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.checks import at_least, choose
from megatron_rl.errors import ConfigError

CORRECTIONS = (
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
)


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """``old_logprobs``: ``recompute`` by the trainer over the survivors, or the engine's own (``rollout``).

    ``mode``: importance weights π_old/μ per token, per sequence (product) or per sequence's geometric mean, kept within
        ``floor`` and
    ``cap``: ``truncate`` moves what is outside to the bound, ``mask`` sets it to 0. ``off_policy_delta``: in nats, see
        algorithm/importance.py.
    """

    old_logprobs: str = "recompute"
    mode: str = "none"
    cap: float = 2.0
    floor: float | None = None
    off_policy_delta: float | None = None

    def __post_init__(self) -> None:
        choose("correction.old_logprobs", self.old_logprobs, ("recompute", "rollout"))
        choose("correction.mode", self.mode, CORRECTIONS)
        at_least("correction.cap", self.cap, 1.0)  # 1 is the weight of a token on which engine and trainer agree
        at_least("correction.floor", self.floor, 0.0, exclusive=True)
        if self.floor is not None and self.floor > 1.0:
            raise ConfigError(
                f"correction.floor={self.floor} is above 1, the weight of a token on which engine and trainer agree; "
                "lower it, or null"
            )
        if self.floor is not None and self.mode == "none":
            raise ConfigError(
                f"correction.floor={self.floor} bounds the weights of correction.mode, which is none; choose one, or "
                "set null"
            )
        self._refuse_blind()

    def _refuse_blind(self) -> None:
        if self.old_logprobs != "rollout" or not self.is_on:
            return
        asked = [f"correction.mode={self.mode}"] * (self.mode != "none")
        asked += [f"correction.off_policy_delta={self.off_policy_delta}"] * (self.off_policy_delta is not None)
        back = ["correction.mode=none"] * (self.mode != "none") + ["correction.off_policy_delta=null"] * (
            self.off_policy_delta is not None
        )
        raise ConfigError(
            "correction.old_logprobs=rollout takes the engine's log-probs for the trainer's, so that log π_old − log "
            f"μ is 0 and {' and '.join(asked)} would correct nothing; either set correction.old_logprobs=recompute, "
            f"or {' and '.join(back)}"
        )

    @property
    def is_on(self) -> bool:
        """Whether anything is weighed or masked, so that log-probs decide what has signal."""
        return self.mode != "none" or self.off_policy_delta is not None
