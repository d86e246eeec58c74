"""The number of a job's GPUs: from the command line, from torchrun's or SLURM's variables, or assumed."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.errors import ConfigError

NODE_GPUS = 8  # on a node of which nothing is known


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSize:
    """Holds the number of GPUs of a job, and of each of its nodes.

    gpus: the GPUs of the whole job.
    on_node: the GPUs of each node.
    assumed: a sentence on the assumption, if nothing states the numbers; else None.
    """

    gpus: int
    on_node: int
    assumed: str | None = None


def job_size(
    config: Config,
    nodes: int | None,
    gpus_per_node: int | None,
    environment: Mapping[str, str] = os.environ,
    *,
    host_gpus: int = 0,
) -> JobSize:
    """Return the number of a job's GPUs.

    It is taken from ``nodes`` and ``gpus_per_node``, else from torchrun's or SLURM's variables. If
    none states it, one node is assumed. Of its GPUs, the largest number is taken that the critic's
    own ranks and whole replicas of the policy fill exactly. If one node is too small, the fewest
    whole nodes that they fill exactly are assumed.

    environment: the variables of this process.
    host_gpus: the number of GPUs of this host, assumed for a node of unknown size; 0 if it has
        none.

    Raises ConfigError if SLURM's variables give the nodes and not their GPUs.
    """
    for option, value in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
        if value is not None and value < 1:
            raise ConfigError(f"{option}={value} must be at least 1")
    if nodes is not None:
        on_node = gpus_per_node or NODE_GPUS
        return JobSize(gpus=nodes * on_node, on_node=on_node)
    if "WORLD_SIZE" in environment:
        gpus = int(environment["WORLD_SIZE"])
        on_node = gpus_per_node or int(environment.get("LOCAL_WORLD_SIZE", min(NODE_GPUS, gpus)))
        return JobSize(gpus=gpus, on_node=on_node)
    slurm_nodes = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES")
    if slurm_nodes is not None:
        on_node = gpus_per_node or int(environment.get("SLURM_GPUS_ON_NODE", 0))
        if on_node:
            return JobSize(gpus=int(slurm_nodes) * on_node, on_node=on_node)
        raise ConfigError(f"SLURM gives {slurm_nodes} nodes and no SLURM_GPUS_ON_NODE; add --gpus-per-node N")
    if gpus_per_node is not None:
        return JobSize(gpus=gpus_per_node, on_node=gpus_per_node)
    parallel, rollout = config.parallel, config.rollout
    dense = parallel.tensor * parallel.context * parallel.pipeline
    experts = (parallel.expert_tensor or parallel.tensor) * parallel.expert * parallel.pipeline
    of_engines = 1
    if config.generates and rollout.engine == "vllm" and not rollout.servers:
        of_engines = (rollout.num_engines or 1) * rollout.tensor_parallel
    of_critic = (config.critic.ranks or 0) if config.has_critic else 0
    return _assumed(host_gpus or NODE_GPUS, math.lcm(dense, experts), of_critic=of_critic, of_engines=of_engines)


def say_if_assumed(size: JobSize) -> JobSize:
    """Print a line on stderr if the number of GPUs is assumed; return ``size``."""
    if size.assumed:
        print(f"note: {size.assumed}", file=sys.stderr)
    return size


def _assumed(on_node: int, unit: int, *, of_critic: int, of_engines: int) -> JobSize:
    """Return an assumed size: one node if the policy, the critic and the engines fit there, else more nodes.

    on_node: the GPUs of a node.
    unit: the number of ranks of one replica of the policy, which gets a multiple of that number.
    of_critic, of_engines: the number of ranks of the critic, and of GPUs of the engines.
    """
    gpus = next(
        gpus
        for gpus in _sizes(on_node, unit, of_critic)
        if gpus - of_critic >= max(unit, of_engines) and (gpus - of_critic) % unit == 0
    )
    nodes = 1 if gpus % on_node else gpus // on_node
    where = f"{gpus} GPUs on {nodes} node{'s' * (nodes > 1)}"
    return JobSize(
        gpus=gpus,
        on_node=gpus // nodes,
        assumed=f"nothing says how many GPUs the job has; {where} are assumed, as by --nodes {nodes} --gpus-per-node "
        f"{gpus // nodes}",
    )


def _sizes(on_node: int, unit: int, of_critic: int) -> Iterator[int]:
    """Yield numbers of GPUs to try, in the order in which they are preferred.

    First come the numbers from ``on_node`` down to 1, then the GPUs of 2, 3, … whole nodes, up to
    ``unit + of_critic + 1`` nodes. Last come, without end, the multiples of ``unit``, each plus the
    critic's ranks.

    on_node: the GPUs of a node.
    unit: the number of ranks that one replica of the policy takes.
    of_critic: the number of the critic's ranks.
    """
    yield from range(on_node, 0, -1)
    yield from range(2 * on_node, on_node * (unit + of_critic + 1) + 1, on_node)
    whole = unit
    while True:
        yield whole + of_critic
        whole += unit
