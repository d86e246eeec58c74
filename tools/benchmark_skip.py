"""Dense and skip updates, alternately, in one process group on one set of samples: the ratio of medians and its share of the ideal.

    torchrun --nproc_per_node 2 tools/benchmark_skip.py --dp 2 --dead-share 0.75

The update phase runs from zeroing the gradients to the end of the parameter gather. The ideal is dense tokens over surviving
tokens. The fixed part f is the optimizer step (reduction, norm, AdamW, gather) over the dense update: with it no skip can pass
ideal / (1 + f · (ideal − 1)), which at 75 % is a share of 1 / (1 + 3f). At 100 % there is no ideal: the ghost step is set against
an optimizer step.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform as host_platform
import statistics
import sys
import time

import numpy as np

SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: torchrun --nproc_per_node 2 tools/benchmark_skip.py --pp 2 --dead-share 0.75 0.9 --json skip.json",
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel degree")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel degree")
    parser.add_argument("--dp", type=int, default=1, help="data parallel degree; tp x pp x dp processes must have been started")
    parser.add_argument("--dead-share", type=float, nargs="+", default=list(SHARES), help="shares of groups without signal, 0 to 1")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of dense and skip updates per share, after one to warm up")
    parser.add_argument("--groups", type=int, default=40, help="prompt groups in the batch")
    parser.add_argument("--group-size", type=int, default=4, help="samples per group")
    parser.add_argument("--mean-tokens", type=int, default=64, help="mean length of a sample; lengths are log-normal around it")
    parser.add_argument("--max-tokens-per-microbatch", type=int, default=1024)
    parser.add_argument("--hf-path", help="a Hugging Face directory whose config is used (random weights); default: a small Qwen2")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    given = parser.parse_args(arguments)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if given.tp * given.pp * given.dp != world:
        parser.error(
            f"--tp {given.tp} x --pp {given.pp} x --dp {given.dp} is {given.tp * given.pp * given.dp} and {world} processes were started; "
            f"run torchrun --nproc_per_node {given.tp * given.pp * given.dp} tools/benchmark_skip.py ..."
        )
    if any(not 0 <= share <= 1 for share in given.dead_share):
        parser.error(f"--dead-share {given.dead_share} must lie between 0 and 1")
    return given


def build_backend(given: argparse.Namespace):
    from transformers import AutoConfig, Qwen2Config

    from megatron_rl.backend import MegatronBackend
    from megatron_rl.config import load_config

    hf_config = (
        AutoConfig.from_pretrained(given.hf_path)
        if given.hf_path
        else Qwen2Config(
            vocab_size=given.vocab, hidden_size=given.hidden, num_hidden_layers=given.layers, num_attention_heads=given.hidden // 64,
            num_key_value_heads=given.hidden // 64, intermediate_size=given.hidden * 3, max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
    )  # fmt: skip
    overrides = [
        f"parallel.tensor={given.tp}", f"parallel.pipeline={given.pp}", f"model.dtype={given.dtype}", "model.init=random",
        f"plan.max_tokens_per_microbatch={given.max_tokens_per_microbatch}", "optimizer.lr=1e-6", f"run.seed={given.seed}",
    ]  # fmt: skip
    return MegatronBackend(load_config(None, overrides), hf_config=hf_config, total_steps=10_000)


def make_batch(backend, given: argparse.Namespace):
    """The same ragged samples on every rank; each hands in its own share."""
    from megatron_rl.types import Sample

    random = np.random.default_rng(given.seed)
    count = given.groups * given.group_size
    lengths = np.clip(random.lognormal(np.log(given.mean_tokens), 0.4, count).astype(int), 8, given.max_tokens_per_microbatch)
    samples = []
    for i, length in enumerate(lengths):
        prompt = max(2, int(length) // 4)
        response = int(length) - prompt
        samples.append(
            Sample(
                sample_id=f"s{i}", prompt_tokens=prompt, token_ids=random.integers(0, backend.shape.vocab_size, int(length)),
                loss_mask=np.ones(response, dtype=bool), logprobs=np.full(response, -5.0, dtype=np.float32),
            )
        )  # fmt: skip
    place = backend.topology
    mine = list(range(place.rank, count, place.world_size))
    return backend.gather([samples[i] for i in mine], [i // given.group_size for i in mine], mine)


def make_advantages(share: float, given: argparse.Namespace) -> np.ndarray:
    """Whole groups are dead; the others have advantages of both signs."""
    random = np.random.default_rng(given.seed + 1)
    dead = random.permutation(given.groups)[: round(share * given.groups)]
    values = random.normal(size=given.groups * given.group_size)
    values[np.isin(np.arange(len(values)) // given.group_size, dead)] = 0.0
    return values


def update(backend, batch, mini_batch, fingerprint: bytes, inputs) -> tuple[float, float]:
    """Seconds of one whole update, and of its optimizer step."""
    import torch.distributed as dist

    from megatron_rl.platform import HOST

    dist.barrier()
    HOST.synchronize()
    started = time.perf_counter()
    backend.zero_grad()
    backend.forward_backward(batch, mini_batch, inputs, fingerprint=fingerprint)
    HOST.synchronize()
    dist.barrier()  # so that the optimizer's share is not another rank's lateness
    stepped = time.perf_counter()
    backend.optim_step(mini_batch.kind)
    backend.schedule.gather_parameters()
    HOST.synchronize()
    ended = time.perf_counter()
    return ended - started, ended - stepped


def measure(backend, batch, share: float, given: argparse.Namespace) -> dict:
    """One row of the table: medians over alternating dense and skip updates on the same samples."""
    from megatron_rl.advantage import reduction_weights
    from megatron_rl.signal import has_signal
    from megatron_rl.types import LossInputs

    values = make_advantages(share, given)
    signal = has_signal(values, batch.facts.loss_tokens)
    weights = reduction_weights("token_mean", batch.facts, np.arange(batch.facts.num_samples), max_response_tokens=1)
    inputs = LossInputs(advantages=values * weights, weights=weights)
    planned = time.perf_counter()
    plans = {"dense": backend.plan("train", batch, signal, drops=False), "skip": backend.plan("train", batch, signal, drops=True)}
    plan_s = (time.perf_counter() - planned) / 2
    needs = {name: _rows(backend, batch, plan) for name, plan in plans.items()}
    seconds: dict[str, list[tuple[float, float]]] = {"dense": [], "skip": []}
    for repeat in range(given.repeats + 1):
        for name, plan in plans.items():
            batch.rows = needs[name]
            timed = update(backend, batch, plan.mini_batches[0], plan.fingerprints()[0], inputs)
            if repeat:
                seconds[name].append(timed)
    return summarise(share, batch, plans, seconds, plan_s)


def _rows(backend, batch, plan):
    backend.load_rows(batch, plan)
    return batch.rows


def summarise(share: float, batch, plans: dict, seconds: dict, plan_s: float) -> dict:
    dense_s, skip_s = (statistics.median(x for x, _ in seconds[name]) for name in ("dense", "skip"))
    step_s = statistics.median(x for _, x in seconds["dense"])
    tokens = batch.facts.total_tokens
    survivors = int(tokens[plans["skip"].mini_batches[0].order].sum())
    dense_tokens, fixed = int(tokens.sum()), step_s / dense_s
    row = {
        "dead_share": share, "dense_s": dense_s, "skip_s": skip_s, "ratio": dense_s / skip_s, "dense_tokens": dense_tokens,
        "surviving_tokens": survivors, "optimizer_step_s": step_s, "fixed_fraction": fixed, "planning_s": plan_s,
        "dense_microbatches": plans["dense"].mini_batches[0].num_microbatches.tolist(),
        "skip_microbatches": plans["skip"].mini_batches[0].num_microbatches.tolist(),
    }  # fmt: skip
    if survivors:
        ideal = dense_tokens / survivors
        row |= {"ideal": ideal, "share_of_ideal": dense_s / skip_s / ideal, "reachable_share": 1 / (1 + fixed * (ideal - 1))}
    else:
        row |= {"ghost_over_optimizer_step": statistics.median(x for _, x in seconds["skip"]) / step_s}
    return row


def show(rows: list[dict], given: argparse.Namespace, machine: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"skip against dense: TP {given.tp}, PP {given.pp}, DP {given.dp}; {machine}")
    for name in ("dead", "dense s", "skip s", "ratio", "ideal", "share of ideal", "fixed part f", "reachable share", "ghost / step"):
        table.add_column(name, justify="right")
    for row in rows:
        alive = "ideal" in row
        table.add_row(
            f"{100 * row['dead_share']:.0f} %", f"{row['dense_s']:.3f}", f"{row['skip_s']:.4f}", f"{row['ratio']:.2f}",
            f"{row['ideal']:.2f}" if alive else "-", f"{row['share_of_ideal']:.3f}" if alive else "-", f"{row['fixed_fraction']:.4f}",
            f"{row['reachable_share']:.3f}" if alive else "-", "-" if alive else f"{row['ghost_over_optimizer_step']:.2f}",
        )  # fmt: skip
    Console(width=130).print(table)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    import torch

    backend = build_backend(given)
    batch = make_batch(backend, given)
    rows = [measure(backend, batch, share, given) for share in given.dead_share]
    if backend.topology.is_main:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{host_platform.machine()} CPU, {os.cpu_count()} cores"
        machine = f"{device}, torch {torch.__version__}"
        show(rows, given, machine)
        if given.json:
            settings = {key: str(value) if isinstance(value, pathlib.Path) else value for key, value in vars(given).items()}
            given.json.write_text(json.dumps({"machine": machine, "settings": settings, "rows": rows}, indent=1) + "\n")
            print(f"written: {given.json}")
    backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
