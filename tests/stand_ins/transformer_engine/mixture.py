"""The permutations of a mixture's tokens, and the product that its router calls, in plain torch."""

from __future__ import annotations

import torch

from tests.stand_ins.transformer_engine.contract import contract, refuse, require


def _tokens_by_expert(routing_map: torch.Tensor) -> torch.Tensor:
    """Return the token of each permuted row: all of expert 0 in their order, then expert 1's, …"""
    return routing_map.bool().t().nonzero()[:, 1]


@contract("moe_permute")
def moe_permute(*, inp, routing_map, num_out_tokens=-1, map_type="mask", **unused):
    require(map_type == "mask", "the stand-in permutes by masks only")
    rows = _tokens_by_expert(routing_map)
    require(num_out_tokens == len(rows), f"num_out_tokens={num_out_tokens} of {len(rows)}")
    return inp[rows], routing_map


@contract("moe_permute_with_probs")
def moe_permute_with_probs(*, inp, probs, routing_map, num_out_tokens=-1):
    rows = _tokens_by_expert(routing_map)
    require(num_out_tokens == len(rows), f"num_out_tokens={num_out_tokens} of {len(rows)}")
    return inp[rows], probs.t()[routing_map.bool().t()], routing_map


@contract("moe_unpermute")
def moe_unpermute(*, inp, row_id_map, merging_probs=None, restore_shape=None, **unused):
    refuse("moe_unpermute", unused, ("map_type",))
    require(merging_probs is None, "the stand-in's experts multiply by the probabilities")
    whole = torch.zeros(restore_shape, dtype=torch.float32)
    return whole.index_add(0, _tokens_by_expert(row_id_map), inp.float()).to(inp.dtype)


def _sorted_chunks(split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(int(split_sizes.sum())).split(split_sizes.tolist())
    return torch.cat([rows[i] for i in sorted_index.tolist()])


@contract("moe_sort_chunks_by_index")
def moe_sort_chunks_by_index(*, inp, split_sizes, sorted_index):
    return inp[_sorted_chunks(split_sizes, sorted_index)]


@contract("moe_sort_chunks_by_index_with_probs")
def moe_sort_chunks_by_index_with_probs(*, inp, probs, split_sizes, sorted_index):
    rows = _sorted_chunks(split_sizes, sorted_index)
    return inp[rows], probs[rows]


@contract("general_gemm")
def general_gemm(*, A, B, layout="TN", out_dtype=None, **unused):
    """Return [product]: B Aᵀ for "TN", B A for "NN", Bᵀ A for "NT"."""
    refuse("general_gemm", unused, ("workspace", "grad"))
    require(A.dtype == B.dtype and A.dim() == B.dim() == 2, f"a product of {A.dtype} and {B.dtype}")
    product = {"TN": lambda: B @ A.t(), "NN": lambda: B @ A, "NT": lambda: B.t() @ A}[layout]()
    return [product.to(out_dtype or A.dtype), None, None, None]
