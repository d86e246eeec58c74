"""Builds the engine that a run samples with, and decides which ranks start one; each rank makes the same calls."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.config import Config
from megatron_rl.config.lora import PROJECTIONS
from megatron_rl.distributed.weight_channel import LOOPBACK, choose_channel
from megatron_rl.errors import ConfigError, quoted
from megatron_rl.rollout.bitwise_engine import BitwiseEngine
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.transformers_engine import TransformersEngine, stop_tokens
from megatron_rl.rollout.vllm.engine import VllmEngine
from megatron_rl.rollout.vllm.process_replica import ProcessReplica, engine_environment
from megatron_rl.rollout.vllm.server_replica import ServerReplica
from megatron_rl.rollout.weight_sync.sender import WeightSender
from megatron_rl.validate.vllm_arguments import VLLM_LORA_RANKS
from megatron_rl.weights.config_json import read_fields
from megatron_rl.weights.families.register import family_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocation:
    """Locates a rank: its number in the world and on its node, and the number of ranks in each."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRole:
    """Describes a rank's part in the rollouts.

    share:  see RolloutWorker.
    starts: whether the rank starts an engine of its own.
    drives: whether the rank sends weights.
    """

    share: tuple[int, int] | None
    starts: bool
    drives: bool


def role_of(config: Config, location: RankLocation) -> EngineRole:
    """Return a rank's part in the rollouts. Raises ConfigError if the engines do not fit the ranks.

    Not a collective: every rank does the same arithmetic.
    """
    rollout = config.rollout
    if rollout.engine == "transformers":
        return EngineRole(share=(location.rank, location.world_size), starts=False, drives=True)
    if rollout.servers:
        return EngineRole(share=(location.rank, location.world_size), starts=False, drives=location.rank == 0)
    width = rollout.tensor_parallel
    engines = rollout.num_engines or location.world_size // width
    if engines * width > location.world_size or engines < 1:
        raise ConfigError(
            f"rollout.num_engines={rollout.num_engines} engines of rollout.tensor_parallel={width} need "
            f"{max(1, engines) * width} ranks and there are {location.world_size}; lower one of the two, or start more "
            "ranks"
        )
    if width > location.local_world_size:
        raise ConfigError(
            f"rollout.tensor_parallel={width} is more than the {location.local_world_size} ranks of a node; an engine "
            "stays on one"
        )
    # The ranks fall into equal slices, one per engine; the first ``width`` ranks of a slice are its engine's.
    number, rest = divmod(location.rank, location.world_size // engines)
    for engine in range(engines):
        first = engine * (location.world_size // engines) % location.local_world_size
        if first + width > location.local_world_size:
            raise ConfigError(
                f"engine {engine} of rollout.tensor_parallel={width} would begin at rank {first} of a node's "
                f"{location.local_world_size} and reach beyond it; take a width that divides a node's ranks, or fewer "
                "rollout.num_engines"
            )
    owns = rest == 0 and number < engines
    return EngineRole(share=(number, engines) if owns else None, starts=owns, drives=owns)


def shares_device(config: Config, device: torch.device) -> bool:
    """Return whether trainer and engine take turns on one GPU. Raises ConfigError if they must and share none."""
    rollout = config.rollout
    own_engines = rollout.engine == "vllm" and not rollout.servers
    if rollout.sleep == "always" and not (own_engines and device.type == "cuda"):
        raise ConfigError(
            "rollout.sleep=always needs a GPU that the trainer shares with engines of its own; use rollout.sleep=auto"
        )
    return own_engines and device.type == "cuda" and rollout.sleep != "never"


def refuse_sharing(config: Config, shared: bool) -> None:
    """Raise ConfigError if trainer and engine take turns on one GPU, and settings rule that out.

    Such settings have the engines generate while the trainer trains, or keep weights that an engine drops asleep.
    """
    producer = config.rollout.producer
    if shared and config.weight_sync.adapters == "alone":
        raise ConfigError(
            "weight_sync.adapters=alone leaves the weights beside the adapters in the engines, which drop them when "
            f"they sleep on a GPU that they share (rollout.sleep={config.rollout.sleep}); keep both in memory at once "
            "by rollout.sleep=never, or set weight_sync.adapters=merged"
        )
    if shared and (producer.ahead or producer.mode == "streaming"):
        raise ConfigError(
            f"rollout.producer.mode={producer.mode} generates while the trainer trains, and the engines share its GPUs "
            f"(rollout.sleep={config.rollout.sleep}); name engines on other GPUs by rollout.servers, keep both in "
            "memory at once by rollout.sleep=never, or set rollout.producer.mode=sync"
        )


def refuse_mixture(config: Config, num_experts: int) -> None:
    """Raise ConfigError if a mixture of experts is to take adapters apart from its weights."""
    if num_experts and config.weight_sync.adapters == "alone":
        raise ConfigError(
            f"weight_sync.adapters=alone and a model of {num_experts} experts, whose layers vLLM (0.32.0) prepares for "
            "adapters by GPU kernels even where they get none, which was not run; set weight_sync.adapters=merged"
        )


def refuse_delta(config: Config, shared: bool) -> None:
    """Raise ConfigError if only changed weights are to travel to engines that discard theirs, or quantize them."""
    if not config.weight_sync.delta:
        return
    if shared:
        raise ConfigError(
            "weight_sync.delta=true sends what changed, and engines that share the trainer's GPUs "
            f"(rollout.sleep={config.rollout.sleep}) discard their weights while they sleep; set "
            "weight_sync.delta=false, keep both in memory by rollout.sleep=never, or name engines on other GPUs by "
            "rollout.servers"
        )
    if quantization := config.rollout.vllm.get("quantization"):
        raise ConfigError(
            f"weight_sync.delta=true keeps engines at the trainer's bits, and rollout.vllm.quantization="
            f"{quoted(quantization)} gives them others; set weight_sync.delta=false, or drop the quantization"
        )


def place_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    location: RankLocation,
    device: torch.device,
    dtype: torch.dtype,
    vocab_size: int,
    has_trainer: bool = False,
) -> tuple[Engine, tuple[int, int] | None, bool]:
    """Build this rank's engine where the settings put it, and start it, without waiting until it serves.

    has_trainer: whether a trainer's log-probs are compared with the engine's, as ``rollout.bitwise`` asks.

    Returns the engine, this rank's share of the prompts, and whether trainer and engine take turns on one GPU. Raises
    ConfigError for engines that do not fit the ranks, or that cannot share the GPU as the settings ask.
    """
    role = role_of(config, location)
    shared = shares_device(config, device)
    refuse_sharing(config, shared)
    refuse_delta(config, shared)
    if config.rollout.bitwise:
        if not has_trainer:
            raise ConfigError(
                "rollout.bitwise=true compares a run's rollouts with its trainer, and the server has none; set it to "
                "false"
            )
        return BitwiseEngine(config, tokenizer), role.share, shared
    engine = build_engine(
        config, tokenizer, location=location, role=role, device=device, dtype=dtype, vocab_size=vocab_size
    )
    return engine, role.share, shared


def build_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    location: RankLocation,
    role: EngineRole,
    device: torch.device,
    dtype: torch.dtype,
    vocab_size: int,
) -> Engine:
    """Build this rank's engine and start it, without waiting until it serves. Raises ConfigError."""
    rollout = config.rollout
    if rollout.engine == "transformers":
        return TransformersEngine(
            config.model.hf_path, tokenizer, rollout, seed=config.run.seed, dtype=dtype, device=device
        )
    replicas = _servers(config) if rollout.servers else [_process(config, location, device)] if role.starts else []
    settings = config.weight_sync
    sender = WeightSender(
        channel=weight_channel(config, device, os.environ),
        bucket_bytes=settings.bucket_bytes // 2,
        deadline_s=settings.deadline_s,
        device=device,
        address=_own_address(rollout.servers),
        adapter={"rank": config.lora.rank, "alpha": config.lora.alpha} if settings.adapters == "alone" else None,
        full_every=settings.full_every if settings.delta else 0,
    )
    return VllmEngine(
        replicas,
        sender,
        tokenizer,
        rollout,
        seed=config.run.seed,
        stop_ids=stop_tokens(config.model.hf_path, tokenizer, vocab_size),
        vocab_size=vocab_size,
        longest=_longest(config),
        drives=role.drives,
        rank=location.rank,
        in_flight=settings.in_flight,
        start_late=shares_device(config, device),
    )


