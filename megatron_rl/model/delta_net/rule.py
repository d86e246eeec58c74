"""The gated delta rule over chunks of tokens, in torch: the reference on every device, and the kernel on a CPU.

For one head with state S [d_k, d_v], key k, value v, query q, decay e^g and step β the rule is (Yang
et al. 2024, Gated Delta Networks, arXiv:2412.06464, eq. 10)

    S_t = e^{g_t} S_{t−1} + k_t u_tᵀ,    u_t = β_t (v_t − e^{g_t} S_{t−1}ᵀ k_t),    o_t = S_tᵀ q_t / √d_k

Over a chunk that begins with state S, with G_i the sum of g up to token i of the chunk, the u of all
its tokens solve a triangular system (section 3.3):

    (1 + A) U = R,    R = diag(β) (V − diag(e^G) K S),    A_ij = β_i e^{G_i − G_j} k_i·k_j for j < i

So U = (1 + A)⁻¹ R. With D_ij = e^{G_i − G_j} for j ≤ i, and M = Q Kᵀ ∘ D,

    O = diag(e^G) Q S + M U,    S' = e^{G_C} S + Kᵀ diag(e^{G_C − G}) U

Chunks are computed depth after depth (runs.py), so that what a depth makes stays in a CPU's cache.
Backward is written out, from the last depth to the first. It computes D, M and the products with S
again, and so keeps of each chunk only its inputs, (1 + A)⁻¹, U and S. The heads of v that share a
head of q lie side by side in S, so that one product serves them all. Every number is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_rl.model.delta_net.runs import LEAST_CHUNK, Chunks

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
    both = torch.cat([query * query.shape[-1] ** -0.5, key], -2)
    return rule_of_both(both, value, decay, step, chunks)


def rule_of_both(
    both: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, step: torch.Tensor, chunks: Chunks
) -> torch.Tensor:
    """Return ``chunked_delta_rule``'s result, for q / √d_k above k in ``both`` [N, h, 2C, d_k]."""
    return _Rule.apply(both, value, decay.cumsum(-1), step, chunks.counts, chunks.parents)


def laid_heads(convolved: torch.Tensor, chunks: Chunks, key_dim: int, value_dim: int) -> tuple[torch.Tensor, ...]:
    """Return (q / √d_k above k [N, h, 2C, d_k], v [N, h, r, C, d_v]) in chunks, float32; q and k are made ``unit``.

    convolved: [rows, h, 2 · d_k + r · d_v], each group's q, k and v, in the convolution's rows.
    """
    return _Heads.apply(convolved, chunks, key_dim, value_dim)


