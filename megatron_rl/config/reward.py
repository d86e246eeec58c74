"""The section ``reward``: the reward functions, their weights, and the processes that call them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl.config.checks import Range, choose
from megatron_rl.errors import ConfigError, quoted

REWARD_MODEL = "reward_model"  # the name in reward.functions of the model of reward.model_path


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Sets the reward functions, whose weighted sum is a sample's total reward.

    The total falls linearly by `reward.overlong_penalty` over the last
    `reward.overlong_buffer_tokens` tokens before `rollout.max_response_tokens` (DAPO, eq. 13;
    docs/semantics.md#overlong-responses). If `reward.on_error: drop` takes a sample out of its
    group, the group's statistics do not count it. Under `retry_sample` a failed sample is sampled
    again instead, so that the group keeps its size (docs/semantics.md#failed-samples).
    `reward.decided` ends samples early (docs/semantics.md#early-ends).
    """

    functions: tuple[str, ...] = ()
    """Any of `arithmetic`, `math_verify`, `reward_model`, `environment`, `module:function`, `./file.py:function`."""
    completions: str = "text"
    """`completions` of your own functions that take lists of samples: `text` or `messages` (docs/coming-from.md)."""
    model_path: str | None = None
    """For `reward_model`: folder of a classifier with one label (docs/supervised.md#reward-models); null: none."""
    weights: tuple[Annotated[float, Range(-(10**6), 10**6)], ...] = ()
    """Weight of each function in the total; `[]`: 1 each."""
    on_error: str = "fail"
    """If a reward function fails: `fail`: end the run; `drop`: drop the sample; `zero`: reward 0; `retry_sample`."""
    max_retries: Annotated[int, Range(1, 100)] = 2
    """With `on_error: retry_sample`: how often a failed sample is sampled again, before it is dropped."""
    error_warning_share: Annotated[float, Range(0, 1)] = 0.05
    """Fraction of a rollout's rewards that must fail for a warning; 0: one is enough. If all fail, the run ends."""
    num_workers: Annotated[int, Range(0, 1000)] = 0
    """Worker processes per rank that call the functions; as many again if calls take long; 0: the rank calls them."""
    deadline_s: Annotated[float, Range(0.1, 10**6)] = 30.0
    """Seconds that a worker may take for a sample; a late worker is replaced, and `reward.on_error` applies."""
    worker_environment: tuple[str, ...] = ()
    """Environment variables, such as an API key, that workers get beside a few harmless ones (docs/security.md)."""
    in_process: tuple[str, ...] = ()
    """Functions of `reward.functions` that the rank calls itself, not in a worker, such as one that holds a model."""
    overlong_buffer_tokens: Annotated[int, Range(0, 10**8)] = 0
    """Number of tokens before `rollout.max_response_tokens` over which the total reward falls linearly; 0: none."""
    overlong_penalty: Annotated[float, Range(0, 10**6)] = 1.0
    """Reward that is subtracted from a response of `rollout.max_response_tokens` tokens."""
    decided: str | None = None
    """Your `module:function` that ends a sample once its reward is fixed (docs/your-own.md#early-ends); null: none."""
    decided_every_tokens: Annotated[int, Range(1, 10**6)] = 16
    """After every this many tokens of a sample `reward.decided` is asked."""

    def __post_init__(self) -> None:
        choose("reward.on_error", self.on_error, ("fail", "drop", "zero", "retry_sample"))
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
                f"reward.num_workers={self.num_workers}; set reward.num_workers=0, or leave a function to the workers"
            )

    @property
    def num_retries(self) -> int:
        """Return how often a sample is sampled again on which a reward function failed; 0: never."""
        return self.max_retries if self.on_error == "retry_sample" else 0

    @property
    def resolved_weights(self) -> tuple[float, ...]:
        return self.weights or (1.0,) * len(self.functions)
