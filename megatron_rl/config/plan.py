"""The section of the plan: how samples with signal are cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.checks import choose
from megatron_rl.config.ranges import Range


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Cuts the samples with signal into micro-batches.

    The cut goes by a prior on a micro-batch's cost, so that a run repeats to the bit. Under `plan.calibrate` it goes by
    measured times: two runs may then be cut differently, and agree to rounding, not to the bit.
    """

    max_tokens_per_microbatch: Annotated[int, Range(1)] = 8192
    """Tokens of a micro-batch at most, pads included."""
    samples_per_microbatch: Annotated[int, Range(1)] | None = None
    """Fixed number of samples of a micro-batch instead of the token cap; null: the token cap."""
    share_prompts: bool | None = None
    """Whether samples of a micro-batch that have one prompt run it once; null: where that is exact and can be done."""
    repack: bool = True
    """true: cut after the drop; false: cut before it, remove whole micro-batches only, bitwise the dense gradient."""
    microbatch_overhead_tokens: Annotated[int, Range(0)] = 256
    """A micro-batch's fixed cost in tokens, before anything was measured; it sets how many a pipeline gets."""
    on_long_sample: str = "own_microbatch"
    """For a sample above the token cap: `own_microbatch` gives it one to itself; `fail` is an error that names it."""
    calibrate: bool = False
    """Whether plans go by the time that micro-batches were measured to take (`cost/*` in the metrics)."""

    def __post_init__(self) -> None:
        choose("plan.on_long_sample", self.on_long_sample, ("own_microbatch", "fail"))
