"""The spec of a transformer layer's modules: Transformer Engine's modules if they can be built, else torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from megatron_rl.distributed.platform import transformer_engine_importable
from megatron_rl.errors import ConfigError
from megatron_rl.model.attention.packed import TorchAttention

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.transformer.mlp import MLP, MLPSubmodules  # isort: skip
from megatron.core.tensor_parallel import layers as tensor_parallel  # isort: skip
from megatron.core.transformer.moe import moe_utils  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

# 0.16.1's router asks whether this name is None, but without Transformer Engine it is not defined;
# 0.19.2 defines it.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None


class RMSNorm(torch.nn.RMSNorm):
    """Computes an RMS norm in float32, rounds it to the input's dtype, and multiplies it by the weight.

    Hugging Face's Qwen2RMSNorm and LlamaRMSNorm do the same, so they round before the product with
    the weight and after it. On a GPU torch's fused kernel rounds only after the product.

    Megatron-Core's wrapper of torch's norm refuses sequence parallelism. Here the weight has the
    attribute ``sequence_parallel``. That is enough for Megatron-Core's ``finalize_model_grads`` to
    sum its gradient over tensor ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32 or x.is_cuda:
            return super().forward(x)
        return self.weight * torch.nn.functional.rms_norm(x.float(), self.normalized_shape, None, self.eps).to(x.dtype)


def choose_layer_spec(setting: str, dtype: str) -> str:
    """Return "transformer_engine" or "torch", the modules that the setting ``model.layer_spec`` means here.

    ``auto`` is Transformer Engine if it can be used, except in float32. Its attention takes packed
    sequences only in half precision. Raises ConfigError if the setting demands Transformer Engine
    and it cannot be used.
    """
    if setting == "torch" or (setting == "auto" and dtype == "float32"):
        return "torch"
    if transformer_engine_importable():
        return "transformer_engine"
    if setting == "transformer_engine":
        raise ConfigError(
            "model.layer_spec=transformer_engine, but Transformer Engine cannot be used here (not installed, "
            "does not import, or no GPU); run python -m megatron_rl.doctor, or use model.layer_spec=auto"
        )
    return "torch"


def block_spec(
    config: TransformerConfig, kind: str, layers: Sequence[int], *, share_prompts: bool = False
) -> TransformerBlockSubmodules:
    """Return the spec of a pipeline stage's block of layers, dense ones and mixtures of experts.

    kind: "transformer_engine" or "torch", whose modules are taken.
    layers: the layers' numbers in the whole model, from 0.
    share_prompts: whether Transformer Engine's layers must take samples that share one copy of
        their prompt; torch's layers always can.

    With Transformer Engine a layer's experts are grouped linears, and the norm before a mixture is
    a separate module. Both were tested on plain torch modules in place of Transformer Engine's
    (tests/equality/test_transformer_engine.py), not on a GPU.
    """
    mixtures = config.moe_layer_freq  # Megatron-Core's default of 1 is every layer
    is_mixture = [isinstance(mixtures, int) or bool(mixtures[layer]) for layer in layers]
    specs = {each: _layer_spec(config, kind, each, share_prompts=share_prompts) for each in set(is_mixture)}
    norm = RMSNorm
    if kind == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm as norm
    return TransformerBlockSubmodules(layer_specs=[specs[each] for each in is_mixture], layer_norm=norm)


def _layer_spec(config: TransformerConfig, kind: str, is_mixture: bool, *, share_prompts: bool) -> ModuleSpec:
    """Return the spec of one layer.

    is_mixture: whether the layer's MLP is a mixture of experts. If the model has no experts, the
        MLP is dense in either case.
    """
    experts = config.num_moe_experts if is_mixture else None
    mixture = dict(num_experts=experts, moe_grouped_gemm=config.moe_grouped_gemm)
    if kind == "transformer_engine":
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm, **mixture)
        if share_prompts:
            from megatron_rl.model.attention.transformer_engine import SharedPromptAttention

            layer.submodules.self_attention.submodules.core_attention = SharedPromptAttention
        return layer
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm, **mixture)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = TorchAttention
    if config.qk_layernorm:  # 0.19 raises on q/k norms that the config does not ask for
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


def mlp_spec(module: type[MLP], linear_fc1: type, linear_fc2: type) -> ModuleSpec | Callable[..., MLP]:
    """Return the value of a layer spec's ``mlp`` field for an MLP class and the classes of its two linears.

    Megatron-Core 0.16.1 takes a ModuleSpec, 0.19.2 a function that builds the MLP.
    """
    parts = MLPSubmodules(linear_fc1=linear_fc1, linear_fc2=linear_fc2)
    if hasattr(module, "as_mlp_submodule"):
        return functools.partial(module.as_mlp_submodule, submodules=parts)
    return ModuleSpec(module=module, submodules=parts)


def settle_expert_biases(model: torch.nn.Module) -> None:
    """Correct how Megatron-Core adds and reduces the biases of the experts' down projections.

    An expert with biases is not split over tensor ranks (0.16.1 ``transformer_config.py``: expert
    tensor size 1), so a down projection has nothing to reduce. Then Megatron-Core's linear returns a
    view of the product, to which its MLP cannot add the bias in place. ``explicit_expert_comm=True``
    avoids the view. Two attributes of the bias are changed as well:

    - ``sequence_parallel`` becomes False. True would sum the bias's gradient over tensor ranks, but
      an expert's gradient is reduced over the ranks that hold the expert.
    - ``tensor_model_parallel`` becomes True. Without it the gradient norm would count the bias of one
      tensor rank only, but the ranks hold different experts.
    """
    for module in model.modules():
        if isinstance(module, tensor_parallel.RowParallelLinear) and module.is_expert and module.bias is not None:
            module.explicit_expert_comm = True
            module.bias.sequence_parallel = False
            tensor_parallel.set_tensor_model_parallel_attributes(module.bias, True, 0, 1)
