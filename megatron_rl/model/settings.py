"""The settings that a model is built by, taken from a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from megatron_rl.config import Config, LoraConfig, MegatronConfig, ModelConfig, ParallelConfig, PlanConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Holds what the shape, the layers and their division over ranks depend on.

    seed: of the adapters' first weights. bitwise: whether log-probs are to be equal to the
        engine's, bit by bit.
    max_prompt_tokens, max_response_tokens: a sample's limits, by which layers are divided over
        stages.
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
        """Return the settings of a run's model."""
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
