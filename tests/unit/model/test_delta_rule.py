"""Checks the gated delta rule, its convolution and its FLOPs against loops over tokens, in float64 on small heads."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megatron_rl.model.attention.layout import lay_out
from megatron_rl.model.delta_net.layer import _GatedNorm, causal_convolution
from megatron_rl.model.delta_net.rule import chunked_delta_rule, unit, unit_inverse
from megatron_rl.model.delta_net.runs import DeltaLayout
from megatron_rl.weights.model_shape import DeltaNetShape

CASES = {  # prompts, responses, groups; chunks of 64 and of 16 tokens
    "alone": ([0, 0, 0], [70, 200, 130], None),
    "shared prompts": ([9, 9, 100, 100, 100], [70, 20, 1, 130, 64], [0, 0, 1, 1, 1]),
    "short": ([0, 3, 3], [5, 16, 2], [0, 1, 1]),
}
HEADS, EACH, KEY, VALUE = 2, 3, 8, 4


def layout_of(case: str) -> DeltaLayout:
    prompts, responses, groups = CASES[case]
    groups = None if groups is None else np.array(groups)
    return DeltaLayout.of(lay_out(np.array(prompts), np.array(responses), groups), 3, torch.device("cpu"))


def by_token(layout: DeltaLayout, q, k, v, g, beta) -> torch.Tensor:
    """Return [T, h, r, d_v], token by token: the formula of rule.py, each run from its parent's last state."""
    ends, outputs = [], v.new_zeros(v.shape)
    zeros = v.new_zeros(HEADS, EACH, KEY, VALUE)
    for run in layout.runs:
        state = ends[run.parent] if run.parent >= 0 else zeros
        for t in range(run.start, run.start + run.tokens):
            state = state * g[t].exp()[..., None, None]
            taken = beta[t][..., None] * (v[t] - torch.einsum("hk,hrkv->hrv", k[t], state))
            state = state + torch.einsum("hk,hrv->hrkv", k[t], taken)
            outputs = outputs.index_put((torch.tensor(t),), torch.einsum("hk,hrkv->hrv", q[t], state) * KEY**-0.5)
        ends.append(state)
    return outputs


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(case: str) -> None:
    layout = layout_of(case)
    chunks, tokens = layout.chunks, layout.chunks.back.size
    torch.manual_seed(0)
    q, k = torch.randn(2, tokens, HEADS, KEY, dtype=torch.float64)
    v, weight = torch.randn(2, tokens, HEADS, EACH, VALUE, dtype=torch.float64)
    g, beta = -torch.rand(tokens, HEADS, EACH).double(), torch.rand(tokens, HEADS, EACH).double()
    given = [x.requires_grad_() for x in (q, k, v, g, beta)]

    def laid(x: torch.Tensor) -> torch.Tensor:
        return chunks.of_tokens(x).unflatten(0, (-1, chunks.tokens))

    heads = laid(unit(q)).transpose(1, 2), laid(unit(k)).transpose(1, 2)
    rest = laid(v).movedim(1, 3), laid(g).movedim(1, -1), laid(beta).movedim(1, -1)
    found = [chunked_delta_rule(*heads, *rest, chunks)]
    wanted = by_token(layout, unit(q), unit(k), v, g, beta)
    gradients = torch.autograd.grad((wanted * weight).sum(), given)
    for each in found:
        each = chunks.back(each.movedim(3, 1).flatten(0, 1))
        torch.testing.assert_close(each, wanted, rtol=1e-10, atol=1e-12)
        own_gradients = torch.autograd.grad((each * weight).sum(), given, retain_graph=True)
        for own, other in zip(own_gradients, gradients, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("size", [1, 16, 24, 64])
def test_inverse_is_the_inverse(size: int) -> None:
    below = torch.randn(3, 2, size, size, dtype=torch.float64).mul_(0.3).tril_(-1)
    one = torch.eye(size, dtype=torch.float64).expand_as(below)
    torch.testing.assert_close(unit_inverse(below) @ (below + one), one.contiguous(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_convolution_is_torchs_and_silu(rows: int) -> None:
    x, weight = torch.randn(rows, 9000, requires_grad=True), torch.randn(9000, 4, requires_grad=True)
    wanted = F.silu(F.conv1d(F.pad(x.t(), (3, 0)), weight[:, None], groups=9000)).t()
    found, gradient = causal_convolution(x, weight), torch.randn(rows, 9000)
    torch.testing.assert_close(found, wanted)
    for own, other in zip(*(torch.autograd.grad(y, (x, weight), gradient) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_gated_norm_is_torchs_times_silu() -> None:
    """Over several blocks of rows, result and gradients."""
    outputs, gate = (x.requires_grad_() for x in torch.randn(2, 300, 16, 64))
    weight, gradient = torch.randn(64, requires_grad=True), torch.randn(300, 16, 64)
    wanted = weight * F.rms_norm(outputs, (64,), None, 1e-6) * F.silu(gate)
    found = _GatedNorm.apply(outputs, gate, weight, 1e-6)
    torch.testing.assert_close(found, wanted)
    given = (outputs, gate, weight)
    for own, other in zip(*(torch.autograd.grad(y, given, gradient) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_flops_are_those_of_the_products() -> None:
    """One chunk more takes the products of 64 tokens; the counter leaves out small triangular systems."""
    shape = DeltaNetShape(layers=(0,), key_heads=2, value_heads=6, key_head_dim=64, value_head_dim=32, conv_tokens=4)
    counts = []
    for number in (3, 4):
        chunks = DeltaLayout.of(lay_out(np.array([0]), np.array([64 * number]), None), 3, torch.device("cpu")).chunks
        heads, values = torch.zeros(2, number, 2, 64, 64), torch.zeros(number, 2, 3, 64, 32)
        with FlopCounterMode(display=False) as counter:
            chunked_delta_rule(*heads, values, *torch.zeros(2, number, 2, 3, 64), chunks)
        counts.append(counter.get_total_flops())
    assert 2 * 64 * shape.rule_cost == pytest.approx(counts[1] - counts[0], rel=0.02)
