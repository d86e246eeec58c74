"""The sections of optimizer steps: the policy's optimizer, and the plan that cuts a step into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.checks import Range, choose

Decay = Annotated[float, Range(0, 1, open_high=True)]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Runs AdamW under a schedule: linear warm-up, then constant, or cosine or linear down to `optimizer.min_lr`."""

    lr: Annotated[float, Range(0, 10)] = 1e-6
    """Learning rate after the warm-up."""
    min_lr: Annotated[float, Range(0, 10)] = 0.0
    """Learning rate at the end of the decay."""
    schedule: str = "constant"
    """`constant`, `cosine` or `linear`; the last two decay over `optimizer.decay_steps`."""
    warmup_steps: Annotated[int, Range(0)] = 0
    """Optimizer steps of linear warm-up, the first step already above 0."""
    decay_steps: Annotated[int, Range(1)] | None = None
    """Optimizer steps at whose end the rate is `optimizer.min_lr`; null: those of the run."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay of the first and the second moment."""
    epsilon: Annotated[float, Range(1e-20, 1)] = 1e-8
    """AdamW's ε, added to the root of the second moment."""
    weight_decay: Annotated[float, Range(0, 10)] = 0.0
    """AdamW's decoupled weight decay; biases and norms are not decayed (Megatron's habit)."""
    clip_grad: Annotated[float, Range(0)] = 1.0
    """Global norm that a larger gradient is scaled down to; 0: off."""
    kernel: str = "auto"
    """Adam of `transformer_engine`, `apex` or `torch`; `auto`: the first that can be imported; the choice is logged."""
    distributed: bool = True
    """Whether Megatron's distributed optimizer shards its state over data-parallel ranks."""
    on_nonfinite: str = "fail"
    """For a step whose gradient is not finite: `fail` ends the run; `skip`: it moves nothing, on all ranks."""

    def __post_init__(self) -> None:
        choose("optimizer.schedule", self.schedule, ("constant", "cosine", "linear"))
        choose("optimizer.kernel", self.kernel, ("auto", "transformer_engine", "apex", "torch"))
        choose("optimizer.on_nonfinite", self.on_nonfinite, ("fail", "skip"))


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Cuts the samples with signal into micro-batches.

    The cut goes by a prior on a micro-batch's cost, so that a run repeats to the bit. Under
    `plan.calibrate` it goes by measured times: two runs may then be cut differently, and agree to
    rounding, not to the bit.
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
