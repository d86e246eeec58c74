"""Measures one training step over one long sample: memory and seconds as its length doubles.

    torchrun --nproc_per_node 4 tools/benchmarks/long_context.py --cp 4 --tokens 4096 8192 16384
    python -m torch.distributed.run --nproc_per_node 1 tools/benchmarks/long_context.py --tokens 131072

A batch is one sample of so many tokens, three quarters of them the response's. For each length: the host's part alone
(the plan, and the micro-batch packed into tensors), its seconds and the most memory that numpy held in it; the
log-prob pass and the update, with the growth of the rank's resident set at its highest. Each number is the largest of
all ranks.
`kept` is what autograd keeps for the backward, weights not counted, and `forecast` what the dry run says of it
(simulator/memory.py). The model is thin: what grows with the length is what is measured, not what a layer costs.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pathlib
import re
import sys
import time
import tracemalloc
from collections import Counter

import numpy as np
from skip import logprob_pass, update
from skip_table import machine_name, write_json

COLUMNS = ("tokens", "plan ms", "pack ms", "host MB", "log-probs s", "update s", "peak MB", "kept MB", "forecast MB")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: torchrun --nproc_per_node 2 tools/benchmarks/long_context.py --cp 2 --json long.json",
    )
    parser.add_argument("--cp", type=int, default=1, help="context parallel degree")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[4096 << i for i in range(6)], help="tokens of the sample, ascending"
    )
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=128)
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    given = parser.parse_args(arguments)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if given.cp != world:
        parser.error(
            f"--cp {given.cp} and {world} processes were started; run torchrun --nproc_per_node {given.cp} "
            "tools/benchmarks/long_context.py ..."
        )
    if given.tokens != sorted(given.tokens) or any(x < 8 or x % (2 * given.cp) for x in given.tokens):
        parser.error(f"--tokens {given.tokens} must rise, from 8 on, each a multiple of {2 * given.cp} (2 x --cp)")
    return given


def build_backend(given: argparse.Namespace):
    from transformers import Qwen3Config

    from megatron_rl.backend import MegatronBackend
    from megatron_rl.config import load_config

    hf_config = Qwen3Config(
        vocab_size=given.vocab,
        hidden_size=given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=given.heads,
        head_dim=given.head_dim,
        intermediate_size=given.hidden * 3,
        max_position_embeddings=given.tokens[-1],
        tie_word_embeddings=True,
    )
    overrides = [
        f"parallel.context={given.cp}",
        "model.init=random",
        f"plan.max_tokens_per_microbatch={given.tokens[-1]}",
        "run.deadline_s=3000",
    ]
    return MegatronBackend(load_config(None, overrides), hf_config=hf_config, total_steps=10_000)


def make_batch(backend, tokens: int):
    """Make one sample, which the first rank contributes."""
    from megatron_rl.types import Sample

    random, response = np.random.default_rng(0), tokens * 3 // 4
    sample = Sample(
        sample_id="long",
        prompt_tokens=tokens - response,
        token_ids=random.integers(0, backend.shape.vocab_size, tokens),
        loss_mask=np.ones(response, dtype=bool),
        logprobs=np.full(response, -5.0, dtype=np.float32),
    )
    return backend.gather([sample], [0], [0]) if backend.topology.rank == 0 else backend.gather([], [], [])


def reset_peak() -> int:
    """Forget the highest resident set so far (Linux: proc(5), clear_refs); return the present one.

    Memory that was freed and that malloc still holds is given back before.
    """
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    """Return the bytes of this process that are resident, or that were at most (``VmHWM``)."""
    return int(re.search(rf"{field}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024


class KeptBytes:
    """Counts the bytes of storages that autograd keeps within a block; a module's own parameters are not counted."""

    def __init__(self, parameters):
        self.known = {x.untyped_storage().data_ptr() for x in parameters}
        self.seen: Counter[int] = Counter()
        self.total = 0

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if not self.seen[storage.data_ptr()] and storage.data_ptr() not in self.known:
            self.total += storage.nbytes()
        self.seen[storage.data_ptr()] += 1
        return tensor


def host_part(backend, batch, inputs) -> tuple[object, dict[str, float]]:
    """Return the update's plan, and the seconds and numpy's most bytes of planning and packing on this rank."""
    tracemalloc.start()
    started = time.perf_counter()
    signal = np.ones(batch.facts.num_samples, dtype=bool)
    plan = backend.plan("train", batch, signal, drops=True)
    planned = time.perf_counter()
    batch = backend.fetch_rows(batch, plan)
    packing = time.perf_counter()
    packed = list(backend._pack(batch, plan.mini_batches[0], inputs))
    ended = time.perf_counter()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del packed
    return plan, {"plan_s": planned - started, "pack_s": ended - packing, "host_bytes": peak}


def measure(backend, tokens: int) -> dict[str, float]:
    """Return one row, its numbers the largest over ranks."""
    import torch
    import torch.distributed as dist

    from megatron_rl.algorithm.advantage import reduction_weights
    from megatron_rl.simulator.degrees import degrees_of
    from megatron_rl.simulator.memory import stage_memory
    from megatron_rl.types import LossInputs

    batch = make_batch(backend, tokens)
    weights = reduction_weights("token_mean", batch.facts, np.arange(1), max_response_tokens=1)
    inputs = LossInputs(advantages=weights.copy(), weights=weights)
    plan, row = host_part(backend, batch, inputs)
    batch, step = backend.fetch_rows(batch, plan), plan.mini_batches[0]
    before = reset_peak()
    row["logprob_s"] = logprob_pass(backend, batch, plan)
    kept = KeptBytes(p for chunk in backend.chunks for p in chunk.parameters())
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        row["update_s"] = update(backend, batch, step, plan.fingerprints()[0], inputs)[0]
    row["peak_bytes"] = resident("VmHWM") - before
    row["kept_bytes"] = kept.total
    degrees = degrees_of(backend.config, dist.get_world_size())
    forecast = stage_memory(
        backend.shape, backend.config, degrees, 0, tokens=tokens, loss_tokens=tokens * 3 // 4, microbatches=1
    )
    row["forecast_bytes"] = forecast.activations
    largest = torch.tensor(list(row.values()), dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return {"tokens": tokens, **dict(zip(row, largest.tolist(), strict=True))}


def show(rows: list[dict], given: argparse.Namespace, machine: str) -> None:
    print(f"long context: CP {given.cp}; {machine}")
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for x in rows:
        milliseconds = [f"{1e3 * x[key]:.1f}" for key in ("plan_s", "pack_s")]
        seconds = [f"{x[key]:.1f}" for key in ("logprob_s", "update_s")]
        host, *memory = (f"{x[f'{key}_bytes'] / 1e6:.1f}" for key in ("host", "peak", "kept", "forecast"))
        print("| " + " | ".join([f"{x['tokens']:,}", *milliseconds, host, *seconds, *memory]) + " |")


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    backend = build_backend(given)
    rows, machine = [], machine_name()
    measure(backend, given.tokens[0])  # imports and first allocations
    for tokens in given.tokens:
        rows.append(measure(backend, tokens))
        if backend.topology.is_main:
            write_json(given, machine, rows=rows)
            print(rows[-1], flush=True)
    if backend.topology.is_main:
        show(rows, given, machine)
    backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
