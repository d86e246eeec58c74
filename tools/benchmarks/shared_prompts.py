"""Measures the update and its log-prob pass with every prompt run once and no pass that nobody needs, and without.

    torchrun --nproc_per_node 2 tools/benchmarks/shared_prompts.py --pp 2 --ratio 1:1 16:1 --group-size 8 16
    torchrun --nproc_per_node 4 tools/benchmarks/shared_prompts.py --pp 4 --layers 8 --virtual-clock
    torchrun --nproc_per_node 2 tools/benchmarks/shared_prompts.py --dp 2 --trace runs/gsm8k

Four ways take turns over the same samples in one process group: dense and skip, each before (every sample runs its own
prompt, and a pass takes the old log-probs of the first optimizer step) and after (`plan.share_prompts`, and the step's
own log-probs). Seconds are those of the pass and the update, medians over the repeats. The ideal of a way is the dense
run's FLOPs before over its own, attention counted; the planned ideal the time of its plans over the way's on the
pipeline's own clock, if a micro-batch costs nothing but its tokens (planning/cost.py): the bubble and uneven ranks are
in it. The shares are the measured ratio over each. With one optimizer step to a rollout, as here, no pass is left
after.

`memory` is what autograd keeps for the backward of a micro-batch, weights not counted, in the mean over micro-batches;
on a GPU the update's peak.
With --virtual-clock processes may outnumber cores: each stage's own CPU seconds per micro-batch are laid on
planning/timeline.py's clock; the pass then counts as a third of its plan's time, and no optimizer step runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from skip import logprob_pass, update
from skip_table import machine_name, replay, without_overhead, write_json

COLUMNS = ["prompt:response × group", "way", "s", "tokens", "ratio", "ideal", "share", "planned", "share", "memory MB"]
WAYS = (("dense", "before"), ("dense", "after"), ("skip", "before"), ("skip", "after"))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: torchrun --nproc_per_node 2 tools/benchmarks/shared_prompts.py --dp 2 --json shared.json",
    )
    parser.add_argument("--dp", type=int, default=1, help="data parallel degree")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel degree")
    parser.add_argument("--cp", type=int, default=1, help="context parallel degree")
    parser.add_argument(
        "--ratio", nargs="+", default=["1:4", "1:1", "4:1", "16:1"], help="prompt tokens to response tokens"
    )
    parser.add_argument("--group-size", type=int, nargs="+", default=[8, 16], help="samples of a group")
    parser.add_argument("--groups", type=int, default=8, help="prompts in the batch")
    parser.add_argument("--response-tokens", type=int, default=32, help="mean; lengths are log-normal around it")
    parser.add_argument("--dead-share", type=float, default=0.75, help="share of groups without signal, for the skip")
    parser.add_argument(
        "--trace",
        type=pathlib.Path,
        help="a run's folder: the lengths and rewards of its last rollout instead; the other sizes are not read",
    )
    parser.add_argument("--max-tokens-per-microbatch", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3, help="rounds of all four ways, after one to warm up")
    parser.add_argument("--virtual-clock", action="store_true", help="lay measured CPU seconds on a clock of its own")
    parser.add_argument(
        "--hf-path", help="a Hugging Face directory whose config is used (random weights); default: a small model"
    )
    parser.add_argument(
        "--family", choices=("qwen2", "qwen3_5_text"), default="qwen2", help="of the small model (gated delta nets)"
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of the configuration"
    )
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    given = parser.parse_args(arguments)
    world, asked = int(os.environ.get("WORLD_SIZE", "1")), given.dp * given.pp * given.cp
    if asked != world:
        parser.error(
            f"--dp {given.dp} x --pp {given.pp} x --cp {given.cp} is {asked} and {world} processes were started; run "
            f"torchrun --nproc_per_node {asked} tools/benchmarks/shared_prompts.py ..."
        )
    for ratio in given.ratio:
        if len(parts := ratio.split(":")) != 2 or not all(x.isdigit() and int(x) for x in parts):
            parser.error(f"--ratio {ratio} is not of the form PROMPT:RESPONSE, as in --ratio 16:1")
    if not given.trace and round(given.dead_share * given.groups) >= given.groups:
        parser.error(
            f"--dead-share {given.dead_share:g} of --groups {given.groups} leaves no group with signal, so the skip "
            "would run nothing; give more groups or a smaller share"
        )
    return given


def build_backend(given: argparse.Namespace):
    from transformers import CONFIG_MAPPING, AutoConfig

    from megatron_rl.backend import MegatronBackend
    from megatron_rl.config import load_config

    heads = given.hidden // 64
    delta = dict(head_dim=64, linear_num_key_heads=heads, linear_num_value_heads=heads)
    delta |= dict(linear_key_head_dim=64, linear_value_head_dim=64)
    hf_config = (
        AutoConfig.from_pretrained(given.hf_path)
        if given.hf_path
        else CONFIG_MAPPING[given.family](
            **(delta if given.family == "qwen3_5_text" else {}),
            vocab_size=given.vocab,
            hidden_size=given.hidden,
            num_hidden_layers=given.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            intermediate_size=given.hidden * 3,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
    )
    overrides = [
        f"parallel.pipeline={given.pp}",
        f"parallel.context={given.cp}",
        f"model.dtype={given.dtype}",
        "model.init=random",
        "plan.share_prompts=true",
        f"plan.max_tokens_per_microbatch={given.max_tokens_per_microbatch}",
        "optimizer.lr=1e-6",
        f"run.seed={given.seed}",
    ]
    return MegatronBackend(load_config(None, [*overrides, *given.set]), hf_config=hf_config, total_steps=10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Holds a batch's lengths and signal: int64 [S] of prompts, responses and groups, bool [S]."""

    name: str
    prompts: np.ndarray
    responses: np.ndarray
    groups: np.ndarray
    signal: np.ndarray


