"""Inputs of the gated delta rule in packed micro-batches, and the rule run by run over whole sequences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from megatron_rl.model.attention.layout import Layout, lay_out
from megatron_rl.model.delta_net.kernels import DeltaRule
from megatron_rl.model.delta_net.rule import unit
from megatron_rl.model.delta_net.runs import DeltaLayout
from megatron_rl.weights.model_shape import DeltaNetShape

SHAPE = DeltaNetShape(layers=(0,), key_heads=2, value_heads=4, key_head_dim=16, value_head_dim=8, conv_tokens=4)
CPU = torch.device("cpu")
# A rule over one sequence: query, key [t, h, d_k], value [t, h, d_v], decay and step [t, h] → outputs [t, h, d_v].
SequenceRule = Callable[..., torch.Tensor]


def layouts() -> dict[str, DeltaLayout]:
    """Return micro-batches of several sequences: without shared prompts, with one, and with several and pads."""
    prompts, responses = np.array([70, 70, 70, 5, 5, 20]), np.array([3, 66, 1, 2, 9, 30])
    shared = lay_out(prompts, responses, np.array([0, 0, 0, 1, 1, 2]), pad_multiple=4)
    few = lay_out(np.array([66, 66]), np.array([66, 3]), np.array([0, 0]))
    packed = {"alone": Layout.of((65, 1, 40, 128)), "few": few, "shared": shared}
    return {name: DeltaLayout.of(layout, SHAPE.conv_tokens - 1, CPU) for name, layout in packed.items()}


def inputs(layout: DeltaLayout, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Return random rows of the convolution, in ``dtype``, and each token's g and β, as a rule takes them."""
    random = torch.Generator().manual_seed(0)
    width = 2 * SHAPE.key_head_dim + SHAPE.value_heads // SHAPE.key_heads * SHAPE.value_head_dim
    rows = torch.randn(layout.history.rows.size, SHAPE.key_heads, width, generator=random)
    decay, step = torch.rand(2, layout.tokens, SHAPE.value_heads, generator=random)
    return rows.to(dtype).requires_grad_(), (-decay).requires_grad_(), step.requires_grad_()


def results(rule: DeltaRule, layout: DeltaLayout, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Return the outputs of the runs' tokens, and the gradients of all three inputs; outputs elsewhere are zeros."""
    given = inputs(layout, dtype)
    outputs = rule(*given, layout, SHAPE)
    coefficients = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1)).to(outputs.dtype)
    return outputs.detach(), *torch.autograd.grad(outputs, given, coefficients)


def run_by_run(rule: SequenceRule) -> DeltaRule:
    """Return ``rule`` over each run with the whole sequence before it: a prompt is computed for each response."""

    def over_runs(rows, decay, step, layout: DeltaLayout, shape: DeltaNetShape) -> torch.Tensor:
        width, outputs = shape.key_head_dim, torch.zeros(layout.tokens, shape.value_heads, shape.value_head_dim)
        for number, run in enumerate(layout.runs):
            chain = [number] if run.parent < 0 else [run.parent, number]
            own = torch.cat([layout.starts[i] + torch.arange(layout.runs[i].tokens) for i in chain])
            tokens = torch.cat([layout.runs[i].start + torch.arange(layout.runs[i].tokens) for i in chain])
            query, key, value = rows[own].float().split([width, width, rows.shape[-1] - 2 * width], -1)
            each = shape.value_heads // shape.key_heads
            heads = (unit(x).repeat_interleave(each, 1) for x in (query, key))
            found = rule(*heads, value.reshape(len(own), -1, shape.value_head_dim), decay[tokens], step[tokens])
            outputs = outputs.index_put((tokens[-run.tokens :],), found[-run.tokens :])
        return outputs

    return over_runs


def recurrence(query, key, value, decay, step, state=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs and the last state of the rule, token by token (rule.py, eq. 10)."""
    outputs = []
    state = torch.zeros(query.shape[1], query.shape[2], value.shape[2]) if state is None else state
    for q, k, v, g, beta in zip(query, key, value, decay, step, strict=True):
        state = state * g.exp()[:, None, None]
        u = beta[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
        state = state + k[:, :, None] * u[:, None]
        outputs.append(torch.einsum("hk,hkv->hv", q, state) * query.shape[2] ** -0.5)
    return torch.stack(outputs), state


def errors(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Return the largest difference of each result over the largest number of what is wanted."""
    names = ("outputs", "rows", "decay", "step")
    pairs = zip(names, found, wanted, strict=True)
    return {name: float((x.float() - y.float()).abs().max() / y.float().abs().max()) for name, x, y in pairs}
