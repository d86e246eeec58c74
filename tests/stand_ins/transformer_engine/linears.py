"""Linear, LayerNormLinear, GroupedLinear and RMSNorm, with the real parameters' names, marks and main_grad."""

from __future__ import annotations

import math

import torch

from tests.stand_ins.transformer_engine.contract import CALLS, contract, refuse, require
from tests.stand_ins.transformer_engine.tensor_ranks import Copy, Gather, ScatterSum, Sum

HARMLESS = ("get_rng_state_tracker", "rng_tracker_name", "init_method", "ub_name", "name")
MODES = (None, "column", "row")


class _Product(torch.autograd.Function):
    """Computes x Wᵀ. Backward adds the weight's gradient to main_grad where that is fused, and to no other place.

    The first micro-batch, where the module is told that it is that, is written over main_grad and not added. Autograd
    then gets memory of any content (``get_dummy_wgrad``), here NaN, so that a reader of it shows; nothing
    where the weight lacks ``grad_added_to_main_grad`` (module/linear.py, 2.3 to 2.20).
    """

    @staticmethod
    def forward(ctx, x, weight, fuse: bool, is_first: bool | None):
        ctx.save_for_backward(x, weight)
        ctx.overwrites = bool(is_first)
        ctx.parameter = weight if fuse and weight.requires_grad else None  # fuse: and autograd records
        if ctx.parameter is not None:
            require(hasattr(weight, "main_grad"), "fuse_wgrad_accumulation reads weight.main_grad")
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        for_x = gradient @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return for_x, None, None, None
        rows, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        if ctx.parameter is None:
            return for_x, rows.t() @ inputs, None, None
        parameter = ctx.parameter
        if ctx.overwrites:
            parameter.main_grad.zero_()
        parameter.main_grad.add_((rows.float().t() @ inputs.float()).to(parameter.main_grad.dtype))
        CALLS["added to main_grad"] += 1
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return for_x, None, None, None
        parameter.grad_added_to_main_grad = True
        content = 0.0 if getattr(parameter, "zero_out_wgrad", False) else math.nan
        return for_x, torch.full_like(parameter, content), None, None


def _mark(parameter: torch.nn.Parameter, dimension: int) -> None:
    """Mark a parameter as Transformer Engine does, which leaves one that bears a mark alone (its utils.py)."""
    if not any(hasattr(parameter, name) for name in ("tensor_model_parallel", "partition_dim", "partition_stride")):
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dimension, 1


class _Base(torch.nn.Module):
    """Holds what the linears share: sizes of this rank, the state that is empty outside FP8."""

    def _place(
        self, name: str, *, in_features, out_features, device, params_dtype, sequence_parallel=False,
        fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, bias=True, return_bias=False, parallel_mode=None,
        **unused,
    ) -> None:  # fmt: skip
        refuse(name, unused, HARMLESS)
        self.use_bias, self.return_bias, self.fuse_wgrad_accumulation = bias, return_bias, fuse_wgrad_accumulation
        self._given = dict(device=device, dtype=params_dtype)
        require(parallel_mode in MODES, f"parallel_mode {parallel_mode} not supported")
        self.parallel_mode, self.tp_group = parallel_mode, tp_group
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        for mode, features in (("column", out_features), ("row", in_features)):
            require(parallel_mode != mode or features % self.tp_size == 0, f"{features} features on {self.tp_size}")
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel

    def _take_in(self, x: torch.Tensor) -> torch.Tensor:
        if self.parallel_mode != "column" or self.tp_size == 1:
            return x
        return (Gather if self.sequence_parallel else Copy).apply(x, self.tp_group)

    def _give_out(self, x: torch.Tensor) -> torch.Tensor:
        if self.parallel_mode != "row" or self.tp_size == 1:
            return x
        return (ScatterSum if self.sequence_parallel else Sum).apply(x, self.tp_group)

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None: ...

    def _weight(self) -> torch.nn.Parameter:
        weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **self._given))
        _mark(weight, 1 if self.parallel_mode == "row" else 0)
        return weight

    def _make_linear(self) -> None:
        self.weight = self._weight()
        if self.use_bias:
            self.bias = torch.nn.Parameter(torch.zeros(self.out_features, **self._given))
            if self.parallel_mode == "row":
                self.bias.sequence_parallel = self.sequence_parallel
            elif self.parallel_mode == "column":
                _mark(self.bias, 0)
        else:
            self.bias = torch.empty(0)

    def _fuses(self) -> bool:
        return self.fuse_wgrad_accumulation and torch.is_grad_enabled()

    def _linear(self, x: torch.Tensor, is_first: bool | None):
        require(x.dtype == self.weight.dtype, f"an input of {x.dtype} for weights of {self.weight.dtype}")
        require(x.shape[-1] == self.in_features, f"an input of {x.shape[-1]} features for {self.in_features}")
        out = self._give_out(_Product.apply(self._take_in(x), self.weight, self._fuses(), is_first))
        if self.return_bias:
            return out, self.bias
        return out + self.bias if self.use_bias else out


