"""Measures dense and skip updates in turn on the same samples: the ratio of medians and its share of the ideal.

    torchrun --nproc_per_node 2 tools/benchmarks/skip.py --dp 2 --dead-share 0.75
    torchrun --nproc_per_node 4 tools/benchmarks/skip.py --pp 4 --layers 8 --virtual-clock --dead-share 0.75

Both run in one process group. The update phase runs from zeroing the gradients to the end of the parameter gather; the
whole phase has the pass for old log-probs before it. The ideal is dense tokens over surviving tokens; the planned ideal
is the dense plan's time over the skip plan's time if a micro-batch costs nothing but its tokens, on
planning/timeline.py's clock: the pipeline's bubble and uneven ranks are in both, its fixed costs in neither. The fixed
part f is the optimizer step (reduction, norm, AdamW, gather) over the dense update: with it no skip can pass ideal / (1
+ f · (ideal − 1)), which at 75 % is a share of 1 / (1 + 3f). At 100 % no ideal exists: the ghost step is set against an
optimizer step. The spread is the standard deviation of measured over predicted seconds, over their mean, among batches
and repeats; on the virtual clock also among micro-batches.

With --virtual-clock processes may outnumber cores: each stage's own CPU seconds per micro-batch are measured and laid
on planning/timeline.py's clock, and no optimizer step runs.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time
from dataclasses import dataclass, field

import numpy as np
from skip_table import machine_name, replay, show, summarise, write_json

SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: torchrun --nproc_per_node 2 tools/benchmarks/skip.py --pp 2 --dead-share 0.75 0.9 "
        "--json skip.json",
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel degree")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel degree")
    parser.add_argument(
        "--dp", type=int, default=1, help="data parallel degree; tp x pp x dp processes must have been started"
    )
    parser.add_argument(
        "--dead-share", type=float, nargs="+", default=list(SHARES), help="shares of groups without signal, 0 to 1"
    )
    parser.add_argument("--virtual-pipeline", type=int, default=1, help="chunks of layers per pipeline rank")
    parser.add_argument(
        "--virtual-clock", action="store_true", help="lay measured CPU seconds per stage on a clock of its own"
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="plan by costs fitted in a first pass (plan.calibrate), not by the prior",
    )
    parser.add_argument(
        "--batches", type=int, default=1, help="batches of samples, each measured at every share; medians over them"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="pairs of dense and skip updates per share, after one to warm up"
    )
    parser.add_argument("--groups", type=int, default=40, help="prompt groups in the batch")
    parser.add_argument("--group-size", type=int, default=4, help="samples per group")
    parser.add_argument(
        "--mean-tokens", type=int, default=64, help="mean length of a sample; lengths are log-normal around it"
    )
    parser.add_argument("--max-tokens-per-microbatch", type=int, default=1024)
    parser.add_argument(
        "--hf-path", help="a Hugging Face directory whose config is used (random weights); default: a small Qwen2"
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
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if given.tp * given.pp * given.dp != world:
        parser.error(
            f"--tp {given.tp} x --pp {given.pp} x --dp {given.dp} is {given.tp * given.pp * given.dp} and {world} "
            f"processes were started; run torchrun --nproc_per_node {given.tp * given.pp * given.dp} "
            "tools/benchmarks/skip.py ..."
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
            vocab_size=given.vocab,
            hidden_size=given.hidden,
            num_hidden_layers=given.layers,
            num_attention_heads=given.hidden // 64,
            num_key_value_heads=given.hidden // 64,
            intermediate_size=given.hidden * 3,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
    )
    overrides = [
        f"parallel.tensor={given.tp}",
        f"parallel.pipeline={given.pp}",
        f"model.dtype={given.dtype}",
        "model.init=random",
        f"plan.max_tokens_per_microbatch={given.max_tokens_per_microbatch}",
        "optimizer.lr=1e-6",
        f"run.seed={given.seed}",
        f"parallel.virtual_pipeline={given.virtual_pipeline}",
        f"plan.calibrate={str(given.calibrate).lower()}",
    ]
    return MegatronBackend(load_config(None, [*overrides, *given.set]), hf_config=hf_config, total_steps=10_000)


def make_batch(backend, given: argparse.Namespace, number: int = 0):
    """Make the same ragged samples on every rank; each rank contributes its own share.

    number: another number gives other samples.
    """
    from megatron_rl.types import Sample

    random = np.random.default_rng(given.seed + 1000 * number)
    count = given.groups * given.group_size
    lengths = np.clip(
        random.lognormal(np.log(given.mean_tokens), 0.4, count).astype(int), 8, given.max_tokens_per_microbatch
    )
    samples = []
    for i, length in enumerate(lengths):
        prompt = max(2, int(length) // 4)
        response = int(length) - prompt
        samples.append(
            Sample(
                sample_id=f"s{i}",
                prompt_tokens=prompt,
                token_ids=random.integers(0, backend.shape.vocab_size, int(length)),
                loss_mask=np.ones(response, dtype=bool),
                logprobs=np.full(response, -5.0, dtype=np.float32),
            )
        )
    topology = backend.topology
    mine = list(range(topology.rank, count, topology.world_size))
    return backend.gather([samples[i] for i in mine], [i // given.group_size for i in mine], mine)


def make_advantages(share: float, given: argparse.Namespace) -> np.ndarray:
    """Return advantages: 0 in whole dead groups, of both signs in the others."""
    random = np.random.default_rng(given.seed + 1)
    dead = random.permutation(given.groups)[: round(share * given.groups)]
    values = random.normal(size=given.groups * given.group_size)
    values[np.isin(np.arange(len(values)) // given.group_size, dead)] = 0.0
    return values


def update(backend, batch, mini_batch, fingerprint: bytes, inputs) -> tuple[float, float]:
    """Return the seconds of one whole update, and of its optimizer step."""
    import torch.distributed as dist

    from megatron_rl.distributed.platform import HOST

    dist.barrier()
    HOST.synchronize()
    started = time.perf_counter()
    backend.zero_grad()
    backend.forward_backward(batch, mini_batch, inputs, fingerprint=fingerprint)
    HOST.synchronize()
    dist.barrier()  # so that the optimizer's share excludes another rank's lateness
    stepped = time.perf_counter()
    backend.optim_step(mini_batch.kind)
    backend.schedule.gather_parameters()
    HOST.synchronize()
    ended = time.perf_counter()
    return ended - started, ended - stepped


def logprob_pass(backend, batch, plan) -> float:
    """Return the seconds of the pass for old log-probs."""
    import torch.distributed as dist

    from megatron_rl.distributed.platform import HOST

    dist.barrier()
    HOST.synchronize()
    started = time.perf_counter()
    backend.forward(batch, plan)
    HOST.synchronize()
    return time.perf_counter() - started


@dataclass(slots=True, kw_only=True)
class Case:
    """Holds one batch at one share: its inputs, plans, rows and measurements.

    plans, batches: by ("train" or "logprob", "dense" or "skip").
    """

    batch: object
    inputs: object
    plans: dict[tuple[str, str], object]
    batches: dict[tuple[str, str], object]
    planning_s: float
    updates: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"dense": [], "skip": []})
    passes: dict[str, list[float]] = field(default_factory=lambda: {"dense": [], "skip": []})
    clocks: dict[str, list[float]] = field(default_factory=lambda: {"dense": [], "skip": []})
    factors: dict[str, list[float]] = field(default_factory=lambda: {"dense": [], "skip": []})


def make_case(backend, batch, share: float, given: argparse.Namespace) -> Case:
    from megatron_rl.algorithm.advantage import reduction_weights
    from megatron_rl.algorithm.signal import has_signal
    from megatron_rl.types import LossInputs

    values = make_advantages(share, given)
    signal = has_signal(values, batch.facts.loss_tokens)
    weights = reduction_weights("token_mean", batch.facts, np.arange(batch.facts.num_samples), max_response_tokens=1)
    seconds, plans = {}, {}
    for purpose in ("train", "logprob"):
        for name in ("dense", "skip"):
            started = time.perf_counter()
            chosen = signal if name == "skip" else np.ones_like(signal)
            plan = backend.plan_training if purpose == "train" else backend.plan_pass
            plans[purpose, name] = plan(batch, chosen, drops=name == "skip")
            seconds[purpose, name] = time.perf_counter() - started
    batches = {key: backend.fetch_rows(batch, plan) for key, plan in plans.items()}
    inputs = LossInputs(advantages=values * weights, weights=weights)
    return Case(batch=batch, inputs=inputs, plans=plans, batches=batches, planning_s=seconds["train", "skip"])


def measure(backend, batches: list, share: float, given: argparse.Namespace) -> dict:
    """Return one row of the table.

    It holds medians over batches of medians over alternating dense and skip updates on the same samples.
    """
    cases = [make_case(backend, batch, share, given) for batch in batches]
    for repeat in range(given.repeats + 1):
        for case in cases:
            for name in ("dense", "skip"):
                measured = clock_once if given.virtual_clock else update_once
                measured(backend, case, name, keep=repeat > 0)
    return summarise(share, cases, backend)


def update_once(backend, case: Case, name: str, *, keep: bool) -> None:
    pass_s = logprob_pass(backend, case.batches["logprob", name], case.plans["logprob", name])
    plan = case.plans["train", name]
    update_s = update(backend, case.batches["train", name], plan.mini_batches[0], plan.fingerprints()[0], case.inputs)
    if keep:
        case.passes[name].append(pass_s)
        case.updates[name].append(update_s)


def clock_once(backend, case: Case, name: str, *, keep: bool) -> None:
    """Lay the CPU seconds of every stage's micro-batches on the schedule's clock."""
    plan = case.plans["train", name]
    backend.zero_grad()
    backend.forward_backward(
        case.batches["train", name], plan.mini_batches[0], case.inputs, fingerprint=plan.fingerprints()[0]
    )
    seconds, factors = replay(backend)
    backend.zero_grad()
    if keep:
        case.clocks[name].append(seconds)
        case.factors[name] += factors


def calibrate(backend, batches: list, given: argparse.Namespace) -> None:
    """Run updates of several sizes on each batch, so that the costs are fitted before the first measured plan."""
    for share in (0.5, 0.9):
        for batch in batches:
            case = make_case(backend, batch, share, given)
            for name in ("dense", "skip"):
                update_once(backend, case, name, keep=False)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    from megatron_rl.backend import schedule

    if given.virtual_clock:
        schedule.HOST_CLOCK = time.thread_time  # autograd's backward runs in the thread that called it, on the CPU
    backend = build_backend(given)
    batches = [make_batch(backend, given, number) for number in range(given.batches)]
    calibrate(backend, batches, given)
    rows, machine = [], machine_name()
    for share in given.dead_share:
        rows.append(measure(backend, batches, share, given))
        if backend.topology.is_main:
            write_json(given, machine, rows=rows)  # after each share, so that a kill leaves what was measured
    if backend.topology.is_main:
        show(rows, given, machine)
        if given.json:
            print(f"written: {given.json}")
    backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
