"""The gated delta rule over chunks of tokens, in torch: the reference on every device, and the kernel on a CPU.

For one head with state S [d_k, d_v], key k, value v, query q, decay e^g and step β the rule is (Yang
et al. 2024, Gated Delta Networks, arXiv:2412.06464, eq. 10)

    S_t = e^{g_t} S_{t−1} + k_t u_tᵀ,    u_t = β_t (v_t − e^{g_t} S_{t−1}ᵀ k_t),    o_t = S_tᵀ q_t / √d_k

Over a chunk that begins with state S, with G_i the sum of g up to token i of the chunk, the u of all
its tokens solve a triangular system (section 3.3):

    (1 + A) U = diag(β) (V − diag(e^G) K S),    A_ij = β_i e^{G_i − G_j} k_i·k_j for j < i

So U = U₀ − W S, with U₀ and W found for all chunks at once, without any state. Then, depth after
depth (runs.py), with D_ij = e^{G_i − G_j} for j ≤ i:

    O = diag(e^G) Q S + (Q Kᵀ ∘ D) U,    S' = e^{G_C} S + Σ_j e^{G_C − G_j} k_j u_jᵀ

Every number is float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.model.delta_net.runs import Chunks, repeated

NORM_EPS = 1e-6  # of q's and k's lengths, as in transformers 5.19 ``l2norm``


def unit(heads: torch.Tensor) -> torch.Tensor:
    """Return heads [..., d] divided by their length √(Σx² + 1e-6)."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPS)


def chunked_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    step: torch.Tensor,
    chunks: Chunks,
) -> torch.Tensor:
    """Return the outputs [N, h, r, C, d_v] of the gated delta rule, float32. Each head of q and k serves r heads of v.

    query, key: [N, h, C, d_k], normed to length 1; N chunks of C tokens.
    value: [N, h, r, C, d_v].
    decay, step: [N, h, r, C], g ≤ 0 (the logarithm of the decay) and β.
    chunks: which chunk continues which. Rows that are no token are zeros in all five.
    """
    sums = decay.cumsum(-1)
    lower = torch.ones(chunks.tokens, chunks.tokens, dtype=torch.bool, device=query.device).tril()
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    # each token's u as U0 − W S
    system = (key @ key.transpose(-1, -2))[:, :, None] * between * step[..., None]
    from_start = sums.exp()[..., None]
    right = torch.cat([value * step[..., None], key[:, :, None] * (from_start * step[..., None])], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, of_state = solved.split([value.shape[-1], key.shape[-1]], -1)
    # what the state's output and the next state are made of
    query = query * query.shape[-1] ** -0.5
    scores = (query @ key.transpose(-1, -2))[:, :, None] * between
    queries = query[:, :, None] * from_start
    to_end = (sums[..., -1:] - sums).exp()[..., None]
    keys = (key[:, :, None] * to_end).transpose(-1, -2)
    whole = sums[..., -1, None, None].exp()
    return _by_depth((own, of_state, scores, queries, keys, whole), chunks)


def _by_depth(parts: Sequence[torch.Tensor], chunks: Chunks) -> torch.Tensor:
    """Return [N, h, r, C, d_v]: the outputs of all chunks, whose states follow from depth to depth.

    parts: U₀, W, (Q Kᵀ ∘ D), diag(e^G) Q, (diag(e^{G_C − G}) K)ᵀ and e^{G_C}, each [N, h, r, …].
    """
    outputs: list[torch.Tensor] = []
    state: torch.Tensor | None = None
    by_depth = zip(*(part.split(chunks.counts) for part in parts), strict=True)
    for depth, (own, of_state, scores, queries, keys, whole) in enumerate(by_depth):
        if state is None:
            outputs.append(scores @ own)
            state = keys @ own
            continue
        parents = chunks.parents[depth - 1]
        state = state[: len(own)] if parents is None else repeated(state, parents)
        steps = own - of_state @ state
        outputs.append(torch.matmul(queries, state) + scores @ steps)
        if depth < len(chunks.counts) - 1:
            state = state * whole + keys @ steps
    return torch.cat(outputs)
