"""Measures a gated delta net over a packed micro-batch beside transformers' own torch module, on one core.

    python tools/benchmarks/delta_net.py --hidden 1024 --key-heads 8 --value-heads 16 --head-dim 64 --repeats 5

One layer, forward and backward, float32. Three ways take turns over the same segments in one process: ours packed
(`model/delta_net/layer.py`), transformers' `Qwen3_5GatedDeltaNet` segment by segment, and the same module with all
segments padded to the longest as one batch. All three have the same weights; the largest difference of their outputs is
printed. `s` is the process's own seconds, medians over the repeats, so that other work on the machine does not count.
`kept` is what autograd keeps for the backward pass, weights not counted, per token that is no pad.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

WAYS = ("ours, packed", "transformers, one by one", "transformers, padded")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/delta_net.py --segments 16 --tokens 100 500 --json delta.json",
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--key-heads", type=int, default=8, help="heads of q and k")
    parser.add_argument("--value-heads", type=int, default=16, help="heads of v; a multiple of --key-heads")
    parser.add_argument("--head-dim", type=int, default=64, help="width of a head of q, k and v")
    parser.add_argument("--segments", type=int, default=16, help="segments of the micro-batch")
    parser.add_argument("--tokens", type=int, nargs=2, default=[100, 500], metavar=("LEAST", "MOST"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    given = parser.parse_args(arguments)
    if given.value_heads % given.key_heads:
        parser.error(f"--value-heads {given.value_heads} must be a multiple of --key-heads {given.key_heads}")
    if min(given.tokens) < 1 or given.tokens[0] > given.tokens[1]:
        parser.error(f"--tokens {given.tokens[0]} {given.tokens[1]} must be at least 1 and in order")
    if min(given.segments, given.repeats, given.threads) < 1:
        parser.error("--segments, --repeats and --threads must be at least 1")
    return given


@dataclass(frozen=True)
class Way:
    """Holds one way: it takes hidden states [T, hidden] and returns outputs [T, hidden]; and its parameters."""

    forward: Callable
    parameters: list


def theirs(given: argparse.Namespace):
    """Return transformers' module, with weights of useful sizes."""
    import torch
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    heads = dict(linear_num_key_heads=given.key_heads, linear_num_value_heads=given.value_heads)
    widths = dict(linear_key_head_dim=given.head_dim, linear_value_head_dim=given.head_dim)
    config = Qwen3_5TextConfig(
        hidden_size=given.hidden, num_hidden_layers=1, layer_types=["linear_attention"], **heads, **widths
    )
    torch.manual_seed(0)
    return config, Qwen3_5GatedDeltaNet(config, 0).float()


def ours(config, module):
    """Return our layer with the weights of transformers' ``module``, in a process group of its own."""
    import torch

    from megatron_rl.distributed import topology
    from megatron_rl.model.delta_net.kernels import choose_rule
    from megatron_rl.model.delta_net.layer import DeltaNetSubmodules, GatedDeltaNet
    from megatron_rl.weights.model_shape import DeltaNetShape

    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # isort: skip
    from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

    topology.initialize(deadline_s=60)
    shape = DeltaNetShape(
        layers=(0,),
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_head_dim=config.linear_key_head_dim,
        value_head_dim=config.linear_value_head_dim,
        conv_tokens=config.linear_conv_kernel_dim,
    )
    own = TransformerConfig(
        num_layers=1,
        hidden_size=config.hidden_size,
        num_attention_heads=4,
        use_cpu_initialization=True,
        layernorm_epsilon=config.rms_norm_eps,
    )
    linears = DeltaNetSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    layer = GatedDeltaNet(own, linears, 1, shape=shape, rule=choose_rule("torch"))
    widths = [shape.key_width, shape.key_width, shape.value_width]

    def by_group(*parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.unflatten(0, (shape.key_heads, -1)) for part in parts], 1).flatten(0, 1)

    rest = (module.in_proj_z.weight, module.in_proj_b.weight, module.in_proj_a.weight)
    weights = {
        "in_proj.weight": by_group(*module.in_proj_qkv.weight.split(widths), *rest),
        "conv1d.weight": by_group(*module.conv1d.weight.split(widths)),
        **{name: getattr(module, name) for name in ("A_log", "dt_bias")},
        "norm.weight": module.norm.weight,
        "out_proj.weight": module.out_proj.weight,
    }
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(weights[name])
    return layer


