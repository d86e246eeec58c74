"""The fields of Megatron-Core's DistributedDataParallel: set by this package, set by the user, and refused."""

from __future__ import annotations

from megatron_rl.backend.optimizer import REFUSED_OPTIMIZER_FIELDS
from megatron_rl.config.model import MegatronConfig
from megatron_rl.distributed.platform import HOST
from megatron_rl.errors import ConfigError
from megatron_rl.model.megatron_fields import Refusals, resolve_fields

from megatron.core.distributed import DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer import OptimizerConfig  # isort: skip

_SEAM = "the token-sum seam owns it"
_OWNED_FIELDS = {
    "average_in_collective": f"{_SEAM}: data-parallel ranks add, they are not averaged",
    "use_distributed_optimizer": "it is set by optimizer.distributed",
    **dict.fromkeys(("use_megatron_fsdp", "use_custom_fsdp"), "its buffers have no ghost step yet"),
    "num_distributed_optimizer_instances": "a silent rank would not know the second reduction",
}
_UNSUPPORTED_FIELDS = {
    **dict.fromkeys(("fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"), "weights in FP8 are not built here"),
    "fp4_param_gather": "weights in FP4 are not built here",
    "delay_wgrad_compute": "weight gradients would wait for a call that the schedule here does not make",
}
REFUSED_DDP_FIELDS = Refusals.of(DistributedDataParallelConfig, owned=_OWNED_FIELDS, unsupported=_UNSUPPORTED_FIELDS)


def distributed_fields(settings: MegatronConfig, *, distributed_optimizer: bool) -> dict:
    """Return {field: value} for DistributedDataParallelConfig: this package's, and the user's in ``megatron.ddp``.

    distributed_optimizer: ``optimizer.distributed``.

    Raises ConfigError if ``megatron.ddp`` or ``megatron.optimizer`` sets a refused field.
    """
    resolve_fields(settings.optimizer, OptimizerConfig, "megatron.optimizer", REFUSED_OPTIMIZER_FIELDS)
    fields = resolve_fields(settings.ddp, DistributedDataParallelConfig, "megatron.ddp", REFUSED_DDP_FIELDS)
    if settings.ddp.get("overlap_param_gather") and not distributed_optimizer:
        raise ConfigError(
            "megatron.ddp.overlap_param_gather=true needs optimizer.distributed=true, which shards the parameters it "
            "gathers"
        )
    local = "param_name_patterns_for_fp32_local_accumulation"
    if fields.get(local) and fields.get("grad_reduce_in_fp32", True):
        raise ConfigError(
            f"megatron.ddp.{local}={fields[local]} is for gradients that are reduced in another dtype, and "
            f"grad_reduce_in_fp32 is true; set megatron.ddp.grad_reduce_in_fp32=false, or remove {local}"
        )
    if settings.ddp.get("nccl_ub"):
        _require_compiler()
    return {"grad_reduce_in_fp32": True, **fields, "use_distributed_optimizer": distributed_optimizer}


def _require_compiler() -> None:
    """Raise ConfigError if Megatron-Core could not compile its memory allocator for NCCL."""
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None or not HOST.is_cuda:
        raise ConfigError(
            "megatron.ddp.nccl_ub=true has Megatron-Core compile an allocator for NCCL, which needs a GPU and CUDA's "
            f"compiler (CUDA_HOME={CUDA_HOME}); set CUDA_HOME, or remove megatron.ddp.nccl_ub"
        )
