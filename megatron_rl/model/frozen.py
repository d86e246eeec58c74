"""A second, frozen model: the reference policy under ``reference.placement=device``, or a teacher."""

from __future__ import annotations

from typing import Any

from megatron_rl.distributed.topology import Topology
from megatron_rl.model.build import build_model
from megatron_rl.model.settings import ModelSettings
from megatron_rl.weights.model_shape import ModelShape

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # isort: skip


def build_frozen(
    settings: ModelSettings, hf_config: Any, topology: Topology
) -> tuple[list[DistributedDataParallel], ModelShape]:
    """Build this rank's frozen chunks in evaluation mode, to be run under ``torch.no_grad``; return their shape too.

    A collective.

    Their weights hold no meaning yet. The chunks are wrapped as the schedule needs them: over
    frozen parameters DistributedDataParallel (0.16.1) makes no buffer, no bucket and no hook,
    whatever the policy's ``megatron.ddp`` asks for. Once wrapped, their parameters require a
    gradient where the policy's do: without a graph that costs nothing, and for a weight that
    requires none ``torch.matmul`` (2.13) computes one product per token wherever the activations'
    strides cannot be folded, with other rounding.
    """
    models, shape = build_model(settings, hf_config, topology)
    if settings.lora.rank is not None:
        from megatron_rl.model.lora.adapters import put_adapters

        put_adapters(models, shape, settings.lora, topology, settings.seed)
    chunks = []
    for model in models:
        trained = [p for p in model.parameters() if p.requires_grad]
        model.requires_grad_(False)
        chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        assert not chunk.buffers and not chunk.expert_parallel_buffers and not chunk.grad_accs
        for parameter in trained:
            parameter.requires_grad_(True)
        chunks.append(chunk.eval())
    return chunks, shape
