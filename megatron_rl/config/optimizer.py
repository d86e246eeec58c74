"""The sections ``optimizer`` (the policy's AdamW or Muon) and ``plan`` (how samples are put into micro-batches)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.checks import Range, choose

Decay = Annotated[float, Range(0, 1, open_high=True)]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Sets AdamW or Muon and the schedule: a linear warm-up, then a constant rate or a decay to `optimizer.min_lr`."""

    algorithm: str = "adam"
    """`adam`: AdamW; `muon`: orthogonal momentum for weight matrices, AdamW for all other weights (docs/tuning.md)."""
    lr: Annotated[float, Range(0, 10)] = 1e-6
    """Learning rate after the warm-up."""
    min_lr: Annotated[float, Range(0, 10)] = 0.0
    """Learning rate at the end of the decay."""
    schedule: str = "constant"
    """Learning rate after the warm-up: `constant`; `cosine` or `linear`: decays over `optimizer.decay_steps`."""
    warmup_steps: Annotated[int, Range(0)] = 0
    """Number of optimizer steps of linear warm-up; the first step's rate is above 0."""
    decay_steps: Annotated[int, Range(1)] | None = None
    """Number of optimizer steps after which the rate is `optimizer.min_lr`; null: all steps of the run."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay of the first and the second moment."""
    epsilon: Annotated[float, Range(1e-20, 1)] = 1e-8
    """AdamW's ε, added to the root of the second moment."""
    momentum: Decay = 0.95
    """Muon's decay of the momentum; it is Nesterov's."""
    weight_decay: Annotated[float, Range(0, 10)] = 0.0
    """Decoupled weight decay of AdamW and Muon; as in Megatron-Core, biases and norms are not decayed."""
    clip_grad: Annotated[float, Range(0)] = 1.0
    """Global norm to which a larger gradient is scaled down; 0: off."""
    kernel: str = "auto"
    """Adam of `transformer_engine`, `apex` or `torch`; `auto`: the first that can be imported, which the log names."""
    distributed: bool = True
    """Whether Megatron's distributed optimizer shards the optimizer state over data-parallel ranks."""
    spread_masters: bool = False
    """Whether masters of bfloat16 files begin at random places that round to their weights (docs/tuning.md)."""
    on_nonfinite: str = "fail"
    """If a step's gradient is not finite: `fail`: end the run; `skip`: change no weight, on any rank."""

    def __post_init__(self) -> None:
        choose("optimizer.algorithm", self.algorithm, ("adam", "muon"))
        choose("optimizer.schedule", self.schedule, ("constant", "cosine", "linear"))
        choose("optimizer.kernel", self.kernel, ("auto", "transformer_engine", "apex", "torch"))
        choose("optimizer.on_nonfinite", self.on_nonfinite, ("fail", "skip"))


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Sets how the samples that are not dropped are packed into micro-batches.

    The packing depends on an assumed cost of micro-batches, so that a repeated run is bitwise equal.
    Under `plan.calibrate` it depends on measured times. Two runs may then pack differently, and agree
    up to rounding only.
    """

    max_tokens_per_microbatch: Annotated[int, Range(1)] = 8192
    """Largest number of tokens of a micro-batch, pads included."""
    samples_per_microbatch: Annotated[int, Range(1)] | None = None
    """Fixed number of samples of a micro-batch, in place of the token cap; null: the token cap."""
    share_prompts: bool | None = None
    """Whether a micro-batch runs the common prompt of several samples once; null: yes, unless a setting forbids it."""
    repack: bool = True
    """true: pack only kept samples; false: pack all, omit micro-batches with none kept: bitwise as without drops."""
    microbatch_overhead_tokens: Annotated[int, Range(0)] = 256
    """Assumed fixed cost of a micro-batch, in tokens; on a pipeline it decides how many micro-batches a plan has."""
    on_long_sample: str = "own_microbatch"
    """For a sample above the token cap: `own_microbatch` runs it alone in a micro-batch; `fail` ends the run."""
    calibrate: bool = False
    """Whether plans use measured times of micro-batches (`cost/*` in the metrics)."""

    def __post_init__(self) -> None:
        choose("plan.on_long_sample", self.on_long_sample, ("own_microbatch", "fail"))
