"""The fields of vllm.EngineArgs for the engines that a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.config import LoraConfig, ModelConfig, RolloutConfig, WeightSyncConfig
from megatron_rl.config.lora import PROJECTIONS, VLLM_LORA_RANKS
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.engines.placement import shares_device
from megatron_rl.weights.config_json import parse_hf_config, read_fields
from megatron_rl.weights.families.register import family_of
from megatron_rl.weights.text_part import INNER, has_text_part


def engine_arguments(
    model: ModelConfig,
    rollout: RolloutConfig,
    weight_sync: WeightSyncConfig,
    lora: LoraConfig,
    *,
    max_prompt_tokens: int,
    seed: int,
    device: torch.device,
) -> dict[str, object]:
    """Return {field: value} of vllm.EngineArgs (0.32.0) for an engine that the run starts.

    The fields of ``rollout.vllm`` are added. They may replace defaults, such as ``max_model_len``.

    Raises ConfigError for settings that vLLM does not support on this device.
    """
    on_gpu = device.type == "cuda"
    if rollout.routing_replay == "rollout" and not on_gpu:
        raise ConfigError(
            "rollout.routing_replay=rollout wants experts from vLLM, whose builds for the CPU return none (0.32: "
            "Model Runner V2 requires Triton); set rollout.routing_replay=old_logprobs or off, or "
            "rollout.engine=transformers"
        )
    owned: dict[str, object] = {
        "model": model.hf_path,
        "skip_tokenizer_init": True,
        "dtype": model.dtype,
        "load_format": "dummy",  # the trainer sends the weights right after the start
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": "megatron_rl.rollout.weight_sync.receiver.Receiver",
        "weight_transfer_config": {"backend": "megatron_rl"},
        "tensor_parallel_size": rollout.tensor_parallel,
        "enable_return_routed_experts": rollout.routing_replay == "rollout",
        "enable_sleep_mode": shares_device(rollout, device),
    }
    if on_gpu:
        owned["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    longest = max_prompt_tokens + rollout.max_response_tokens
    defaults = {
        "max_model_len": longest,
        "enable_prefix_caching": True,
        "enforce_eager": not on_gpu,
        "disable_log_stats": True,
        "seed": seed,
        **({} if on_gpu else _on_cpu(longest)),
    }
    adapters = adapter_arguments(weight_sync, lora, model.dtype, on_gpu=on_gpu)
    arguments = owned | adapters | defaults | rollout.vllm
    if rollout.speculation != "off" or rollout.vllm.get("speculative_config") is not None:
        from megatron_rl.rollout.vllm.speculation import speculative_arguments

        sleeps = shares_device(rollout, device)
        arguments |= speculative_arguments(rollout, model.hf_path, longest, on_gpu=on_gpu, sleeps=sleeps)
    return arguments


def family_arguments(hf_path: str) -> dict[str, object]:
    """Return {field: value} of vllm.EngineArgs that make vLLM compute as the model's config.json says.

    The result is empty for a model family that needs no such field. ``hf_path``: the model's
    folder.
    """
    fields = read_fields(hf_path)
    family = family_of(fields.get("model_type"))
    own = {} if family is None else family.engine_arguments(fields)
    return own | (text_part_arguments(fields) if has_text_part(hf_path) else {})


def text_part_arguments(fields: Mapping[str, Any]) -> dict[str, object]:
    """Return {field: value} of vllm.EngineArgs by which vLLM builds a vision-language model's text part alone.

    The trainer sends the tensors of this part. Not run: vLLM's code of such models wants torchvision,
    which its build for the CPU does not bring.

    fields: the text part's fields (``read_fields``).
    """
    tied = {INNER: {"tie_word_embeddings": bool(fields.get("tie_word_embeddings"))}}
    return {"hf_overrides": {"architectures": fields["architectures"]} | tied}


def latent_arguments(model: ModelConfig, device: torch.device) -> dict[str, object]:
    """Return {field: value} of vllm.EngineArgs for latent attention on a CPU in another dtype than bfloat16; else {}.

    On a CPU with AMX, vLLM 0.32 chooses an attention kernel that computes only in bfloat16, even
    for other dtypes (platforms/cpu.py, amx_mla.py). The field chooses another kernel.
    """
    takes_any = device.type == "cuda" or model.dtype == "bfloat16"
    if takes_any or not read_fields(model.hf_path).get("kv_lora_rank"):
        return {}
    return {"attention_backend": "CPU_MLA"}


def delta_arguments(
    model: ModelConfig, rollout: RolloutConfig, weight_sync: WeightSyncConfig, device: torch.device
) -> dict[str, object]:
    """Return {field: value} of vllm.EngineArgs that a model with gated delta nets needs; {} for any other model.

    On a CPU vLLM 0.32 (mamba/ops/cpu/gdn_attention.py) computes delta nets in bfloat16, with heads of 64
    or 128 and a convolution over 4 tokens. It keeps states for the prefix cache only if prompts are
    prefilled in chunks, which engines on a CPU do not (``_on_cpu``).

    Raises ConfigError for adapters apart from the weights, and for what vLLM cannot compute on a CPU.
    """
    fields = read_fields(model.hf_path)
    family = family_of(fields.get("model_type"))
    if family is None or family.delta_layer is None:
        return {}
    name = family.model_type
    if weight_sync.adapters == "alone":
        raise ConfigError(
            f"weight_sync.adapters=alone: vLLM was not shown to compute adapters in a {name} model, which has gated "
            "delta nets; set weight_sync.adapters=merged"
        )
    if device.type == "cuda":
        return {}
    if model.dtype != "bfloat16":
        raise ConfigError(
            f"model.dtype={model.dtype} with rollout.engine=vllm: on a CPU vLLM computes gated delta nets ({name}) in "
            "bfloat16 alone; set model.dtype=bfloat16, or rollout.engine=transformers"
        )
    config = parse_hf_config(model.hf_path)
    keys, values, tokens = (
        getattr(config, f"linear_{x}") for x in ("key_head_dim", "value_head_dim", "conv_kernel_dim")
    )
    if keys != values or keys not in (64, 128) or tokens != 4:
        raise ConfigError(
            f"{model.hf_path} has linear_key_head_dim={keys}, linear_value_head_dim={values} and "
            f"linear_conv_kernel_dim={tokens}; on a CPU vLLM computes gated delta nets with heads of 64 or 128, equal "
            "for keys and values, and a convolution over 4 tokens; set rollout.engine=transformers"
        )
    if rollout.speculation != "off" or rollout.vllm.get("speculative_config") is not None:
        raise ConfigError(
            f"rollout.speculation={rollout.speculation} on a CPU: vLLM was not shown to take back the state of gated "
            f"delta nets ({name}) after a rejected token there; set rollout.speculation=off and no speculative_config"
        )
    if rollout.vllm.get("enable_prefix_caching"):
        raise ConfigError(
            f"rollout.vllm.enable_prefix_caching=true: on a CPU vLLM has no prefix cache for gated delta nets ({name}) "
            "unless prompts are prefilled in chunks, which loses samples' seeds there; leave it out"
        )
    return {"enable_prefix_caching": False}


def adapter_arguments(
    weight_sync: WeightSyncConfig, lora: LoraConfig, dtype: str, *, on_gpu: bool
) -> dict[str, object]:
    """Return {field: value} of vllm.EngineArgs for an engine that gets LoRA adapters apart from the weights.

    The result is empty if the trainer merges the adapters into the weights
    (``weight_sync.adapters=merged``).

    Raises ConfigError for float32 on a GPU, where vLLM's adapters compute in 16 bits.
    """
    if weight_sync.adapters == "merged":
        return {}
    if on_gpu and dtype == "float32":
        raise ConfigError(
            "weight_sync.adapters=alone with model.dtype=float32: vLLM's adapters compute in 16 bits on a GPU "
            "(lora/ops/triton_ops/lora_shrink_op.py, 0.32.0); set model.dtype=bfloat16, or weight_sync.adapters=merged"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": next(most for most in VLLM_LORA_RANKS if most >= lora.rank),
        "lora_dtype": "auto",
        "lora_target_modules": [name for target in lora.targets for name in PROJECTIONS[target]],
    }


def _on_cpu(longest: int) -> dict[str, object]:
    """Return {field: value} of vllm.EngineArgs that an engine needs on a CPU.

    Prompts are not prefilled in chunks. For a chunked prompt, vLLM (0.32.0) rewinds a sample's
    random generator. torch's CPU generator cannot do that, and the engine dies. The block size of
    the KV cache is 32, since the default of 128 tokens would keep short prompts out of the prefix
    cache.

    longest: the maximum of tokens of a prompt and its response together.
    """
    return {"block_size": 32, "enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, longest)}