class Linear(_Base):
    @contract("Linear.__init__")
    def __init__(self, **given):
        super().__init__()
        self._place("Linear", **given)
        self._make_linear()

    @contract("Linear.forward")
    def forward(self, *, inp, is_first_microbatch=None, **unused):
        refuse("Linear.forward", unused)
        return self._linear(inp, is_first_microbatch)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool) -> torch.Tensor:
    """Compute the whole norm in float32, the weight's product too, and round once, as the kernel does."""
    factor = 1 + weight.float() if zero_centered else weight.float()
    return torch.nn.functional.rms_norm(x.float(), weight.shape, factor, eps).to(x.dtype)


class LayerNormLinear(_Base):
    @contract("LayerNormLinear.__init__")
    def __init__(self, *, normalization, eps=1e-5, zero_centered_gamma=False, **given):
        super().__init__()
        self._place("LayerNormLinear", **given)
        require(normalization == "RMSNorm", "the stand-in has RMSNorm only")
        require(self.parallel_mode != "row", "LayerNormLinear has no row parallelism")
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(self.in_features, **self._given))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self._make_linear()

    @contract("LayerNormLinear.forward")
    def forward(self, *, inp, is_first_microbatch=None, **unused):
        refuse("LayerNormLinear.forward", unused)
        normed = _rms_norm(inp, self.layer_norm_weight, self.eps, self.zero_centered_gamma)
        return self._linear(normed, is_first_microbatch)


class GroupedLinear(_Base):
    """Has a weight per expert, and leaves collectives over tensor ranks to the dispatcher."""

    @contract("GroupedLinear.__init__")
    def __init__(self, *, num_gemms, **given):
        super().__init__()
        self._place("GroupedLinear", **given)
        require(not self.use_bias, "the stand-in's GroupedLinear has no bias")
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", self._weight())
        self.fp8_meta, self.fp8, self.fp8_calibration = {"fp8_checkpoint": False}, False, False

    @contract("GroupedLinear.forward")
    def forward(self, *, inp, m_splits, is_first_microbatch=None, **unused):
        refuse("GroupedLinear.forward", unused)
        require(isinstance(m_splits, list) and all(type(n) is int for n in m_splits), "m_splits is a list of ints")
        require(len(m_splits) == self.num_gemms, "Number of splits should match number of GEMMs.")
        require(sum(m_splits) == inp.shape[0], f"splits of {sum(m_splits)} rows and an input of {inp.shape[0]}")
        parts = [
            _Product.apply(x, getattr(self, f"weight{i}"), self._fuses(), is_first_microbatch)
            for i, x in enumerate(inp.split(m_splits))
        ]
        return torch.cat(parts)


class RMSNorm(torch.nn.Module):
    @contract("RMSNorm.__init__")
    def __init__(
        self, *, normalized_shape=None, hidden_size=None, eps=1e-5, sequence_parallel=None, params_dtype=None, **more
    ):
        super().__init__()
        require((normalized_shape is None) != (hidden_size is None), "one of normalized_shape and hidden_size")
        self.zero_centered_gamma = more.pop("zero_centered_gamma", False)
        self._make(normalized_shape=normalized_shape or hidden_size, eps=eps, dtype=params_dtype, **more)
        self.sequence_parallel = sequence_parallel
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel

    @contract("RMSNormOperation.__init__")
    def _make(self, *, normalized_shape, eps, device, dtype, **unused):
        refuse("RMSNorm", unused)
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(normalized_shape, device=device, dtype=dtype))

    @contract("RMSNorm.forward")
    def forward(self, *, input, **unused):
        refuse("RMSNorm.forward", unused)
        return _rms_norm(input, self.weight, self.eps, self.zero_centered_gamma)

    get_extra_state, set_extra_state = _Base.get_extra_state, _Base.set_extra_state
