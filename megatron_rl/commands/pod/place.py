"""The position of a pod in its job, read from the environment variables of Kubernetes or of Kubeflow's operators.

| what | our variable | an Indexed Job's variable | Kubeflow's variables, older names last |
|---|---|---|---|
| the pod's number | – | JOB_COMPLETION_INDEX | PET_NODE_RANK, RANK |
| the number of pods | NNODES | – | PET_NNODES, WORLD_SIZE |
| pod 0's name | HEAD | – | PET_MASTER_ADDR, MASTER_ADDR |
| torchrun's port on pod 0 | PORT | – | PET_MASTER_PORT, MASTER_PORT |
| ranks of each pod | PROCESSES | – | PET_NPROC_PER_NODE |

In each row, from left to right, the first variable that is set counts. Sources: kubernetes.io
"Indexed Job"; kubeflow/trainer v1.9.4, pkg/controller.v1/pytorch/envvar.go and master.go, and
v2.3.0, pkg/runtime/framework/plugins/torch.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.errors import ConfigError, quoted

PORT, MEET_S, SAVE_EVERY = 29400, 900, 10
EXIT_AGAIN = 75
UNSET = ("", "auto", "gpu")
MOST_PODS = 100_000  # the limit of an Indexed Job (kubernetes, batch validation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Holds a pod's number in its job and the settings for reaching the other pods.

    node: the number of this pod, from 0; pod 0 is the head.
    num_nodes: the number of pods of the job.
    head: the host name of pod 0; "" if the job has one pod and no name is given.
    port: the port of torchrun's store on pod 0; the pods wait for one another at the next port.
    processes: the number of ranks of each pod.
    address: this pod's address on the pods' network; None if not given.
    meet_s: the most seconds that the pods wait for one another.
    run_dir: the run's folder; None if the configuration names it.
    save_every: the number of rollouts between checkpoints.
    exit_again: the exit code after which Kubernetes starts this pod again.

    Example: pod 1 of 2 has ``Place(node=1, num_nodes=2, head="my-run-0.my-run", port=29400, ...)``.
    """

    node: int
    num_nodes: int
    head: str
    port: int
    processes: int
    address: str | None
    meet_s: int
    run_dir: str | None
    save_every: int
    exit_again: int

    @property
    def meeting_port(self) -> int:
        return self.port + 1


def place_of(environment: Mapping[str, str]) -> Place:
    """Return the Place that the environment variables describe.

    Raises ConfigError that names the variable which is missing, no number, or out of range.
    """
    num_nodes = _number(environment, ("NNODES", "PET_NNODES", "WORLD_SIZE"), 1, MOST_PODS, default=1)
    ranks = ("JOB_COMPLETION_INDEX", "PET_NODE_RANK", "RANK")
    node = _number(environment, ranks, 0, num_nodes - 1, default=0 if num_nodes == 1 else None)
    _, head = _first(environment, ("HEAD", "PET_MASTER_ADDR", "MASTER_ADDR"))
    if num_nodes > 1 and not head:
        raise ConfigError(
            f"this is pod {node} of {num_nodes}, and nothing names pod 0; set HEAD to its stable name, "
            "<job>-0.<headless service>"
        )
    return Place(
        node=node,
        num_nodes=num_nodes,
        head=head,
        port=_number(environment, ("PORT", "PET_MASTER_PORT", "MASTER_PORT"), 1024, 65534, default=PORT),
        processes=_number(environment, ("PROCESSES", "PET_NPROC_PER_NODE"), 1, 1024, default=_gpus() or 1),
        address=environment.get("POD_IP") or None,
        meet_s=_number(environment, ("MEET_S",), 1, 7 * 24 * 3600, default=MEET_S),
        run_dir=environment.get("RUN_DIR") or None,
        save_every=_number(environment, ("SAVE_EVERY",), 1, 10**9, default=SAVE_EVERY),
        exit_again=_number(environment, ("EXIT_AGAIN",), 3, 255, default=EXIT_AGAIN),
    )


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    """Return (name, value) of the first of ``names`` that is set; ("", "") if none is.

    A variable that is empty counts as not set. So does torchrun's ``auto`` or ``gpu``: this module
    then counts the GPUs itself. ``auto`` is the default of Kubeflow's operators.
    """
    return next(((name, environment[name]) for name in names if environment.get(name, "") not in UNSET), ("", ""))


def _number(
    environment: Mapping[str, str], names: tuple[str, ...], least: int, most: int, *, default: int | None
) -> int:
    name, text = _first(environment, names)
    if not name:
        if default is None:
            raise ConfigError(
                f"none of {', '.join(names)} is set, and the job has {most + 1} pods; an Indexed Job (completionMode: "
                "Indexed) and Kubeflow's operators set one"
            )
        return default
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise ConfigError(
            f"{name}={quoted(text)} is no whole number from {least} to {most}; the manifest or the operator sets it"
        )
    return int(text)


def _gpus() -> int:
    """Return the number of GPUs that NVIDIA's runtime put into this container, without loading torch."""
    return sum(bool(re.fullmatch("nvidia[0-9]+", path.name)) for path in pathlib.Path("/dev").glob("nvidia*"))
