"""Measures the two ways in which context ranks share a gated delta net: tokens for groups, or all tokens gathered.

    torchrun --nproc_per_node 2 tools/benchmarks/delta_net_context.py --tokens 8192

One layer, forward and backward, float32 over gloo, `--sequences` sequences that all ranks hold pieces of. Both ways
take turns in one process group (model/delta_net/context.py). `s` is the slowest rank's own CPU seconds, medians over
the repeats: on a machine with fewer cores than ranks the clock would tell nothing. Bytes are what a rank sends forward.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time

import numpy as np

WAYS = ("tokens for groups", "all tokens gathered")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: torchrun --nproc_per_node 2 tools/benchmarks/delta_net_context.py --tokens 8192",
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of all sequences together")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--key-heads", type=int, default=8, help="heads of q and k; heads of v are twice as many")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    pieces = 2 * int(os.environ.get("WORLD_SIZE", "1")) * given.sequences
    if given.tokens % pieces:
        parser.error(f"--tokens {given.tokens} must be a multiple of {pieces}, two pieces of each sequence per rank")
    return given


def build(given: argparse.Namespace):
    """Return (our layer, this rank's packed sequences, the context ranks)."""
    import torch

    from megatron_rl.config import ParallelConfig
    from megatron_rl.distributed import topology
    from megatron_rl.model.attention.layout import Layout
    from megatron_rl.model.attention.packed import pack
    from megatron_rl.model.attention.spans import ContextShard
    from megatron_rl.model.delta_net.kernels import choose_rule
    from megatron_rl.model.delta_net.layer import DeltaNetSubmodules, GatedDeltaNet
    from megatron_rl.weights.model_shape import DeltaNetShape

    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # isort: skip
    from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

    grid = topology.initialize(ParallelConfig(context=int(os.environ["WORLD_SIZE"])), deadline_s=300)
    shape = DeltaNetShape(
        layers=(0,),
        key_heads=given.key_heads,
        value_heads=2 * given.key_heads,
        key_head_dim=given.head_dim,
        value_head_dim=given.head_dim,
        conv_tokens=4,
    )
    config = TransformerConfig(
        num_layers=1, hidden_size=given.hidden, num_attention_heads=4, use_cpu_initialization=True
    )
    linears = DeltaNetSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    torch.manual_seed(0)
    layer = GatedDeltaNet(config, linears, 1, shape=shape, rule=choose_rule("torch"))
    shard = ContextShard(rank=grid.context_rank, size=grid.context_size, group=grid.context_group)
    layout = Layout.of((given.tokens // given.sequences,) * given.sequences)
    return layer, pack(layout, torch.device("cpu"), shard), shard, shape


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    layer, packed, shard, shape = build(given)
    from megatron_rl.model.delta_net import context

    true_choice = context.exchanges_groups
    hidden = torch.randn(given.tokens // shard.size, 1, given.hidden).requires_grad_()
    gradient = torch.randn(given.tokens // shard.size, 1, given.hidden)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(given.repeats + 1):
        for way in WAYS:
            context.exchanges_groups = true_choice if way == WAYS[0] else lambda *_: False
            dist.barrier()
            started = time.process_time()
            output, _ = layer(hidden, packed_seq_params=packed)
            torch.autograd.grad(output, (hidden, *layer.parameters()), gradient, allow_unused=True)
            seconds[way].append(time.process_time() - started)
    slowest = torch.tensor([statistics.median(times[1:]) for times in seconds.values()], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    width = 2 * shape.key_width + shape.value_width + 2 * shape.value_heads
    own, others = given.tokens // shard.size, shard.size - 1
    sent = (own * (width + shape.value_width) * others // shard.size * 4, own * width * others * 4)
    if shard.rank == 0:
        print(f"{platform.machine()}, {os.cpu_count()} cores, {shard.size} context ranks, {given.tokens} tokens")
        print("| way | s of the slowest rank | of the first | MB sent by a rank, forward |")
        print("|---|---|---|---|")
        for way, time_s, sends in zip(WAYS, slowest.tolist(), sent, strict=True):
            print(f"| {way} | {time_s:.3f} | {time_s / float(slowest[0]):.2f} | {np.round(sends / 1e6, 1)} |")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
