"""Attention with sinks: a learned logit per head beside the scores of every query, in the softmax's denominator.

gpt-oss has them in every layer (transformers 5.19 ``modeling_gpt_oss.py``: the logit is one more column, whose
probability is dropped). model/span_attention.py computes them.
"""

from __future__ import annotations

import torch

from megatron_rl.model.attention import TorchAttention

from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes  # isort: skip
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # isort: skip


class SinkAttention(TorchAttention):
    """Computes ``TorchAttention`` with sinks.

    softmax_offset: [h], those of this tensor rank's heads, by Megatron-Core's own name (0.16.1
        ``transformer/dot_product_attention.py``, ``softmax_type="learnable"``).
    """

    def __init__(self, config, *rest, **named):
        super().__init__(config, *rest, **named)
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the sinks under their global shape for ``dist_checkpointing``, so that another layout loads them."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets
        )