class _Heads(torch.autograd.Function):
    """Computes ``laid_heads``, depth after depth; backward keeps the result's q and k, and their lengths."""

    @staticmethod
    def forward(ctx, convolved: torch.Tensor, chunks: Chunks, key_dim: int, value_dim: int) -> tuple[torch.Tensor, ...]:
        number, tokens, groups = chunks.into.size // chunks.tokens, chunks.tokens, convolved.shape[1]
        each = (convolved.shape[2] - 2 * key_dim) // value_dim
        like = dict(dtype=torch.float32, device=convolved.device)
        both = torch.empty(number, groups, 2, tokens, key_dim, **like)
        factors = torch.empty(number, groups, 2, tokens, 1, **like)
        value = torch.empty(number, groups, each, tokens, value_dim, **like)
        index, empty = chunks.into.gathered()
        index = index.view(number, tokens)
        parts = zip(*(x.split(chunks.counts) for x in (index, both, factors, value)), strict=True)
        for rows, heads, factor, values in parts:
            laid = convolved.index_select(0, rows.flatten()).float().unflatten(0, rows.shape).transpose(1, 2)
            keys = laid[..., : 2 * key_dim].unflatten(-1, (2, key_dim)).movedim(-2, 2)
            torch.rsqrt(torch.linalg.vecdot(keys, keys)[..., None].add_(NORM_EPS), out=factor)
            factor[:, :, 0] *= key_dim**-0.5
            torch.mul(keys, factor, out=heads)
            values.copy_(laid[..., 2 * key_dim :].unflatten(-1, (each, value_dim)).transpose(2, 3))
        if len(empty):  # rows that are no token
            chunk, row = empty // tokens, empty % tokens
            for x in (both, value):
                x[chunk, :, :, row] = 0
        ctx.save_for_backward(both, factors)
        ctx.chunks, ctx.rows, ctx.dtype = chunks, len(convolved), convolved.dtype
        return both.flatten(2, 3), value

    @staticmethod
    def backward(ctx, of_both: torch.Tensor, of_value: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        both, factors = ctx.saved_tensors
        chunks, key_dim, tokens = ctx.chunks, both.shape[-1], both.shape[-2]
        number, groups, each, _, value_dim = of_value.shape
        found = of_value.new_empty(number, tokens, groups, 2 * key_dim + each * value_dim)
        squares = both.new_tensor([key_dim, 1.0]).view(2, 1, 1)  # one over those of the factors on q and on k
        given = (of_both.unflatten(2, (2, tokens)), of_value, both, factors, found.transpose(1, 2))
        for of_heads, of_values, heads, factor, place in zip(*(x.split(chunks.counts) for x in given), strict=True):
            of_keys = place[..., : 2 * key_dim].unflatten(-1, (2, key_dim)).movedim(-2, 2)
            along = torch.linalg.vecdot(heads, of_heads)[..., None].mul_(squares)
            torch.mul(torch.addcmul(of_heads, heads, along, value=-1), factor, out=of_keys)
            place[..., 2 * key_dim :].unflatten(-1, (each, value_dim)).transpose(2, 3).copy_(of_values)
        found = chunks.into.back(found.flatten(0, 1), ctx.rows)
        return found.to(ctx.dtype), None, None, None


class _Depth(NamedTuple):
    """Holds what all chunks of a depth are computed from.

    both: [n, h, 2C, d_k], q / √d_k above k.
    value: [n, h, r, C, d_v].
    sums, step: [n, h, r, C], G and β.
    decays: [n, h, r, C, C], D for j ≤ i; 1 for j > i.
    within: k_i·k_j D_ij for j < i; A is β_i times it.
    scores: M.
    """

    both: torch.Tensor
    value: torch.Tensor
    sums: torch.Tensor
    step: torch.Tensor
    decays: torch.Tensor
    within: torch.Tensor
    scores: torch.Tensor

    @classmethod
    def of(cls, both: torch.Tensor, value: torch.Tensor, sums: torch.Tensor, step: torch.Tensor) -> _Depth:
        tokens = sums.shape[-1]
        decays = (sums[..., :, None] - sums[..., None, :]).clamp_max_(0).exp_()
        products = both @ both[..., tokens:, :].transpose(-1, -2)
        of_query, of_key = products.split(tokens, -2)
        within = decays * of_key.tril_(-1)[:, :, None]
        return cls(both, value, sums, step, decays, within, decays * of_query.tril_()[:, :, None])

    def seen(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (Q S, K S), each [n, h, r, C, d_v] and multiplied by e^G."""
        of_query, of_key = _apart(self.both @ state, self.value.shape[2]).split(self.sums.shape[-1], -2)
        from_start = self.sums.exp()[..., None]
        return of_query * from_start, of_key * from_start

    @property
    def to_end(self) -> torch.Tensor:
        """Return e^{G_C − G}, [n, h, r, C, 1]."""
        return (self.sums[..., -1:] - self.sums).exp()[..., None]

    def whole(self) -> torch.Tensor:
        """Return e^{G_C}, [n, h, 1, r, 1], for states with the heads of v apart."""
        return self.sums[..., -1].exp()[:, :, None, :, None]


def _side_by_side(heads: torch.Tensor) -> torch.Tensor:
    """Return [n, h, C, r · d] of ``heads`` [n, h, r, C, d]."""
    return heads.transpose(2, 3).flatten(3)


def _apart(wide: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a view [n, h, r, C, d] of ``wide`` [n, h, C, r · d], for r = ``heads``."""
    return wide.unflatten(-1, (heads, -1)).transpose(2, 3)


def _forward(depth: _Depth, state: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return ((1 + A)⁻¹, U, O and S') of the chunks of a depth, which begin with ``state`` [n, h, d_k, r · d_v].

    The state None stands for zeros.
    """
    tokens, step = depth.sums.shape[-1], depth.step[..., None]
    inverse = unit_inverse(depth.within * step)
    if state is None:
        steps = inverse @ (depth.value * step)
        output = depth.scores @ steps
    else:
        of_query, of_key = depth.seen(state)
        steps = inverse @ ((depth.value - of_key) * step)
        output = of_query.add_(depth.scores @ steps)
    after = depth.both[..., tokens:, :].transpose(-1, -2) @ _side_by_side(depth.to_end * steps)
    if state is not None:
        after = _scaled(state, depth).add_(after)
    return inverse, steps, output, after


def _scaled(state: torch.Tensor, depth: _Depth) -> torch.Tensor:
    """Return e^{G_C} times ``state``, in the state's shape."""
    return (state.unflatten(-1, (depth.value.shape[2], -1)) * depth.whole()).flatten(-2)


def _summed(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fill ``out`` [n, h, …] with the products of two tensors [n, h, r, …], summed over r; return it."""
    torch.mul(first[:, :, 0], second[:, :, 0], out=out)
    for head in range(1, first.shape[2]):
        out.addcmul_(first[:, :, head], second[:, :, head])
    return out


class _Gradients(NamedTuple):
    """Holds the gradients of ``_Depth``'s first four tensors, and of the state (None if it was None)."""

    both: torch.Tensor
    value: torch.Tensor
    sums: torch.Tensor
    step: torch.Tensor
    state: torch.Tensor | None


def _backward(
    depth: _Depth,
    state: torch.Tensor | None,
    inverse: torch.Tensor,
    steps: torch.Tensor,
    of_output: torch.Tensor,
    of_after: torch.Tensor | None,
) -> _Gradients:
    """Return the gradients of a depth.

    state, inverse, steps: S, (1 + A)⁻¹ and U.
    of_output, of_after: the gradients of O and of S' (None for zeros).
    """
    tokens, heads, step = depth.sums.shape[-1], depth.value.shape[2], depth.step[..., None]
    query, key = depth.both.split(tokens, -2)
    # U and M, and what S' takes of U
    of_steps = depth.scores.transpose(-1, -2) @ of_output
    of_key, end = None, None
    if of_after is not None:
        to_end = depth.to_end
        of_end = _apart(key @ of_after, heads) * to_end
        of_steps += of_end
        of_key = _side_by_side(steps * to_end) @ of_after.transpose(-1, -2)
        end = (of_end * steps).sum(-1)
    # R, and through it A
    of_right = inverse.transpose(-1, -2) @ of_steps
    of_scores = of_output @ steps.transpose(-1, -2)
    of_value = of_right * step
    of_system = of_value @ steps.transpose(-1, -2)  # −β times the gradient of A
    both_products = key.new_empty(*key.shape[:2], 2 * tokens, tokens)
    _summed(of_scores, depth.decays, both_products[..., :tokens, :]).tril_()
    _summed(of_system, depth.decays, both_products[..., tokens:, :]).tril_(-1).neg_()
    of_step = torch.linalg.vecdot(of_right, depth.value - depth.within @ steps)
    through = of_scores.mul_(depth.scores).sub_(of_system.mul_(depth.within))
    of_sums = through.sum(-1).sub_(through.sum(-2))
    # the products Q Kᵀ and K Kᵀ
    of_both = both_products @ key
    of_keys = both_products.transpose(-1, -2) @ depth.both
    if end is not None:
        of_keys += of_key
        of_sums -= end
        of_sums[..., -1] += end.sum(-1)
    of_both[..., tokens:, :] += of_keys
    found = _Gradients(of_both, of_value, of_sums, of_step, None)
    return found if state is None else _with_state(found, depth, state, of_right, of_output, of_after)


def _with_state(
    found: _Gradients,
    depth: _Depth,
    state: torch.Tensor,
    of_right: torch.Tensor,
    of_output: torch.Tensor,
    of_after: torch.Tensor | None,
) -> _Gradients:
    """Return the gradients of a depth with what comes through Q S, K S and the share of S in S'.

    found: the other gradients; they are changed in place.
    of_right, of_output, of_after: the gradients of R, of O and of S' (None for zeros).
    """
    of_both, of_value, of_sums, of_step, _ = found
    heads = depth.value.shape[2]
    seen_query, seen_key = depth.seen(state)
    taken = torch.linalg.vecdot(of_right, seen_key)
    of_step -= taken
    of_sums += torch.linalg.vecdot(of_output, seen_query).sub_(taken * depth.step)
    from_start = depth.sums.exp()[..., None]
    tokens, width = of_value.shape[-2:]
    of_seen = state.new_empty(*state.shape[:2], 2 * tokens, heads * width)
    for_query, for_key = _apart(of_seen, heads).split(tokens, -2)
    torch.mul(of_output, from_start, out=for_query)
    torch.mul(of_value, from_start.neg(), out=for_key)
    of_both += of_seen @ state.transpose(-1, -2)
    of_state = depth.both.transpose(-1, -2) @ of_seen
    if of_after is not None:
        carried = _scaled(of_after, depth)
        of_state += carried
        of_sums[..., -1] += (carried * state).unflatten(-1, (heads, -1)).sum((2, 4))
    return _Gradients(of_both, of_value, of_sums, of_step, of_state)


class _Rule(torch.autograd.Function):
    """Computes the rule from q / √d_k above k, the values, G and β; see ``chunked_delta_rule``."""

    @staticmethod
    def forward(
        ctx,
        both: torch.Tensor,
        value: torch.Tensor,
        sums: torch.Tensor,
        step: torch.Tensor,
        counts: Sequence[int],
        parents: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        heads, tokens = value.shape[1:3], value.shape[3]
        outputs = value.new_empty(len(value), tokens, *heads, value.shape[4]).movedim(1, 3)  # as rows of tokens
        kept: list[torch.Tensor] = []
        state: torch.Tensor | None = None
        parts = zip(*(x.split(counts) for x in (both, value, sums, step, outputs)), strict=True)
        for number, (*given, output) in enumerate(parts):
            if state is not None:
                parent = parents[number - 1]
                state = state[: len(output)] if parent is None else state.index_select(0, parent)
                kept.append(state)
            inverse, steps, out, state = _forward(_Depth.of(*given), state)
            output.copy_(out)
            kept += [inverse, steps]
        ctx.save_for_backward(both, value, sums, step, *kept)
        ctx.counts, ctx.parents = counts, parents
        return outputs

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *given, kept = *ctx.saved_tensors[:4], list(ctx.saved_tensors[4:])
        found = tuple(x.new_empty(x.shape) for x in given)
        parts = list(zip(*(x.split(ctx.counts) for x in (*given, gradient, *found)), strict=True))
        of_after: torch.Tensor | None = None
        for number in reversed(range(len(parts))):
            *inputs, of_output = parts[number][:5]
            steps, inverse = kept.pop(), kept.pop()
            state = kept.pop() if number else None
            made = _backward(_Depth.of(*inputs), state, inverse, steps, of_output.contiguous(), of_after)
            for place, part in zip(parts[number][5:], made[:4], strict=True):
                place.copy_(part)
            if number:
                of_after = _to_parents(made.state, ctx.parents[number - 1], ctx.counts[number - 1])
        return *found, None, None


def _to_parents(gradient: torch.Tensor, parents: torch.Tensor | None, count: int) -> torch.Tensor:
    """Return the gradients [count, …] of the states that chunks continued, summed in a fixed order."""
    if parents is None and len(gradient) == count:
        return gradient
    summed = gradient.new_zeros(count, *gradient.shape[1:])
    if parents is None:
        summed[: len(gradient)] = gradient
        return summed
    return summed.index_put_((parents,), gradient, accumulate=True)


def unit_inverse(below: torch.Tensor) -> torch.Tensor:
    """Return (1 + A)⁻¹ of strictly lower triangular A [..., C, C]; C is 16 times a power of two, or less than 32.

    Blocks of 16 rows on the diagonal are solved, then joined two by two, by (X 0; Y Z)⁻¹ =
    (X⁻¹ 0; −Z⁻¹ Y X⁻¹ Z⁻¹).
    """
    size = below.shape[-1]
    width = LEAST_CHUNK if size > LEAST_CHUNK and size % LEAST_CHUNK == 0 else size
    found = _on_diagonal(below.flatten(0, -3), width)
    identity = torch.eye(width, dtype=below.dtype, device=below.device).expand_as(found)
    found = torch.linalg.solve_triangular(found, identity, upper=False, unitriangular=True)
    while width < size:
        corner = _on_diagonal(below.flatten(0, -3), 2 * width)[..., width:, :width]
        first, second = found.unflatten(1, (-1, 2)).unbind(2)
        joined = found.new_zeros(*corner.shape[:2], 2 * width, 2 * width)
        joined[..., :width, :width] = first
        joined[..., width:, width:] = second
        joined[..., width:, :width] = (second @ (corner @ first)).neg_()
        found, width = joined, 2 * width
    return found.view(below.shape)


def _on_diagonal(matrices: torch.Tensor, width: int) -> torch.Tensor:
    """Return a view [n, C / width, width, width] of the blocks on the diagonal of ``matrices`` [n, C, C]."""
    blocks = matrices.unflatten(-1, (-1, width)).unflatten(-3, (-1, width))
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)
