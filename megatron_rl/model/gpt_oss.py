"""The modules of gpt-oss that Megatron-Core lacks: attention with sinks, norms that round once, the gate's activation.

A sink is a learned logit per head. It adds one term to the denominator of each query's softmax,
beside the terms of the keys. In transformers 5.19 (``modeling_gpt_oss.py``) it is one more column
of scores, whose probability is dropped. model/attention/flash.py computes attention with sinks.
"""

from __future__ import annotations

import torch

from megatron_rl.errors import ConfigError
from megatron_rl.model.attention.packed import TorchAttention
from megatron_rl.model.post_norm import WideRMSNorm
from megatron_rl.weights.families.gpt_oss import QUICK_GELU

from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # isort: skip


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return x · sigmoid(1.702 x).

    It replaces Megatron-Core's own function, which torch compiles anew for every input shape.
    """
    return x * torch.sigmoid(QUICK_GELU * x)


class SinkAttention(TorchAttention):
    """Computes ``TorchAttention`` with sinks, a learned logit per head in the denominator of each query's softmax.

    softmax_offset: [h], the sinks of this tensor rank's h heads. The name is Megatron-Core's
        (0.16.1 ``transformer/dot_product_attention.py``, ``softmax_type="learnable"``).
    """

    def __init__(self, config, *rest, **named):
        super().__init__(config, *rest, **named)
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return {key: ShardedTensor} of the sinks under their global shape, for ``dist_checkpointing``.

        So another parallel layout can load them.
        """
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets
        )


def put_gpt_oss_layers(spec: TransformerBlockSubmodules, layer_spec: str) -> None:
    """Turn the specs of a model chunk's layers into specs of gpt-oss layers, in place.

    They have attention with sinks, and norms that round only after the product with the weight.
    Raises ConfigError for Transformer Engine's layers, with which gpt-oss was not tested.
    """
    if layer_spec != "torch":
        raise ConfigError(
            f"model.layer_spec={layer_spec}: attention sinks and experts with biases (gpt_oss) were tested on torch's "
            "layers alone; set model.layer_spec=torch"
        )
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = WideRMSNorm
        parts.self_attention.submodules.core_attention = SinkAttention
    spec.layer_norm = WideRMSNorm