def _longest(config: Config) -> int:
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def engine_arguments(config: Config, device: torch.device) -> dict[str, object]:
    """Return the fields of vllm.EngineArgs (0.32.0) for an engine that the run starts.

    ``rollout.vllm`` adds to them and may change the ``defaults`` among them.
    """
    on_gpu = device.type == "cuda"
    if config.rollout.routing_replay == "rollout" and not on_gpu:
        raise ConfigError(
            "rollout.routing_replay=rollout wants experts from vLLM, whose builds for the CPU return none (0.32: "
            "Model Runner V2 requires Triton); set rollout.routing_replay=old_logprobs or off, or "
            "rollout.engine=transformers"
        )
    owned: dict[str, object] = {
        "model": config.model.hf_path,
        "skip_tokenizer_init": True,
        "dtype": config.model.dtype,
        "load_format": "dummy",  # the weights come from the trainer, at once
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": "megatron_rl.rollout.weight_sync.receiver.Receiver",
        "weight_transfer_config": {"backend": "megatron_rl"},
        "tensor_parallel_size": config.rollout.tensor_parallel,
        "enable_return_routed_experts": config.rollout.routing_replay == "rollout",
        "enable_sleep_mode": shares_device(config, device),
    }
    if on_gpu:
        owned["gpu_memory_utilization"] = config.rollout.gpu_memory_utilization
    defaults = {
        "max_model_len": _longest(config),
        "enable_prefix_caching": True,
        "enforce_eager": not on_gpu,
        "disable_log_stats": True,
        "seed": config.run.seed,
        **({} if on_gpu else _on_cpu(config)),
    }
    return owned | adapter_arguments(config, on_gpu) | defaults | config.rollout.vllm


