"""Functions that make the backward products of linear layers add weight gradients to main_grad directly.

main_grad is the gradient buffer of Megatron-Core's DistributedDataParallel.
"""

from __future__ import annotations

import torch

from megatron_rl.distributed import platform  # noqa: F401  (before megatron.core)
from megatron_rl.model.logprob.linear import add_product

from megatron.core.tensor_parallel import layers as tensor_parallel  # isort: skip


def fuse_weight_gradients(model: torch.nn.Module) -> None:
    """Make the backward products of Transformer Engine's linears add their weight gradients to main_grad.

    So each micro-batch's gradient reaches a float32 main_grad without rounding to bfloat16.
    This relies on three facts of Transformer Engine 2.3 and 2.20 (pytorch/module/linear.py,
    layernorm_linear.py, grouped_linear.py):

    - It reads the field ``fuse_wgrad_accumulation`` at each forward.
    - If a weight has ``grad_added_to_main_grad``, which DistributedDataParallel sets, autograd gets an
      uninitialised tensor as its gradient. DistributedDataParallel's hook ignores that tensor, as in
      model/logprob/linear.py.
    - The very first micro-batch of a module (``is_first_microbatch``) overwrites main_grad instead
      of adding to it. At that time main_grad holds zeros.

    Under FP8 Megatron-Core sets ``is_first_microbatch`` at every call of the schedule. A second
    call before the optimizer's step would overwrite the first call's gradients. So the caller
    leaves FP8 models unfused.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


class WeightGradients:
    """Replaces Apex's ``fused_weight_gradient_mlp_cuda``, which Megatron-Core's linears call for weight gradients."""

    @staticmethod
    def wgrad_gemm_accum_fp32(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        add_product(main_grad, grad_output, total_input)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def accumulate_weight_gradients(model: torch.nn.Module) -> None:
    """Make the backward products of Megatron-Core's own linears add their weight gradients to main_grad.

    The linears can do so (0.16.1 and 0.19.2 ``tensor_parallel/layers.py``), but their constructor
    refuses the field ``gradient_accumulation_fusion`` without Apex's kernel. So the field is set
    after construction; Megatron-Core reads it at each forward. In place of Apex's kernel, torch's
    product writes a float32 output. The output layer is left out, since model/logprob/linear.py
    adds its gradient.
    """
    if not hasattr(tensor_parallel, "fused_weight_gradient_mlp_cuda"):
        tensor_parallel.fused_weight_gradient_mlp_cuda = WeightGradients
    linears = (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)
    for name, module in model.named_modules():
        if isinstance(module, linears) and name != "output_layer":
            module.gradient_accumulation_fusion = True
