"""The construction of a rank's ``VllmEngine``: its replicas, their GPUs, and the sender of the weights."""

from __future__ import annotations

import importlib.util
import logging
import os
import pathlib
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.config import Config, LoraConfig, RolloutConfig, WeightSyncConfig
from megatron_rl.distributed.weight_channel import LOOPBACK, choose_channel
from megatron_rl.errors import ConfigError
from megatron_rl.rollout.engines.embedded import stop_tokens
from megatron_rl.rollout.engines.placement import EngineRole, RankLocation, shares_device
from megatron_rl.rollout.engines.replica import Replica
from megatron_rl.rollout.vllm.arguments import delta_arguments, engine_arguments, family_arguments, latent_arguments
from megatron_rl.rollout.vllm.engine import VllmEngine
from megatron_rl.rollout.vllm.process_replica import ProcessReplica, engine_environment
from megatron_rl.rollout.vllm.server_replica import ServerReplica
from megatron_rl.rollout.weight_sync.encoder import BucketEncoder, WholeEncoder
from megatron_rl.rollout.weight_sync.sender import WeightSender

log = logging.getLogger(__name__)


def vllm_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    location: RankLocation,
    role: EngineRole,
    device: torch.device,
    vocab_size: int,
) -> VllmEngine:
    """Return this rank's ``VllmEngine``, without waiting until its replicas serve.

    location: the rank's number in the run and on its host.
    role: whether the rank starts an engine, and whether it sends the weights.
    vocab_size: the vocabulary size of the trainer's model.

    Raises ConfigError if vLLM is missing, or cannot run with these settings.
    """
    # Choose the replicas: the named servers, or a process of this rank's own, or none.
    rollout, settings = config.rollout, config.weight_sync
    replicas: Sequence[Replica] = ()
    if rollout.servers:
        hf_path = config.model.hf_path
        replicas = [ServerReplica(url, api_key_env=rollout.api_key_env, model=hf_path) for url in rollout.servers]
    elif role.starts:
        require_vllm()
        own = family_arguments(config.model.hf_path) | latent_arguments(config.model, device)
        arguments = own | engine_arguments(
            *(config.model, rollout, settings, config.lora),
            max_prompt_tokens=config.data.max_prompt_tokens,
            seed=config.run.seed,
            device=device,
        )
        arguments |= delta_arguments(config.model, rollout, settings, device)
        replicas = [process_replica(rollout, arguments, config.run.path / "engines", location, device)]
    # Build the sender of the weights, and the engine over both.
    sender = WeightSender(
        channel=weight_channel(rollout, settings, device, os.environ),
        bucket_bytes=settings.bucket_bytes // 2,
        deadline_s=settings.deadline_s,
        device=device,
        address=_own_address(rollout.servers),
        encoder=bucket_encoder(settings, config.lora),
    )
    return VllmEngine(
        replicas,
        sender,
        tokenizer,
        rollout,
        seed=config.run.seed,
        stop_ids=stop_tokens(config.model.hf_path, tokenizer, vocab_size),
        vocab_size=vocab_size,
        longest=config.data.max_prompt_tokens + rollout.max_response_tokens,
        drives=role.drives,
        rank=location.rank,
        in_flight=settings.in_flight,
        start_late=shares_device(rollout, device),
    )


def bucket_encoder(settings: WeightSyncConfig, lora: LoraConfig) -> BucketEncoder:
    """Return the encoder that decides what a weight sync sends of each bucket (batch of tensors) to each engine.

    An engine gets the whole bucket, only the changed words (``weight_sync.delta``), or LoRA
    adapters apart from the weights (``weight_sync.adapters=alone``).
    """
    match settings:
        case WeightSyncConfig(delta=True):
            from megatron_rl.rollout.weight_sync.changed_encoder import ChangedEncoder

            return ChangedEncoder(settings.full_every)
        case WeightSyncConfig(adapters="alone"):
            from megatron_rl.rollout.weight_sync.adapter_encoder import AdapterEncoder

            return AdapterEncoder(lora.rank, lora.alpha)
        case _:
            return WholeEncoder()


def require_vllm() -> None:
    """Raise ConfigError if vLLM is not installed in this environment."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine=vllm starts vLLM in this environment, and it is not installed here; pip install "
            "'megatron_rl[vllm]' (on a CPU make test-vllm makes .venv-vllm), or name running servers by "
            "rollout.servers"
        )


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use. A scheduler or a container may limit them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def engine_devices(width: int, first: int, environment: Mapping[str, str], visible: int) -> list[str]:
    """Return the names of an engine's GPUs for CUDA_VISIBLE_DEVICES: this rank's GPU and the next ones.

    width: the number of the engine's GPUs.
    first: the index of this rank's GPU among the visible GPUs (torch.device.index).
    environment: the environment variables of this process.
    visible: the number of visible GPUs.

    Raises ConfigError if fewer than ``width`` GPUs are visible from ``first`` on. That happens if
    each process sees only one GPU (SLURM's --gpus-per-task).
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in listed.split(",")] if listed else [str(index) for index in range(visible)]
    names = names[:visible]  # CUDA ends the list at the first name that it cannot read
    if first + width > len(names):
        raise ConfigError(
            f"an engine of rollout.tensor_parallel={width} begins at GPU {first} of this process, which sees "
            f"{len(names)} (CUDA_VISIBLE_DEVICES={listed or 'unset'}); let every process of a node see all of its "
            "GPUs, as torchrun does (under SLURM --gpus-per-node in place of --gpus-per-task), or lower "
            "rollout.tensor_parallel"
        )
    return names[first : first + width]


def process_replica(
    rollout: RolloutConfig,
    arguments: Mapping[str, object],
    folder: pathlib.Path,
    location: RankLocation,
    device: torch.device,
) -> ProcessReplica:
    """Return the ``ProcessReplica`` of an engine that this rank will start in a process. It is not started yet.

    arguments: the fields of vllm.EngineArgs.
    folder: the folder of the engines' logs.

    Raises ConfigError if too few GPUs are visible.
    """
    devices, threads = None, None
    if device.type == "cuda":
        devices = engine_devices(rollout.tensor_parallel, device.index, os.environ, torch.cuda.device_count())
    else:
        engines_here = max(
            1, (rollout.num_engines or location.world_size) * location.local_world_size // location.world_size
        )
        threads = max(1, usable_cores() // engines_here)
    log_path = folder / f"vllm_{location.rank}.log"
    return ProcessReplica(arguments, engine_environment(os.environ, devices, threads), log_path)


def weight_channel(
    rollout: RolloutConfig,
    weight_sync: WeightSyncConfig,
    device: torch.device,
    environment: Mapping[str, str],
) -> str:
    """Return the name of the channel that brings weights to the engines, such as ``shared_memory``.

    environment: the environment variables of the trainer's process.

    Raises ConfigError if the engines cannot use the configured channel.
    """
    on_gpu = device.type == "cuda"
    channel, reason = choose_channel(rollout, weight_sync, on_gpu=on_gpu, environment=environment)
    if reason:
        log.warning("weight_sync.channel=auto uses %s; cuda_ipc would be faster, but %s", channel, reason)
    return channel


def _own_address(servers: Sequence[str]) -> str:
    """Return the address at which the first server on another host reaches this host; 127.0.0.1 without such a server.

    servers: the URLs of ``rollout.servers``.
    """
    for server in servers:
        parts = urlsplit(server)
        if parts.hostname not in LOOPBACK:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((parts.hostname, parts.port or 80))  # sends nothing, since it is a datagram socket
                return probe.getsockname()[0]
    return "127.0.0.1"
