"""Weights' gradients added to main_grad within the product itself: Transformer Engine's linears, and torch's."""

from __future__ import annotations

import torch

from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)
from megatron_rl.model.logprob.linear import add_product

from megatron.core.tensor_parallel import layers as tensor_parallel  # isort: skip


def fuse_weight_gradients(model: torch.nn.Module) -> None:
    """Have Transformer Engine's linears add their weights' gradients to main_grad within the product itself.

    Read in 2.3 and 2.20 (pytorch/module/linear.py, layernorm_linear.py, grouped_linear.py): the
    field is read at each forward, and a weight with ``grad_added_to_main_grad``, which
    Megatron-Core's DistributedDataParallel gives it, then hands autograd memory of any content, as
    model/logprob/linear.py does for the output weight. Each micro-batch's gradient reaches a
    float32 main_grad without a rounding to bfloat16. A module's very first micro-batch is written
    over main_grad, which holds zeros then, and not added (``is_first_microbatch``). Under FP8
    Megatron-Core sets that again at every call of the schedule, so that a second call before the
    optimizer's step would lose the first one's
    gradients: nothing is fused there.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


class WeightGradients:
    """Stands for Apex's ``fused_weight_gradient_mlp_cuda``, which Megatron-Core's own linears call where they fuse."""

    @staticmethod
    def wgrad_gemm_accum_fp32(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        add_product(main_grad, grad_output, total_input)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def accumulate_weight_gradients(model: torch.nn.Module) -> None:
    """Have torch's linears add their weights' gradients to main_grad within the product, as ``fuse_weight_gradients``.

    Megatron-Core's linears know how (0.16.1 and 0.19.2 ``tensor_parallel/layers.py``), but refuse
    the field without Apex's kernel, whose name does not exist then: torch's product with a float32
    output takes its place. The field is read at each forward. The output layer is left out:
    model/logprob/linear.py adds its gradient.
    """
    if not hasattr(tensor_parallel, "fused_weight_gradient_mlp_cuda"):
        tensor_parallel.fused_weight_gradient_mlp_cuda = WeightGradients
    linears = (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)
    for name, module in model.named_modules():
        if isinstance(module, linears) and name != "output_layer":
            module.gradient_accumulation_fusion = True
