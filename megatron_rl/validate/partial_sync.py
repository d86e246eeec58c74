"""The settings with which less than all weights may travel (weight_sync.delta, weight_sync.adapters)."""

from __future__ import annotations

from megatron_rl.config import Config
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.validate.vllm_arguments import VLLM_LORA_RANKS


def check_delta(config: Config) -> None:
    """Raise ConfigError where changed weights alone are to travel to an engine in the trainer's own process."""
    if config.weight_sync.delta and config.rollout.engine != "vllm":
        raise ConfigError(
            f"weight_sync.delta=true sends vLLM engines what changed, and rollout.engine={config.rollout.engine} reads "
            "the weights in the trainer's own process; set weight_sync.delta=false, or take rollout.engine=vllm"
        )
    if config.weight_sync.delta and config.weight_sync.adapters == "alone":
        raise ConfigError(
            "weight_sync.delta=true and weight_sync.adapters=alone both send less than all weights, and adapters "
            "change in every value; set weight_sync.delta=false, or weight_sync.adapters=merged"
        )


def check_adapters_alone(config: Config) -> None:
    """Raise ConfigError where ``weight_sync.adapters=alone`` has no adapters, or engines that cannot hold them."""
    rank, rollout, most = config.lora.rank, config.rollout, max(VLLM_LORA_RANKS)
    if config.weight_sync.adapters == "merged":
        return
    if rank is None or rollout.engine != "vllm":
        raise ConfigError(
            "weight_sync.adapters=alone sends adapters to vLLM engines, and lora.rank="
            f"{'null' if rank is None else rank}, rollout.engine={rollout.engine}; set both, or "
            "weight_sync.adapters=merged"
        )
    if rollout.servers:
        raise ConfigError(
            f"weight_sync.adapters=alone and rollout.servers={quoted(list(rollout.servers))}: a vLLM server takes "
            "adapters from files of its own host alone, by name; use engines of the run's own, or set "
            "weight_sync.adapters=merged"
        )
    if rank > most:
        raise ConfigError(
            f"lora.rank={rank} is more than vLLM's engines hold, {most}; lower it, or set weight_sync.adapters=merged"
        )
