"""The section of corrections for the gap between the engine's and the trainer's log-probs. Semantics §7."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.checks import Range, choose
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
    """Corrects for the gap between the engine's and the trainer's log-probs (docs/semantics.md#7-corrections).

    The importance weight π_old/μ multiplies the advantage. It is a token's ratio, a sequence's
    product of ratios, or a sequence's geometric mean of ratios. Outside of [`correction.floor`,
    `correction.cap`] it is moved to the bound (`truncate`) or set to 0 (`mask`). A sample whose
    weights are all 0 is dropped before the forward pass.

    A rollout's first optimizer step runs at the model weights of a log-prob pass before it. So the
    step's own log-probs, detached, are its π_old. Under `correction.old_logprobs: auto` the samples
    of that step get no pass, unless a setting needs π_old before the step (the log names it). Under
    `rollout` π_old is the engine's μ, and nothing is corrected.
    """

    old_logprobs: str = "auto"
    """π_old: `recompute`: a pass over the survivors; `auto`: the same, less the first step; `rollout`: the engine's."""
    mode: str = "none"
    """`none`, or the weight and its bound, as above: `{token,sequence,geometric}_{truncate,mask}`."""
    cap: Annotated[float, Range(1)] = 2.0
    """Upper bound of the weight; a token on which engine and trainer agree has weight 1."""
    floor: Annotated[float, Range(0, 1, open_low=True)] | None = None
    """Lower bound of the weight; null: none."""
    off_policy_delta: Annotated[float, Range(0, 10**6)] | None = None
    """δ in nats: samples with A < 0 and mean log μ − log π_old > δ are dropped (DeepSeek-V3.2, eq. 9); null: none."""

    def __post_init__(self) -> None:
        choose("correction.old_logprobs", self.old_logprobs, ("auto", "recompute", "rollout"))
        choose("correction.mode", self.mode, CORRECTIONS)
        if self.floor is not None and self.mode == "none":
            raise ConfigError(
                f"correction.floor={self.floor} has no effect with correction.mode=none; choose another mode, or "
                "set correction.floor=null"
            )
        self._refuse_blind()

    def _refuse_blind(self) -> None:
        if self.old_logprobs != "rollout" or not self.is_on:
            return
        settings = [f"correction.mode={self.mode}"] * (self.mode != "none")
        settings += [f"correction.off_policy_delta={self.off_policy_delta}"] * (self.off_policy_delta is not None)
        neutral = ["correction.mode=none"] * (self.mode != "none") + ["correction.off_policy_delta=null"] * (
            self.off_policy_delta is not None
        )
        raise ConfigError(
            "correction.old_logprobs=rollout takes the engine's log-probs for the trainer's, so that log π_old − log "
            f"μ is 0 and {' and '.join(settings)} would correct nothing; either set correction.old_logprobs=recompute, "
            f"or {' and '.join(neutral)}"
        )

    @property
    def is_on(self) -> bool:
        """Return whether samples are weighed or masked, so that log-probs decide which samples have signal."""
        return self.mode != "none" or self.off_policy_delta is not None
