"""The environment variables that CUDA, NCCL and Transformer Engine read when they start, and torch's global switches.

A run sets them before these libraries start. A variable that the user has set is kept. It is an
error if ``run.deterministic`` needs another value.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from megatron_rl.config import MegatronConfig, ParallelConfig, RolloutConfig, RunConfig, WeightSyncConfig
from megatron_rl.errors import ConfigError

DRIVER = "/proc/driver/nvidia/version"
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # every version of torch reads the first, older name
# Variables that bitwise repetition needs, with the values that give it. cuBLAS: by its documentation
# on reproducibility. Transformer Engine: for attention's backward (pytorch/attention). NCCL: NVLink
# SHARP adds in the order of arrival; Megatron-LM's --deterministic-mode asks for another algorithm.
DETERMINISTIC: Mapping[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("^NVLS", "Ring", "Tree", "CollnetDirect", "CollnetChain"),
}
_added: dict[str, str] = {}  # variables that this process added; its engines must not inherit them


def added_variables() -> dict[str, str]:
    """Return the variables that ``set_variables`` has added to this process's environment, with their values."""
    return dict(_added)


def opens_device_memory(rollout: RolloutConfig, weight_sync: WeightSyncConfig) -> bool:
    """Return whether engines on the trainer's GPUs are to read new weights directly from the trainer's GPU memory.

    They can do so only if the trainer's allocator uses no expandable segments (weight_channel.py).
    """
    channel = weight_sync.channel
    return channel == "cuda_ipc" or (channel == "auto" and rollout.engine == "vllm" and not rollout.servers)


def wanted_variables(
    run: RunConfig,
    parallel: ParallelConfig,
    megatron: MegatronConfig,
    rollout: RolloutConfig,
    weight_sync: WeightSyncConfig,
) -> dict[str, tuple[str, ...]]:
    """Return {name: accepted values} of the environment variables that a run wants on a GPU.

    If the user has not set a variable, it gets the first accepted value.
    """
    wanted: dict[str, tuple[str, ...]] = {}
    if parallel.tensor > 1 or parallel.context > 1:
        # One hardware queue keeps the order in which Megatron-Core launches a collective and the
        # matrix product that overlaps with it. Without it 0.16.1 tensor_parallel/layers.py warns.
        # Megatron-LM's arguments.py asks for it under context parallelism too, up to Hopper.
        wanted["CUDA_DEVICE_MAX_CONNECTIONS"] = ("1",)
    if not opens_device_memory(rollout, weight_sync) and not megatron.ddp.get("nccl_ub"):
        # Micro-batches differ in size, so blocks of fixed size would fragment. Not with engines that
        # open this memory, which would need more rights, nor with NCCL's registered buffers.
        wanted[ALLOCATOR[0]] = ("expandable_segments:True",)
    return {**wanted, **(DETERMINISTIC if run.deterministic else {})}


def prepare_cuda(wanted: Mapping[str, tuple[str, ...]], *, deterministic: bool) -> None:
    """Set a run's environment variables before CUDA starts, and torch's global switches. It may be called again.

    wanted: the result of ``wanted_variables``.
    deterministic: ``run.deterministic``.

    Raises ConfigError if the user's value of a variable is not one that ``run.deterministic``
    needs. The same error is raised if such a variable is missing and CUDA has started already.
    """
    if os.path.exists(DRIVER):
        set_variables(wanted, os.environ, has_started=torch.cuda.is_initialized())
    # For each new shape cuDNN builds a plan, which takes half a second and more under torch 2.11
    # (reported, not measured here). Every decoding step of the embedded engine has a new shape.
    # Flash attention takes any length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # no code here reads uninitialised memory
        torch.backends.cudnn.benchmark = False


def set_variables(wanted: Mapping[str, tuple[str, ...]], environment: dict[str, str], *, has_started: bool) -> None:
    """Add the wanted variables that ``environment`` lacks.

    wanted: the result of ``wanted_variables``.
    has_started: whether CUDA has started; it would not read new variables.

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