def drawn(given: argparse.Namespace, ratio: str, group_size: int) -> Lengths:
    """Draw responses around the mean, for prompts that are all as long as the ratio says."""
    random = np.random.default_rng(given.seed)
    prompt, response = (int(x) for x in ratio.split(":"))
    count = given.groups * group_size
    groups = np.arange(count) // group_size
    dead = random.permutation(given.groups)[: round(given.dead_share * given.groups)]
    tokens = np.clip(random.lognormal(np.log(given.response_tokens) - 0.08, 0.4, count).astype(int), 2, 4096)
    return Lengths(
        name=f"{ratio} × {group_size}",
        prompts=np.full(count, max(1, given.response_tokens * prompt // response)),
        responses=tokens,
        groups=groups,
        signal=~np.isin(groups, dead),
    )


def recorded(given: argparse.Namespace) -> Lengths:
    """Read the last rollout of a run; a group has signal where its rewards differ."""
    from megatron_rl.simulator.workload import read_trace

    last = read_trace(given.trace)[-1]
    spread = {g: np.ptp(last.rewards[last.groups == g]) for g in np.unique(last.groups).tolist()}
    if not any(spread.values()):
        sys.exit(f"--trace {given.trace}: no group of its last rollout has signal, so the skip would run nothing")
    return Lengths(
        name=given.trace.name,
        prompts=last.prompt_tokens,
        responses=last.response_tokens,
        groups=last.groups,
        signal=np.array([spread[g] > 0 for g in last.groups.tolist()]),
    )


def make_batch(backend, lengths: Lengths):
    """Make the same samples on every rank, one prompt to a group; each rank contributes its own share."""
    from megatron_rl.types import Sample

    random = np.random.default_rng(1)
    prompts = {
        group: random.integers(0, backend.shape.vocab_size, lengths.prompts[lengths.groups == group][0])
        for group in np.unique(lengths.groups).tolist()
    }
    samples = []
    for i, (group, response) in enumerate(zip(lengths.groups.tolist(), lengths.responses.tolist(), strict=True)):
        prompt = prompts[group]
        samples.append(
            Sample(
                sample_id=f"s{i}",
                prompt_tokens=len(prompt),
                token_ids=np.concatenate([prompt, random.integers(0, backend.shape.vocab_size, response)]),
                loss_mask=np.ones(response, dtype=bool),
                logprobs=np.full(response, -5.0, dtype=np.float32),
            )
        )
    topology = backend.topology
    mine = list(range(topology.rank, len(samples), topology.world_size))
    return backend.gather([samples[i] for i in mine], [int(lengths.groups[i]) for i in mine], mine)


@dataclass(slots=True, kw_only=True)
class Way:
    """Holds one way of running a batch: its plans and rows, FLOPs and measured seconds."""

    shares: bool
    train: tuple
    logprob: tuple | None
    flops: float
    planned: float
    tokens: int
    memory_bytes: int = 0
    seconds: list[float] = field(default_factory=list)


def make_way(backend, batch, signal: np.ndarray, name: tuple[str, str]) -> Way:
    from megatron_rl.model.costs import flops_per_token
    from megatron_rl.planning.cost import plan_seconds
    from megatron_rl.planning.tokens import tokens_of

    kind, when = name
    shares, drops = when == "after", kind == "skip"
    chosen = signal if drops else np.ones_like(signal)
    backend.rules = dataclasses.replace(backend.rules, share_prompts=shares)
    plans = {
        "train": backend.plan_training(batch, chosen, drops=drops),
        "logprob": backend.plan_pass(batch, chosen, drops=drops),
    }
    flops, planned = {}, {}
    sample_tokens, bare = tokens_of(batch.facts, share_prompts=shares), without_overhead(backend.fit.prior)
    for purpose, plan in plans.items():
        step = plan.mini_batches[0]
        run, squares = sample_tokens.sums(step.order, step.microbatch_offsets)
        tokens = float(run.sum())
        flops[purpose] = tokens * flops_per_token(backend.shape, float(squares.sum()) / tokens / 2), int(tokens)
        planned[purpose] = plan_seconds(bare, step, sample_tokens.padded(backend.rules.pad_multiple))
    passes = when == "before"
    return Way(
        shares=shares,
        train=(backend.fetch_rows(batch, plans["train"]), plans["train"]),
        logprob=(backend.fetch_rows(batch, plans["logprob"]), plans["logprob"]) if passes else None,
        flops=flops["train"][0] + (flops["logprob"][0] / 3 if passes else 0.0),
        planned=planned["train"] + (planned["logprob"] / 3 if passes else 0.0),
        tokens=flops["train"][1],
    )


def run_once(backend, way: Way, inputs, given: argparse.Namespace) -> float:
    """Return the seconds of the pass, if there is one, and of the update."""
    backend.rules = dataclasses.replace(backend.rules, share_prompts=way.shares)
    batch, plan = way.train
    if given.virtual_clock:
        seconds = 0.0
        for part, (its_batch, its_plan) in ((1.0, way.train), *(((1 / 3, way.logprob),) if way.logprob else ())):
            backend.zero_grad()
            backend.forward_backward(
                its_batch, its_plan.mini_batches[0], inputs, fingerprint=its_plan.fingerprints()[0]
            )
            seconds += part * replay(backend)[0]
        backend.zero_grad()
        return seconds
    seconds = logprob_pass(backend, *way.logprob) if way.logprob else 0.0
    return seconds + update(backend, batch, plan.mini_batches[0], plan.fingerprints()[0], inputs)[0]


def memory_bytes(backend, way: Way, inputs) -> int:
    """Return the peak of an update without its optimizer step; on a CPU what autograd keeps of a micro-batch."""
    import torch

    from megatron_rl.distributed.platform import HOST

    backend.rules = dataclasses.replace(backend.rules, share_prompts=way.shares)
    batch, plan = way.train
    step, fingerprint = plan.mini_batches[0], plan.fingerprints()[0]
    if HOST.is_cuda:
        HOST.take_peak_memory_bytes()
        backend.forward_backward(batch, step, inputs, fingerprint=fingerprint)
        backend.zero_grad()
        return HOST.take_peak_memory_bytes()
    weights = {p.untyped_storage().data_ptr() for chunk in backend.chunks for p in chunk.parameters()}
    holders: Counter[int] = Counter()  # by the address of a storage that autograd keeps
    total = 0

    class Kept:
        """Holds a tensor for the backward; its address is another's once the last holder is gone."""

        def __init__(self, tensor):
            nonlocal total
            self.tensor, storage = tensor, tensor.untyped_storage()
            self.address = storage.data_ptr()
            total += storage.nbytes() if not holders[self.address] and self.address not in weights else 0
            holders[self.address] += 1

        def __del__(self):
            holders[self.address] -= 1

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        backend.forward_backward(batch, step, inputs, fingerprint=fingerprint)
    backend.zero_grad()
    return total // max(int(step.num_microbatches[backend.topology.data_rank]), 1)


def measure(backend, lengths: Lengths, given: argparse.Namespace) -> dict:
    """Return one row: each way's seconds, ratio to the dense run before, ideal, and share of it."""
    from megatron_rl.algorithm.advantage import reduction_weights
    from megatron_rl.types import LossInputs

    batch = make_batch(backend, lengths)
    random = np.random.default_rng(2)
    advantages = np.where(lengths.signal, random.normal(size=len(lengths.signal)), 0.0)
    weights = reduction_weights("token_mean", batch.facts, np.arange(batch.facts.num_samples), max_response_tokens=1)
    inputs = LossInputs(advantages=advantages * weights, weights=weights)
    ways = {name: make_way(backend, batch, lengths.signal, name) for name in WAYS}
    for way in ways.values():
        way.memory_bytes = memory_bytes(backend, way, inputs)
    for repeat in range(given.repeats + 1):
        for way in ways.values():
            seconds = run_once(backend, way, inputs, given)
            if repeat:
                way.seconds.append(seconds)
    before = ways["dense", "before"]
    row: dict[str, object] = {"batch": lengths.name, "dead_share": float((~lengths.signal).mean())}
    for (kind, when), way in ways.items():
        seconds = statistics.median(way.seconds)
        ratio, ideal = statistics.median(before.seconds) / seconds, before.flops / way.flops
        row[f"{kind} {when}"] = {
            "seconds": seconds,
            "tokens": way.tokens,
            "ratio": ratio,
            "ideal": ideal,
            "share_of_ideal": ratio / ideal,
            "planned_ideal": before.planned / way.planned,
            "share_of_planned": ratio / (before.planned / way.planned),
            "memory_bytes": way.memory_bytes,
        }
    return row


def headline(row: dict) -> str:
    """Return a row in words: each way's speed against the dense update before, and its share of the ideal."""
    ways = [f"{kind} {when}" for kind, when in WAYS[1:]]
    said = [f"{way} {row[way]['ratio']:.2f} ({row[way]['share_of_ideal']:.2f})" for way in ways]
    return f"{row['batch']}: times as fast as the dense update before, share of the ideal: {', '.join(said)}"


def show(rows: list[dict], given: argparse.Namespace, machine: str) -> None:
    from rich.console import Console
    from rich.table import Table

    clock = "virtual clock" if given.virtual_clock else "wall time"
    table = Table(
        title=f"prompts once, no needless pass: DP {given.dp}, PP {given.pp}, CP {given.cp}; {clock}; {machine}"
    )
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        for kind, when in WAYS:
            x = row[f"{kind} {when}"]
            dead = f", {row['dead_share']:.0%} dead" if kind == "skip" else ""
            table.add_row(
                str(row["batch"]),
                f"{kind}{dead}, {when}",
                f"{x['seconds']:.3f}",
                f"{x['tokens']:,}",
                f"{x['ratio']:.2f}",
                f"{x['ideal']:.2f}",
                f"{x['share_of_ideal']:.2f}",
                f"{x['planned_ideal']:.2f}",
                f"{x['share_of_planned']:.2f}",
                f"{x['memory_bytes'] / 1e6:.1f}",
            )
    Console(width=150).print(table)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    from megatron_rl.backend import schedule

    if given.virtual_clock:
        schedule.HOST_CLOCK = time.thread_time  # autograd's backward runs in the thread that called it, on the CPU
    backend = build_backend(given)
    batches = [recorded(given)] if given.trace else [drawn(given, r, g) for r in given.ratio for g in given.group_size]
    rows, machine = [], machine_name()
    for lengths in batches:
        rows.append(measure(backend, lengths, given))
        if backend.topology.is_main:
            # after each batch, so that a kill leaves what was measured
            write_json(given, machine, rows=rows, headline=[headline(row) for row in rows])
    if backend.topology.is_main:
        show(rows, given, machine)
    backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