def family_arguments(hf_path: str) -> dict[str, object]:
    """Return the fields of vllm.EngineArgs by which an engine computes what the model's config.json says."""
    fields = read_fields(hf_path)
    family = family_of(fields.get("model_type"))
    return {} if family is None else family.engine_arguments(fields)


def latent_arguments(config: Config, device: torch.device) -> dict[str, object]:
    """Return the fields of vllm.EngineArgs for latent attention on a CPU; none for other models and devices.

    On a CPU with AMX vLLM 0.32 takes a kernel for bfloat16 alone, whatever the dtype (platforms/cpu.py, amx_mla.py).
    """
    takes_any = device.type == "cuda" or config.model.dtype == "bfloat16"
    if takes_any or not read_fields(config.model.hf_path).get("kv_lora_rank"):
        return {}
    return {"attention_backend": "CPU_MLA"}


def adapter_arguments(config: Config, on_gpu: bool) -> dict[str, object]:
    """Return the fields of vllm.EngineArgs for an engine that gets the policy's adapters alone; none where merged.

    Raises ConfigError for numbers that vLLM's adapters do not compute in.
    """
    if config.weight_sync.adapters == "merged":
        return {}
    if on_gpu and config.model.dtype == "float32":
        raise ConfigError(
            "weight_sync.adapters=alone with model.dtype=float32: vLLM's adapters compute in 16 bits on a GPU "
            "(lora/ops/triton_ops/lora_shrink_op.py, 0.32.0); set model.dtype=bfloat16, or weight_sync.adapters=merged"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": next(most for most in VLLM_LORA_RANKS if most >= config.lora.rank),
        "lora_dtype": "auto",
        "lora_target_modules": [name for target in config.lora.targets for name in PROJECTIONS[target]],
    }


