"""The section of evaluation: which held-out sets, how they are sampled, and when."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.config.checks import at_least
from megatron_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """``sets``: name → a JSONL of held-out prompts; ``path`` and ``name`` are the short form of one. Evaluated before
    RL's first step (``at_start``), every ``every_rollouts`` rollouts (null: never in between) and at the end.

    ``samples_per_prompt``: k of mean@k and the largest of pass@k. ``temperature`` 0: greedy. ``max_prompts``: of each
        set, its first.
    ``reward_threshold``: a sample counts as passed where its total reward is at least this.
    """

    path: str | None = None
    name: str = "test"
    sets: dict[str, str] = field(default_factory=dict)
    every_rollouts: int | None = None
    at_start: bool = True
    max_prompts: int | None = None
    samples_per_prompt: int = 1
    temperature: float = 0.0
    reward_threshold: float = 1.0

    def __post_init__(self) -> None:
        at_least("eval.every_rollouts", self.every_rollouts, 1)
        at_least("eval.max_prompts", self.max_prompts, 1)
        at_least("eval.samples_per_prompt", self.samples_per_prompt, 1)
        at_least("eval.temperature", self.temperature, 0.0)
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ConfigError(
                f"eval.samples_per_prompt={self.samples_per_prompt} at eval.temperature=0 asks for one greedy sample "
                f"{self.samples_per_prompt} times; set eval.temperature above 0, to rollout.temperature say, or "
                "eval.samples_per_prompt=1"
            )
        if self.path is not None and self.name in self.sets:
            raise ConfigError(
                f"eval.name={self.name!r} names both eval.path={self.path!r} and "
                f"eval.sets.{self.name}={self.sets[self.name]!r}; rename one of them, or drop eval.path"
            )
        for name in self.named_sets:
            if not name or "/" in name:
                raise ConfigError(
                    f"{name!r} cannot name an evaluation set: metrics are called eval/<name>/...; use a name without "
                    "'/'"
                )

    @property
    def named_sets(self) -> dict[str, str]:
        """Every set's path by its name, the short form's first."""
        return {**({} if self.path is None else {self.name: self.path}), **self.sets}
