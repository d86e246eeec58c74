"""The settings that decide how a model is built, taken from a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from megatron_rl.config import Config, LoraConfig, MegatronConfig, ModelConfig, ParallelConfig, PlanConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Holds the settings that decide a model's shape, its layers and their division over ranks.

    seed: the seed of the adapters' initial weights.
    bitwise: whether log-probs must equal the rollout engine's bit by bit (``rollout.bitwise``).
    max_prompt_tokens, max_response_tokens: a sample's limits; the division of layers over pipeline
        stages depends on them.
    """

    model: ModelConfig
    lora: LoraConfig
    parallel: ParallelConfig
    megatron: MegatronConfig
    plan: PlanConfig
    deterministic: bool
    seed: int
    bitwise: bool
    max_prompt_tokens: int
    max_response_tokens: int

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the settings of the model that a run's configuration describes."""
        return cls(
            model=config.model,
            lora=config.lora,
            parallel=config.parallel,
            megatron=config.megatron,
            plan=config.plan,
            deterministic=config.run.deterministic,
            seed=config.run.seed,
            bitwise=config.rollout.bitwise,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
        )
