"""The placement of engines: which ranks start and drive them, and which share a GPU with the trainer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.config import RolloutConfig, WeightSyncConfig
from megatron_rl.errors import ConfigError, quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocation:
    """Holds a rank's number in the run and on its node, and the number of ranks in the run and on the node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRole:
    """Holds what a rank does for the rollouts.

    share: (the rank's number among the ranks that sample prompts, the number of these ranks). None
        if the rank samples none.
    starts: whether the rank starts its own engine.
    drives: whether the rank sends weights.
    """

    share: tuple[int, int] | None
    starts: bool
    drives: bool


def role_of(rollout: RolloutConfig, location: RankLocation) -> EngineRole:
    """Return what a rank does for the rollouts. Raises ConfigError if the engines do not fit the ranks.

    Not a collective: every rank does the same arithmetic.
    """
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
    # The ranks are cut into equal slices, one per engine. An engine runs on the first ``width`` ranks of its slice.
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


def shares_device(rollout: RolloutConfig, device: torch.device) -> bool:
    """Return whether trainer and engine take turns on one GPU.

    Raises ConfigError if ``rollout.sleep=always`` demands turns, but trainer and engine share no
    GPU.
    """
    own_engines = rollout.engine == "vllm" and not rollout.servers
    if rollout.sleep == "always" and not (own_engines and device.type == "cuda"):
        raise ConfigError(
            "rollout.sleep=always needs a GPU that the trainer shares with engines of its own; use rollout.sleep=auto"
        )
    return own_engines and device.type == "cuda" and rollout.sleep != "never"


def refuse_sharing(rollout: RolloutConfig, weight_sync: WeightSyncConfig, shared: bool) -> None:
    """Raise ConfigError if trainer and engine take turns on one GPU, and other settings do not allow that.

    Two kinds of settings do not allow it. One is a producer that generates while the trainer trains.
    The other is ``weight_sync.adapters=alone``: it sends the base weights only once, and a sleeping
    engine drops them.

    shared: whether trainer and engine take turns on one GPU.
    """
    producer = rollout.producer
    if shared and weight_sync.adapters == "alone":
        raise ConfigError(
            "weight_sync.adapters=alone sends the base weights once, and engines that share the trainer's GPU drop "
            f"them when they sleep (rollout.sleep={rollout.sleep}); keep engine and trainer in memory at once by "
            "rollout.sleep=never, or set weight_sync.adapters=merged"
        )
    if shared and (producer.ahead or producer.mode == "streaming"):
        raise ConfigError(
            f"rollout.producer.mode={producer.mode} generates while the trainer trains, and the engines share its GPUs "
            f"(rollout.sleep={rollout.sleep}); name engines on other GPUs by rollout.servers, keep both in "
            "memory at once by rollout.sleep=never, or set rollout.producer.mode=sync"
        )


def refuse_mixture(weight_sync: WeightSyncConfig, num_experts: int) -> None:
    """Raise ConfigError if engines of a mixture-of-experts model would be sent LoRA adapters alone.

    num_experts: the model's number of experts; 0 for a dense model.
    """
    if num_experts and weight_sync.adapters == "alone":
        raise ConfigError(
            f"weight_sync.adapters=alone is not supported for a mixture of {num_experts} experts: vLLM (0.32.0) "
            "prepares its layers by GPU kernels, which was not tested; set weight_sync.adapters=merged"
        )


def refuse_delta(rollout: RolloutConfig, weight_sync: WeightSyncConfig, shared: bool) -> None:
    """Raise ConfigError if only changed weights are sent to engines that drop their weights or quantize them.

    shared: whether trainer and engine take turns on one GPU. Then a sleeping engine drops its
        weights.
    """
    if not weight_sync.delta:
        return
    if shared:
        raise ConfigError(
            "weight_sync.delta=true sends what changed, and engines that share the trainer's GPUs "
            f"(rollout.sleep={rollout.sleep}) discard their weights while they sleep; set "
            "weight_sync.delta=false, keep both in memory by rollout.sleep=never, or name engines on other GPUs by "
            "rollout.servers"
        )
    if quantization := rollout.vllm.get("quantization"):
        raise ConfigError(
            "weight_sync.delta=true needs engine weights bitwise equal to the trainer's, and "
            f"rollout.vllm.quantization={quoted(quantization)} changes them; set weight_sync.delta=false, or "
            "remove the quantization"
        )