def _on_cpu(config: Config) -> dict[str, object]:
    """Return the fields of vllm.EngineArgs that an engine needs on a CPU.

    For a prompt cut in chunks vLLM (0.32.0) winds a sample's random numbers back, which torch's CPU generator cannot
    do: the engine dies. Its default block of 128 tokens would keep short prompts out of the prefix cache.
    """
    return {"block_size": 32, "enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, _longest(config))}


def usable_cores() -> int:
    """Count the cores that this process may run on, which a scheduler or a container may have limited."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def engine_devices(width: int, first: int, environment: Mapping[str, str], visible: int) -> list[str]:
    """Return the names of an engine's GPUs: this rank's and those after it, as CUDA_VISIBLE_DEVICES names them.

    first: this rank's GPU among the visible ones (torch.device.index). visible: the number of GPUs that it sees.

    Raises ConfigError where fewer than ``width`` are left, as with one visible GPU for each process (SLURM's
    --gpus-per-task).
    """
    given = environment.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in given.split(",")] if given else [str(index) for index in range(visible)]
    names = names[:visible]  # CUDA ends the list at the first name that it cannot read
    if first + width > len(names):
        raise ConfigError(
            f"an engine of rollout.tensor_parallel={width} begins at GPU {first} of this process, which sees "
            f"{len(names)} (CUDA_VISIBLE_DEVICES={given or 'unset'}); let every process of a node see all of its GPUs, "
            "as torchrun does (under SLURM --gpus-per-node in place of --gpus-per-task), or lower "
            "rollout.tensor_parallel"
        )
    return names[first : first + width]


def _process(config: Config, location: RankLocation, device: torch.device) -> ProcessReplica:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine=vllm starts vLLM in this environment, and it is not installed here; pip install "
            "'megatron_rl[vllm]' (on a CPU make test-vllm makes .venv-vllm), or name running servers by "
            "rollout.servers"
        )
    devices, threads = None, None
    if device.type == "cuda":
        devices = engine_devices(config.rollout.tensor_parallel, device.index, os.environ, torch.cuda.device_count())
    else:
        engines_here = max(
            1, (config.rollout.num_engines or location.world_size) * location.local_world_size // location.world_size
        )
        threads = max(1, usable_cores() // engines_here)
    log_path = config.run.path / "engines" / f"vllm_{location.rank}.log"
    own = family_arguments(config.model.hf_path) | latent_arguments(config, device)
    arguments = own | engine_arguments(config, device)
    return ProcessReplica(arguments, engine_environment(os.environ, devices, threads), log_path)


def _servers(config: Config) -> list[ServerReplica]:
    rollout = config.rollout
    return [ServerReplica(url, api_key_env=rollout.api_key_env, model=config.model.hf_path) for url in rollout.servers]


def weight_channel(config: Config, device: torch.device, environment: Mapping[str, str]) -> str:
    """Return the channel of the weights; raise ConfigError for one that the engines cannot use.

    environment: that of the trainer's process.
    """
    channel, reason = choose_channel(config, on_gpu=device.type == "cuda", environment=environment)
    if reason:
        log.warning("weight_sync.channel=auto takes %s, and cuda_ipc would be faster: %s", channel, reason)
    return channel


def _own_address(servers: Sequence[str]) -> str:
    """Return this host's address towards the first server on another host; loopback if all are on this one."""
    import socket

    for server in servers:
        parts = urlsplit(server)
        if parts.hostname not in LOOPBACK:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((parts.hostname, parts.port or 80))  # sends nothing: it is a datagram socket
                return probe.getsockname()[0]
    return "127.0.0.1"