def leave_group() -> None:
    """Undo the process group that ``ours`` made."""
    from megatron_rl.distributed import topology

    topology.destroy()


def ways(given: argparse.Namespace, lengths: list[int]) -> dict[str, Way]:
    """Return {name: way} of all three."""
    import torch

    from megatron_rl.model.attention.layout import lay_out
    from megatron_rl.model.attention.packed import pack

    config, module = theirs(given)
    layer = ours(config, module)
    layout = lay_out(np.zeros(len(lengths), dtype=np.int64), np.array(lengths), None)
    packed = pack(layout, torch.device("cpu"))
    real = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]

    def one_by_one(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([module(part[None])[0] for part in hidden.split(lengths)])

    def padded(hidden: torch.Tensor) -> torch.Tensor:
        return module(torch.nn.utils.rnn.pad_sequence(hidden.split(lengths), batch_first=True))[real]

    mine, of_module = list(layer.parameters()), list(module.parameters())
    return {
        WAYS[0]: Way(lambda hidden: layer(hidden[:, None], packed_seq_params=packed)[0][:, 0], mine),
        WAYS[1]: Way(one_by_one, of_module),
        WAYS[2]: Way(padded, of_module),
    }


def step(way: Way, hidden, gradient) -> float:
    """Run forward and backward of one way; return the process's seconds."""
    import torch

    started = time.process_time()
    torch.autograd.grad(way.forward(hidden), (hidden, *way.parameters), gradient)
    return time.process_time() - started


def kept_bytes(way: Way, hidden) -> int:
    """Return the bytes that autograd keeps for backward, each storage once; neither weights nor the input count."""
    import torch

    kept: dict[int, int] = {}
    alive = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)  # so that no storage takes the place of another
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = way.forward(hidden)
    del output
    apart = {x.untyped_storage().data_ptr() for x in (hidden, *way.parameters)}
    return sum(size for place, size in kept.items() if place not in apart)


def measure(given: argparse.Namespace) -> dict[str, object]:
    """Return the figures: the segments, the largest difference of outputs, and a row for each way."""
    import torch

    torch.set_num_threads(given.threads)
    least, most = given.tokens
    lengths = np.random.default_rng(0).integers(least, most + 1, given.segments).tolist()
    all_ways, tokens = ways(given, lengths), sum(lengths)
    hidden = torch.randn(tokens, given.hidden).requires_grad_()
    gradient = torch.randn(tokens, given.hidden)
    outputs = [way.forward(hidden).detach() for way in all_ways.values()]
    difference = max(float((outputs[0] - other).abs().max()) for other in outputs[1:])
    seconds: dict[str, list[float]] = {name: [] for name in all_ways}
    for _ in range(given.repeats + 1):
        for name, way in all_ways.items():
            seconds[name].append(step(way, hidden, gradient))
    rows = []
    for name, way in all_ways.items():
        median = statistics.median(seconds[name][1:])  # the first warms up
        rows.append(dict(way=name, seconds=median, tokens_per_s=tokens / median))
        rows[-1]["kept_bytes_per_token"] = kept_bytes(way, hidden) / tokens
    for row in rows:
        row["times_as_fast"] = row["seconds"] / rows[0]["seconds"]
        row["times_kept"] = row["kept_bytes_per_token"] / rows[0]["kept_bytes_per_token"]
    return dict(
        tokens=tokens, lengths=lengths, largest_output=float(outputs[1].abs().max()), difference=difference, rows=rows
    )


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    found = measure(given)
    leave_group()
    print(f"{platform.machine()}, {os.cpu_count()} cores, {given.threads} thread(s) of torch, float32")
    print(
        f"{given.segments} segments of {min(found['lengths'])} to {max(found['lengths'])} tokens, {found['tokens']} "
        f"together; outputs up to {found['largest_output']:.2g} differ by at most {found['difference']:.1e}"
    )
    print("| way | s | tokens/s | ours is so many times as fast | kept for backward, bytes/token | times ours |")
    print("|---|---|---|---|---|---|")
    for row in found["rows"]:
        print(
            f"| {row['way']} | {row['seconds']:.3f} | {row['tokens_per_s']:,.0f} | {row['times_as_fast']:.2f} | "
            f"{row['kept_bytes_per_token']:,.0f} | {row['times_kept']:.2f} |"
        )
    if given.json:
        settings = {key: value for key, value in vars(given).items() if key != "json"}
        given.json.write_text(json.dumps({"settings": settings, **found}, indent=1) + "\n")
        print(f"written: {given.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
