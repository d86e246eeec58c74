"""FusedAdam and the functions over lists of tensors that Megatron-Core's optimizer calls."""

from __future__ import annotations

import torch

from tests.stand_ins.transformer_engine.contract import contract, refuse, require


class FusedAdam(torch.optim.AdamW):
    """Is AdamW, with one count of steps per group, in the group, as the kernel's (optimizers/fused_adam.py)."""

    @contract("FusedAdam.__init__")
    def __init__(self, *, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True, **unused):
        refuse("FusedAdam", unused, ("bias_correction", "exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype"))
        require(adam_w_mode, "the stand-in is AdamW")
        require(unused.get("bias_correction", True), "the stand-in corrects the moments' bias")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=False)

    def step(self, closure=None, grad_scaler=None):
        for group in self.param_groups:
            count = group.get("step", 0)
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.grad is not None and state:
                    state["step"] = torch.tensor(float(count))
        super().step(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                self.state[parameter].pop("step", None)


class _MultiTensorApply:
    @contract("MultiTensorApply.__call__")
    def __call__(self, *, op, noop_flag_buffer, tensor_lists, args=()):
        return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = _MultiTensorApply()


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor=False):
    require(not per_tensor, "the stand-in has the norm of all only")
    (tensors,) = tensor_lists
    squares = [x.detach().double().square().sum() for x in tensors]
    return torch.stack(squares).sum().sqrt().float().view(1), torch.empty(0)


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)
