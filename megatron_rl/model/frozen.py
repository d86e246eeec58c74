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
    """Build this rank's chunks of a frozen model in evaluation mode; return them and the model's shape. A collective.

    The weights are not loaded here. Call the chunks under ``torch.no_grad``. Each chunk is wrapped
    in DistributedDataParallel, since the schedule takes only wrapped chunks. All parameters are
    frozen while it is built, so it (0.16.1) makes no buffer, bucket or hook, whatever
    ``megatron.ddp`` says.

    Afterwards the parameters that the policy trains get ``requires_grad=True`` here too, so that both
    models round their products in the same way.
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
        # with a frozen weight torch.matmul (2.13) could compute one product per token (head.py _in_token_order)
        for parameter in trained:
            parameter.requires_grad_(True)
        chunks.append(chunk.eval())
    return chunks, shape
