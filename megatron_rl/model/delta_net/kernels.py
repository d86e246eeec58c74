"""The choice of the kernels of the gated delta rule: torch's, or those of flash-linear-attention on a GPU."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import re
from typing import Protocol

import torch

from megatron_rl.distributed.platform import HOST
from megatron_rl.distributed.requirements import compiler_fault, older
from megatron_rl.errors import ConfigError
from megatron_rl.model.delta_net.rule import laid_heads, rule_of_both
from megatron_rl.model.delta_net.runs import DeltaLayout
from megatron_rl.weights.model_shape import DeltaNetShape

log = logging.getLogger(__name__)

LEAST_FLA = (0, 6)
# Triton's releases, from the first to before the second, whose code of a gradient is wrong on Hopper. fla-core 0.6.0
# refuses them there in the backward pass, unless tilelang computes it (fla/ops/common/chunk_o.py).
WRONG_ON_HOPPER = "3.4.0", "3.7.1"
HOPPER = 9


class DeltaRule(Protocol):
    """Computes the gated delta rule of all runs of a micro-batch."""

    def __call__(
        self,
        convolved: torch.Tensor,
        decay: torch.Tensor,
        step: torch.Tensor,
        layout: DeltaLayout,
        shape: DeltaNetShape,
    ) -> torch.Tensor:
        """Return [T, heads, d_v], the outputs of a micro-batch's tokens.

        convolved: [rows, groups, …], each group's q, k and v, in the rows of ``layout.history``.
        decay, step: float32 [T, heads], g and β of each token.
        """


def torch_rule(
    convolved: torch.Tensor, decay: torch.Tensor, step: torch.Tensor, layout: DeltaLayout, shape: DeltaNetShape
) -> torch.Tensor:
    """Compute the gated delta rule by torch, in float32 (rule.py); ``DeltaRule`` describes arguments and result."""
    chunks, groups = layout.chunks, convolved.shape[1]
    both, value = laid_heads(convolved, chunks, shape.key_head_dim, shape.value_head_dim)
    numbers = chunks.of_tokens(torch.stack([decay, step], -1)).unflatten(0, (-1, chunks.tokens))
    decay, step = numbers.unflatten(2, (groups, -1)).movedim(1, -2).unbind(-1)
    outputs = rule_of_both(both, value, decay, step, chunks)
    rows = outputs.movedim(3, 1).flatten(2, 3).flatten(0, 1)
    return chunks.back(rows)


def choose_rule(setting: str) -> DeltaRule:
    """Return the kernels that the setting ``model.delta_kernel`` means here, and log their name once.

    ``auto`` is flash-linear-attention's in half precision on a GPU, if they can be used, else torch's.

    Raises ConfigError if the setting demands kernels that cannot be used.
    """
    return _chosen(setting, HOST.is_cuda)


@functools.cache
def _chosen(setting: str, is_cuda: bool) -> DeltaRule:
    fault = None if setting == "torch" else fla_fault() if is_cuda else "there is no GPU"
    if setting == "fla" and fault:
        raise ConfigError(
            f"model.delta_kernel=fla cannot be used here: {fault}; install megatron_rl[fla] on a GPU that its kernels "
            "run on, or set model.delta_kernel=auto"
        )
    if setting == "torch" or fault:
        log.info("gated delta nets run on torch's kernels%s", f" ({fault})" if fault else "")
        return torch_rule
    from megatron_rl.model.delta_net.fla import fla_rule

    version = importlib.metadata.version("fla-core")
    log.info(
        "gated delta nets run on the kernels of fla-core %s%s", version, ", float32 on torch's" * (setting == "auto")
    )
    return fla_rule if setting == "fla" else _half_by(fla_rule)


def _half_by(fla_rule: DeltaRule) -> DeltaRule:
    """Return ``fla_rule`` for half precision and torch's kernels for float32, which Triton's would round to TF32."""

    def rule(
        convolved: torch.Tensor, decay: torch.Tensor, step: torch.Tensor, layout: DeltaLayout, shape: DeltaNetShape
    ) -> torch.Tensor:
        chosen = torch_rule if convolved.dtype == torch.float32 else fla_rule
        return chosen(convolved, decay, step, layout, shape)

    return rule


def fla_fault() -> str | None:
    """Return why flash-linear-attention's kernels cannot be used; None if they can."""
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return "fla-core is not installed"
    if tuple(int(x) for x in re.findall(r"\d+", version)[:2]) < LEAST_FLA:
        return f"fla-core {version} is older than {'.'.join(map(str, LEAST_FLA))}"
    if fault := compiler_fault():
        return fault
    try:
        importlib.import_module("fla.ops.gated_delta_rule")
    except ImportError as error:
        return f"fla-core {version} cannot be imported ({error})"
    return hopper_fault() or None


def hopper_fault() -> str:
    """Return why a GPU of the kind Hopper cannot take the gradients of flash-linear-attention's kernels; "" if it can.

    Without this answer the first backward pass of a run would raise.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != HOPPER:
        return ""
    triton, (first, mended) = importlib.metadata.version("triton"), WRONG_ON_HOPPER
    if older(triton, first) or not older(triton, mended) or importlib.util.find_spec("tilelang"):
        return ""
    return f"its gradients are wrong on this GPU under triton {triton}: it needs triton {mended} or newer, or tilelang"
