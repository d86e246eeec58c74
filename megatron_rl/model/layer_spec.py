"""The modules of a transformer layer: Transformer Engine's if they can be built, else torch's."""

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
    """Computes the norm in float32 and casts it back, as Hugging Face's Qwen2RMSNorm and LlamaRMSNorm do.

    Both round before the product with the weight, and after it. On a GPU torch's fused kernel rounds
    only after it. Megatron-Core's wrapper of torch's norm refuses sequence parallelism. Here the mark
    on the weight is enough for finalize to sum its gradient.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32 or x.is_cuda:
            return super().forward(x)
        return self.weight * torch.nn.functional.rms_norm(x.float(), self.normalized_shape, None, self.eps).to(x.dtype)


def choose_layer_spec(setting: str, dtype: str) -> str:
    """Return "transformer_engine" or "torch" for ``model.layer_spec``.

    ``auto`` takes torch for float32: Transformer Engine's attention has kernels for packed sequences in half precision
    only. Raises ConfigError if Transformer Engine is demanded and cannot be used.
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
    """Return the submodules of a stage's block: dense layers and mixtures of experts.

    layers: the layers' numbers in the whole model.
    share_prompts: whether Transformer Engine's layers must take samples that share a prompt;
        torch's layers always can.

    Transformer Engine's experts are grouped linears, and the norm before a mixture is a module of
    its own. Both have run on a stand-in of its modules (tests/equality/test_transformer_engine.py),
    not on a GPU.
    """
    mixtures = config.moe_layer_freq  # Megatron-Core's default of 1 is every layer
    is_mixture = [isinstance(mixtures, int) or bool(mixtures[layer]) for layer in layers]
    specs = {each: _layer_spec(config, kind, each, share_prompts=share_prompts) for each in set(is_mixture)}
    norm = RMSNorm
    if kind == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm as norm
    return TransformerBlockSubmodules(layer_specs=[specs[each] for each in is_mixture], layer_norm=norm)


def _layer_spec(config: TransformerConfig, kind: str, is_mixture: bool, *, share_prompts: bool) -> ModuleSpec:
    """Return the submodules of one layer.

    is_mixture: whether its MLP is a mixture of experts; without experts in the model it is dense anyway.
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
    """Return an MLP with these linears as a layer's ``mlp`` field takes it: 0.16.1 a ModuleSpec, 0.19.2 a function."""
    parts = MLPSubmodules(linear_fc1=linear_fc1, linear_fc2=linear_fc2)
    if hasattr(module, "as_mlp_submodule"):
        return functools.partial(module.as_mlp_submodule, submodules=parts)
    return ModuleSpec(module=module, submodules=parts)


def settle_expert_biases(model: torch.nn.Module) -> None:
    """Mend the biases of the experts' down projections: their product, and their marks.

    Experts with biases are whole on every rank (0.16.1 ``transformer_config.py``: expert tensor
    size 1), so a down projection has nothing to reduce. Then Megatron-Core's linear returns a view
    of the product, and its MLP may not add the bias to a view. ``explicit_expert_comm`` avoids the
    view. Two marks of the bias are wrong as well:

    - ``sequence_parallel`` would sum its gradient over tensor ranks, but an expert's gradient is
      reduced over the ranks that hold the expert.
    - Without ``tensor_model_parallel`` the gradient norm would count one tensor rank's bias, but
      the ranks hold different experts.
    """
    for module in model.modules():
        if isinstance(module, tensor_parallel.RowParallelLinear) and module.is_expert and module.bias is not None:
            module.explicit_expert_comm = True
            module.bias.sequence_parallel = False
            tensor_parallel.set_tensor_model_parallel_attributes(module.bias, True, 0, 1)
