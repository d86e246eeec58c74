"""The environment of a process that a test starts: none of a launcher's variables, no GPU, one thread."""

from __future__ import annotations

import os
import sys

LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "SLURM_", "PMI_", "OMPI_")


def worker_environment() -> dict[str, str]:
    """This process's, without what a launcher left in it, and with no GPU: these workers are a gloo world on the
    CPU."""
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES and not k.startswith(LAUNCHER_PREFIXES)}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return kept | {
        "GLOO_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),
    }
