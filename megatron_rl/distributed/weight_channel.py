"""The choice of the channel by which the policy's weights reach the engines.

The choice also decides how torch allocates the trainer's GPU memory (cuda_environment.py). Under
cuda_ipc, engines open that memory. So it must not lie in expandable segments: to open another
process's expandable segments, a process needs extra rights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from megatron_rl.config import RolloutConfig, WeightSyncConfig
from megatron_rl.distributed.cuda_environment import ALLOCATOR, opens_device_memory
from megatron_rl.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


def choose_channel(
    rollout: RolloutConfig, weight_sync: WeightSyncConfig, *, on_gpu: bool, environment: Mapping[str, str]
) -> tuple[str, str]:
    """Return (channel, reason) for sending weights from the trainer to its engines.

    The reason says why ``auto`` did not choose cuda_ipc for engines on the trainer's GPUs; "" in
    any other case.

    on_gpu: whether the trainer runs on GPUs.
    environment: the trainer's environment variables, which decide how torch allocates memory.

    Raises ConfigError for a channel that the engines cannot use.
    """
    # refuse a chosen channel that cannot work here
    channel = weight_sync.channel
    expandable = next((name for name in ALLOCATOR if EXPANDABLE.search(environment.get(name, ""))), "")
    if channel == "cuda_ipc" and (not on_gpu or rollout.servers):
        raise ConfigError(
            "weight_sync.channel=cuda_ipc needs engines of the run's own on the trainer's GPUs, and this run is on "
            f"{'cuda' if on_gpu else 'cpu'} with rollout.servers={list(rollout.servers)}; use shared_memory or "
            "broadcast"
        )
    if channel == "cuda_ipc" and expandable:
        raise ConfigError(
            f"weight_sync.channel=cuda_ipc cannot open memory in expandable segments, and {expandable} is "
            f"{environment[expandable]!r}; take expandable_segments out of it, or use weight_sync.channel=auto"
        )
    if channel == "broadcast" and on_gpu and not rollout.servers:
        raise ConfigError(
            "weight_sync.channel=broadcast would put a rank and its engine, both on one GPU, into one NCCL group, and "
            'NCCL refuses that ("Duplicate GPU detected"); use weight_sync.channel=auto for engines of the run\'s own'
        )
    # auto: device memory if engines can open it, else shared memory on one host, else broadcast
    if channel != "auto":
        return channel, ""
    if on_gpu and opens_device_memory(rollout, weight_sync):
        if not expandable:
            return "cuda_ipc", ""
        reason = f"{expandable}={environment[expandable]} asks for expandable segments, which no engine can open"
        return "shared_memory", reason
    hosts = [urlsplit(server).hostname for server in rollout.servers]
    return ("shared_memory" if all(host in LOOPBACK for host in hosts) else "broadcast"), ""
