"""The environment of a process that a test starts: none of a launcher's variables, no GPU, one thread."""

from __future__ import annotations

import os
import sys

from megatron_rl.distributed.child_process import LAUNCHER_VARIABLES

# One node's torchrun, up to the number of processes; it waits for the host's name where that has no address.
TORCHRUN = ("torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node")


def worker_environment() -> dict[str, str]:
    """Return this process's variables for a gloo world on the CPU."""
    left_out = [name for name in os.environ if LAUNCHER_VARIABLES.fullmatch(name) or name.startswith("SLURM_")]
    return {name: value for name, value in os.environ.items() if name not in left_out} | {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        **{"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"},
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),
    }
