"""The section of rewards: the functions, their weights, and the processes that call them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.checks import Range, choose
from megatron_rl.errors import ConfigError, quoted

REWARD_MODEL = "reward_model"  # of reward.functions: the model of reward.model_path


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Adds weighted reward functions to a sample's total reward.

    The total falls linearly by `reward.overlong_penalty` over the last
    `reward.overlong_buffer_tokens` tokens before `rollout.max_response_tokens` (DAPO, eq. 13;
    docs/semantics.md#overlong-responses). A sample that `reward.on_error: drop` takes out of its
    group is in none of the group's statistics.
    """

    functions: tuple[str, ...] = ()
    """`arithmetic`, `math_verify`, `reward_model`, `environment`, `module:function` or `./file.py:function`."""
    completions: str = "text"
    """Form of completions for own functions of lists: `text`; `messages`, as TRL's (docs/coming-from.md)."""
    model_path: str | None = None
    """`reward_model`: folder of a sequence classifier of one label (docs/supervised.md#reward-models); null: none."""
    weights: tuple[Annotated[float, Range(-(10**6), 10**6)], ...] = ()
    """Weight of each function in the total; `[]`: 1 each."""
    on_error: str = "fail"
    """For a sample whose reward raises: `fail` ends the run; `drop` takes it out of its group; `zero` gives it 0."""
    error_warning_share: Annotated[float, Range(0, 1)] = 0.05
    """Share of a rollout's rewards that fail from which the log warns; if all fail, the run ends. 0: from the first."""
    num_workers: Annotated[int, Range(0, 1000)] = 0
    """Processes per rank that call the functions, a group each, up to twice as many if some are slow; 0: its own."""
    deadline_s: Annotated[float, Range(0.1, 10**6)] = 30.0
    """Seconds of a sample in a worker, which is then killed and replaced; only that sample meets `reward.on_error`."""
    worker_environment: tuple[str, ...] = ()
    """Environment variables that workers get beside the harmless ones, an API key's say (docs/security.md)."""
    in_process: tuple[str, ...] = ()
    """Those of `reward.functions` that the rank's own process calls all the same: one that holds a model, say."""
    overlong_buffer_tokens: Annotated[int, Range(0, 10**8)] = 0
    """Tokens before `rollout.max_response_tokens` over which the total reward falls linearly; 0: it does not."""
    overlong_penalty: Annotated[float, Range(0, 10**6)] = 1.0
    """Reward that a response of `rollout.max_response_tokens` tokens loses to the overlong buffer."""

    def __post_init__(self) -> None:
        choose("reward.on_error", self.on_error, ("fail", "drop", "zero"))
        choose("reward.completions", self.completions, ("text", "messages"))
        if self.weights and len(self.weights) != len(self.functions):
            raise ConfigError(
                f"reward.weights has {len(self.weights)} numbers and reward.functions {len(self.functions)} names; "
                "give one weight each"
            )
        if (REWARD_MODEL in self.functions) != (self.model_path is not None):
            raise ConfigError(
                f"reward.model_path={quoted(self.model_path, 300)} and "
                f"reward.functions={quoted(list(self.functions), 300)}: the function {REWARD_MODEL} scores by the "
                "model of that path; give both, or neither"
            )
        if REWARD_MODEL in self.functions and self.num_workers and REWARD_MODEL not in self.in_process:
            raise ConfigError(
                f"reward.num_workers={self.num_workers} would load a reward model in each worker, which has no device; "
                f"name it in reward.in_process=[{REWARD_MODEL}]"
            )
        for name in self.in_process:
            choose("reward.in_process", name, self.functions)
        if self.functions and self.num_workers and set(self.in_process) == set(self.functions):
            raise ConfigError(
                "reward.in_process names every one of reward.functions, which leaves nothing for "
                f"reward.num_workers={self.num_workers}; set that to 0, or leave a function to the workers"
            )

    @property
    def resolved_weights(self) -> tuple[float, ...]:
        return self.weights or (1.0,) * len(self.functions)
