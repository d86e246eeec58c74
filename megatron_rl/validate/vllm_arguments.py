"""The arguments of vLLM's engines that the run itself gives, and the ranks of adapters that its engines hold."""

from __future__ import annotations

from megatron_rl.config import Config
from megatron_rl.errors import ConfigError, quoted

OWNED_ARGUMENTS = {
    "model": "model.hf_path",
    "tokenizer": "model.tokenizer_path",
    "skip_tokenizer_init": "token ids travel, never texts",
    "dtype": "model.dtype",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "logprobs_mode": "log-probs are at the sampling temperature",
    "worker_extension_cls": "it takes the weights",
    "weight_transfer_config": "weight_sync.channel",
    "enable_sleep_mode": "rollout.sleep",
    "generation_config": "rollout.temperature",
    "load_format": "weights come by weight_sync",
    "enable_return_routed_experts": "rollout.routing_replay",
    "enable_lora": "weight_sync.adapters",
    "max_loras": "weight_sync.adapters",
    "max_cpu_loras": "weight_sync.adapters",
    "max_lora_rank": "lora.rank",
    "lora_dtype": "model.dtype",
    "lora_target_modules": "lora.targets",
}
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that its engines can be built for (config/lora.py, 0.32.0)


def check_vllm_arguments(config: Config) -> None:
    """Raise ConfigError for an argument of ``rollout.vllm`` that another setting decides."""
    for name, value in config.rollout.vllm.items():
        if name in OWNED_ARGUMENTS:
            raise ConfigError(
                f"rollout.vllm.{name}={quoted(value)} may not be set there: {OWNED_ARGUMENTS[name]} decides it"
            )
