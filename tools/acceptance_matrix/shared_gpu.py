"""Lets several ranks of one host meet on one GPU over NCCL's sockets.

NCCL refuses two ranks of one host on one GPU ("Duplicate GPU detected", init.cc of 2.28.9). It tells hosts apart by
NCCL_HOSTID, so that each rank can stand for a host of its own. The kernels of the processes are sliced in time: the
order of collectives is as on several GPUs, their speed is not. Ran on an H100 with
NCCL 2.28.9 (docs/evidence/support-matrix.md).
"""

from __future__ import annotations

import os

ENVIRONMENT = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MAX_CTAS": "2",
    "NCCL_NVLS_ENABLE": "0",
}


def share() -> None:
    """Set NCCL's environment for this rank, of RANK; to be called before NCCL starts, which reads it once."""
    os.environ.update(ENVIRONMENT, NCCL_HOSTID=f"r{os.environ['RANK']}")
