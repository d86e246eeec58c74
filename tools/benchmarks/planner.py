"""Measures the seconds of planning, far beyond one host: no process group, numpy alone.

python tools/benchmarks/planner.py --samples 1000000 --dp 1024 --pp 8
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

import numpy as np

from megatron_rl.planning.cost import prior
from megatron_rl.planning.plan import PlanRules, plan_steps


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/planner.py --samples 1000000 --dp 1024 --json plan.json",
    )
    parser.add_argument("--samples", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--dp", type=int, default=1024, help="data-parallel ranks")
    parser.add_argument("--pp", type=int, default=8, help="pipeline stages")
    parser.add_argument("--mini-batches", type=int, default=1)
    parser.add_argument("--dead-share", type=float, default=0.75, help="share of samples without signal")
    parser.add_argument("--mean-tokens", type=int, default=2000, help="lengths are log-normal around it")
    parser.add_argument("--max-tokens-per-microbatch", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    return parser.parse_args(arguments)


def planning_seconds(samples: int, given: argparse.Namespace) -> dict[str, float]:
    """Return median seconds of planning and of the fingerprints that ranks compare, dense and with the skip."""
    random = np.random.default_rng(0)
    lengths = np.clip(
        random.lognormal(np.log(given.mean_tokens), 0.6, samples).astype(np.int64), 8, given.max_tokens_per_microbatch
    )
    signal = random.random(samples) >= given.dead_share
    cost = prior([(4.0, 4.0, 4.0)] * given.pp, virtual=1, overhead_tokens=256, square_share=1e-4, head_layers=1.0)
    rules = PlanRules(data_size=given.dp, cost=cost, max_tokens=given.max_tokens_per_microbatch)
    mini_batches = np.array_split(np.arange(samples), given.mini_batches)
    medians = {}
    for name, drops in (("dense", False), ("skip", True)):
        seconds = []
        for _ in range(given.repeats):
            started = time.perf_counter()
            plan = plan_steps("train", mini_batches, lengths, signal, rules, drops=drops)
            plan.fingerprints()
            seconds.append(time.perf_counter() - started)
        medians[name] = statistics.median(seconds)
    return medians


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    print(
        f"{given.dp} data-parallel ranks, {given.pp} stages, {given.mini_batches} mini-batch(es), "
        f"{100 * given.dead_share:.0f} % dead"
    )
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}")
    rows = []
    for samples in given.samples:
        seconds = planning_seconds(samples, given)
        rows.append({"samples": samples, **seconds})
        print(f"{samples:>10,} samples: dense {seconds['dense']:.3f} s, skip {seconds['skip']:.3f} s")
    if given.json:
        settings = {key: value for key, value in vars(given).items() if key != "json"}
        given.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
        print(f"written: {given.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
