"""The section ``correction``, on the gap between engine's and trainer's log-probs (docs/semantics.md §7)."""

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

    The importance weight π_old/μ multiplies the advantage. By `correction.mode` it is a token's
    ratio, the product of a sequence's ratios, or their geometric mean. A weight outside of
    [`correction.floor`, `correction.cap`] is moved to the bound (`truncate`) or set to 0 (`mask`). A
    sample whose weights are all 0 is dropped before its training pass.

    π_old is the trainer's policy at the rollout's start, and μ the engine's. A rollout's first
    optimizer step starts from the very model weights that give π_old. So the step's own log-probs,
    detached, serve as log π_old. Under `correction.old_logprobs: auto` no separate pass computes π_old
    for that step's samples, unless a setting needs π_old before the step (the log names it). Under
    `rollout` μ serves as π_old, and nothing is corrected.
    """

    old_logprobs: str = "auto"
    """π_old: `recompute`: by forward pass; `auto`: so, but a rollout's first step has its own; `rollout`: engine's."""
    mode: str = "none"
    """`none`, or KIND_ACTION: weight per `token`, `sequence`, `geometric` mean; out of bounds: `truncate` or `mask`."""
    cap: Annotated[float, Range(1)] = 2.0
    """Upper bound of the importance weight; a token on which engine and trainer agree has weight 1."""
    floor: Annotated[float, Range(0, 1, open_low=True)] | None = None
    """Lower bound of the importance weight, applied as `correction.mode` says; null: no lower bound."""
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
        """Return whether importance weights or off-policy masking are on.

        They can drop a sample because the engine's and the trainer's log-probs of it differ too much.
        """
        return self.mode != "none" or self.off_policy_delta is not None
