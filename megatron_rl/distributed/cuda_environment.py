"""Variables and switches that CUDA, NCCL and Transformer Engine read when they start, set for a run before that.

A variable that the user has set stays, unless ``run.deterministic`` needs another value: that is an
error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from megatron_rl.config import MegatronConfig, ParallelConfig, RolloutConfig, RunConfig, WeightSyncConfig
from megatron_rl.errors import ConfigError

DRIVER = "/proc/driver/nvidia/version"
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the older name, which every version reads, first
# What bitwise repetition needs, each with the values that give it. cuBLAS: its documentation on
# reproducibility. Transformer Engine: attention's backward (pytorch/attention). NCCL: NVLink SHARP
# adds in the order of arrival, and Megatron-LM's --deterministic-mode asks for one of the others.
DETERMINISTIC: Mapping[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("^NVLS", "Ring", "Tree", "CollnetDirect", "CollnetChain"),
}
_added: dict[str, str] = {}  # the variables that this process added, which its engines shall not inherit


def added_variables() -> dict[str, str]:
    """Return the variables that this process has added to its environment, with their values."""
    return dict(_added)


def opens_device_memory(rollout: RolloutConfig, weight_sync: WeightSyncConfig) -> bool:
    """Tell whether engines on the trainer's GPUs are to open its memory, where its allocator lets them."""
    channel = weight_sync.channel
    return channel == "cuda_ipc" or (channel == "auto" and rollout.engine == "vllm" and not rollout.servers)


def wanted_variables(
    run: RunConfig,
    parallel: ParallelConfig,
    megatron: MegatronConfig,
    rollout: RolloutConfig,
    weight_sync: WeightSyncConfig,
) -> dict[str, tuple[str, ...]]:
    """Return the variables that a run wants on a GPU, each with the values that do, the one to set first."""
    wanted: dict[str, tuple[str, ...]] = {}
    if parallel.tensor > 1 or parallel.context > 1:
        # One hardware queue keeps the order in which Megatron-Core launches a collective and the
        # product that shall hide it (0.16.1 tensor_parallel/layers.py warns without it;
        # Megatron-LM's arguments.py asks for it under context parallelism too, up to Hopper).
        wanted["CUDA_DEVICE_MAX_CONNECTIONS"] = ("1",)
    if not opens_device_memory(rollout, weight_sync) and not megatron.ddp.get("nccl_ub"):
        # Micro-batches differ in size, and blocks of fixed size fragment; a handle on a segment
        # that grows would ask the engine's process for more rights, and NCCL registers fixed buffers.
        wanted[ALLOCATOR[0]] = ("expandable_segments:True",)
    return {**wanted, **(DETERMINISTIC if run.deterministic else {})}


def prepare_cuda(wanted: Mapping[str, tuple[str, ...]], *, deterministic: bool) -> None:
    """Set what a run wants before CUDA starts, and torch's switches; may be called again.

    wanted: by ``wanted_variables``. deterministic: ``run.deterministic``.

    Raises ConfigError where ``run.deterministic`` needs a variable that the user set otherwise, or
    that CUDA, which has started already, did not find.
    """
    if os.path.exists(DRIVER):
        set_variables(wanted, os.environ, has_started=torch.cuda.is_initialized())
    # cuDNN builds a plan for each shape that it has not seen, in half a second and more under torch
    # 2.11 (reported, not measured here), and every decoding step of the embedded engine has one;
    # flash attention takes any length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads memory that nobody wrote
        torch.backends.cudnn.benchmark = False


def set_variables(wanted: Mapping[str, tuple[str, ...]], environment: dict[str, str], *, has_started: bool) -> None:
    """Add the wanted variables that are not set.

    has_started: whether CUDA has started, which reads them no more.

    Raises ConfigError as ``prepare_cuda`` does.
    """
    for name, values in wanted.items():
        value = environment.get(name)
        if name in DETERMINISTIC and value is not None and value not in values:
            raise ConfigError(
                f"run.deterministic=true needs {name} to be one of {', '.join(values)} and it is {value!r}; unset it"
            )
        if value is not None or (name in ALLOCATOR and any(other in environment for other in ALLOCATOR)):
            continue
        if has_started:
            if name in DETERMINISTIC:
                raise ConfigError(
                    f"run.deterministic=true needs {name}={values[0]} before CUDA starts, and it has started; set it "
                    "in the environment, or build the trainer before anything else uses the GPU"
                )
            continue
        environment[name] = _added[name] = values[0]
