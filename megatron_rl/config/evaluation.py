"""The section ``eval``: the held-out sets, how they are sampled, and when they are evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from megatron_rl.config.checks import Range
from megatron_rl.errors import ConfigError, quoted


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluates held-out prompts, with the training data's columns, template and reward functions.

    All sets are evaluated together: before RL's first step, every `eval.every_rollouts` rollouts,
    and always at the end. The engines get the current weights before each evaluation, and
    `weight_sync.interval_steps` counts from that weight sync on.
    """

    path: str | None = None
    """Data set of held-out prompts, named as in `data.train`; more sets: `eval.sets`; null: none."""
    name: str = "test"
    """Name of the set of `eval.path`; a set's metrics are called `eval/<name>/...`."""
    sets: dict[str, str] = field(default_factory=dict)
    """Further evaluation sets, `{name: path}`."""
    every_rollouts: Annotated[int, Range(1)] | None = None
    """Number of rollouts between evaluations; null: none between the first and the last."""
    at_start: bool = True
    """Whether the sets are evaluated before RL's first step, after the supervised steps."""
    max_prompts: Annotated[int, Range(1)] | None = None
    """Number of prompts that are evaluated of each set, from its start; null: all."""
    samples_per_prompt: Annotated[int, Range(1, 10**5)] = 1
    """Number of samples of each prompt, k: metrics are mean@k, and pass@1, pass@2, pass@4 ... up to k."""
    temperature: Annotated[float, Range(0, 100)] = 0.0
    """Sampling temperature of evaluation; 0: greedy, with one sample per prompt."""
    reward_threshold: Annotated[float, Range(-(10**9))] = 1.0
    """Least total reward with which a sample counts as passed."""

    def __post_init__(self) -> None:
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ConfigError(
                f"eval.samples_per_prompt={self.samples_per_prompt} at eval.temperature=0 asks for one greedy sample "
                f"{self.samples_per_prompt} times; set eval.temperature above 0, to rollout.temperature say, or "
                "eval.samples_per_prompt=1"
            )
        if self.path is not None and self.name in self.sets:
            raise ConfigError(
                f"eval.name={quoted(self.name)} names both eval.path={quoted(self.path, 300)} and "
                f"eval.sets.{self.name}={quoted(self.sets[self.name], 300)}; rename one of them, or drop eval.path"
            )
        for name in self.named_sets:
            if not name or "/" in name:
                raise ConfigError(
                    f"{quoted(name)} cannot name an evaluation set: metrics are called eval/<name>/...; use a name "
                    "without '/'"
                )

    @property
    def named_sets(self) -> dict[str, str]:
        """Return {name: path} of every evaluation set, with the set of ``eval.path`` first."""
        return {**({} if self.path is None else {self.name: self.path}), **self.sets}
