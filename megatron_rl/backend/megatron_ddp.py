"""Fields of Megatron-Core's DistributedDataParallel and optimizer: those of the user and those of the seam."""

from __future__ import annotations

from megatron_rl.backend.optimizer import REFUSED_OPTIMIZER_FIELDS
from megatron_rl.config import Config
from megatron_rl.errors import ConfigError
from megatron_rl.model.megatron_fields import Refusals, resolve_fields

from megatron.core.distributed import DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer import OptimizerConfig  # isort: skip

_SEAM = "the token-sum seam owns it"
_OWNED_FIELDS = {
    "average_in_collective": f"{_SEAM}: data-parallel ranks add, they are not averaged",
    "use_distributed_optimizer": "it is set by optimizer.distributed",
    "use_megatron_fsdp": "its buffers have no ghost step yet",
    "num_distributed_optimizer_instances": "a silent rank would not know the second reduction",
}
_UNSUPPORTED_FIELDS = {
    **dict.fromkeys(("fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"), "weights in FP8 are not built here"),
    "delay_wgrad_compute": "weight gradients would wait for a call that the schedule here does not make",
}
REFUSED_DDP_FIELDS = Refusals(owned=_OWNED_FIELDS, unsupported=_UNSUPPORTED_FIELDS)


def distributed_fields(config: Config) -> dict:
    """Return the fields of DistributedDataParallelConfig: this package's own, and those of ``megatron.ddp``.

    Raises ConfigError for a field of ``megatron.ddp`` or ``megatron.optimizer`` that may not be set.
    """
    settings = config.megatron
    resolve_fields(settings.optimizer, OptimizerConfig, "megatron.optimizer", REFUSED_OPTIMIZER_FIELDS)
    fields = resolve_fields(settings.ddp, DistributedDataParallelConfig, "megatron.ddp", REFUSED_DDP_FIELDS)
    if settings.ddp.get("overlap_param_gather") and not config.optimizer.distributed:
        raise ConfigError(
            "megatron.ddp.overlap_param_gather=true needs optimizer.distributed=true, which shards the parameters it "
            "gathers"
        )
    return {"grad_reduce_in_fp32": True, **fields, "use_distributed_optimizer": config.optimizer.distributed}
