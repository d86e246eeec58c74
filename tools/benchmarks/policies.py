"""Compares this repository's skip with verl #5838's three planning policies: cost, and distance from the dense run.

    torchrun --nproc_per_node 2 tools/benchmarks/policies.py --dp 2 --dead-share 0.75 --json policies.json

All policies are plans through the same schedule, of the same samples; policies_plans.py says how each of #5838's
(https://github.com/verl-project/verl/pull/5838) is understood. Every policy is timed at every
--max-tokens-per-microbatch, in turns, over one rollout's update phase (all its optimizer steps); the table shows each
at its fastest.

Error: several rollouts of several mini-batches from the same initial weights under AdamW, then ‖w − w_dense‖ over
‖w_dense − w_start‖, all weights together, and over ‖w_dense‖. The loss is a sum over tokens whose weights are each
sample's own in the dense run, so that an error comes from the step that a sample is trained in; "renormalised" counts
fewest_steps' denominator over the samples that the step runs, as #5838 does in that mode. The row "dense, other cut" is
the same dense run under another token cap: its error is float rounding alone. Predicted seconds: the cost model fitted
to the measured micro-batches, and dense optimizer steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys

import skip as benchmark_skip
from skip_table import machine_name, write_json

LEAST_CAPS = 3
LEAST_TOKENS = 8  # of a sample of benchmark_skip.make_batch
DEFAULT_CAPS = (512, 1024, 2048)
VARIANTS = (  # name of the row, policy, True for renormalised weights
    ("dense", "dense", False),
    ("dense, other cut", "dense", False),
    ("ours", "ours", False),
    ("keep_one", "keep_one", False),
    ("filter_pad", "filter_pad", False),
    ("fewest_steps", "fewest_steps", False),
    ("fewest_steps, renormalised", "fewest_steps", True),
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options, over skip.py's defaults for its model and samples."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: torchrun --nproc_per_node 2 tools/benchmarks/policies.py --pp 2 --dead-share 0.75 0.9 "
        "--json policies.json",
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel degree")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel degree")
    parser.add_argument(
        "--dp", type=int, default=1, help="data parallel degree; tp x pp x dp processes must have been started"
    )
    parser.add_argument(
        "--dead-share", type=float, nargs="+", default=[0.75], help="shares of groups without signal, 0 to 1"
    )
    parser.add_argument(
        "--max-tokens-per-microbatch", type=int, nargs="+", default=list(DEFAULT_CAPS), help="settings, at least three"
    )
    parser.add_argument("--rollouts", type=int, default=4, help="of a trajectory")
    parser.add_argument("--mini-batches", type=int, default=4, help="optimizer steps of the dense run per rollout")
    parser.add_argument("--lr", type=float, default=1e-4, help="of the trajectories")
    parser.add_argument("--weight-decay", type=float, default=0.01, help="of the trajectories")
    parser.add_argument("--adam-epsilon", type=float, default=1e-8, help="of the trajectories")
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed update phases per policy and setting, after one to warm up"
    )
    parser.add_argument("--groups", type=int, default=40, help="prompt groups in a rollout")
    parser.add_argument("--group-size", type=int, default=4, help="samples per group")
    parser.add_argument(
        "--mean-tokens", type=int, default=64, help="mean length of a sample; lengths are log-normal around it"
    )
    parser.add_argument(
        "--hf-path", help="a Hugging Face directory whose config is used (random weights); default: a small Qwen2"
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, help="write every setting's figures there")
    given = parser.parse_args(arguments)
    if fault := fault_of(given):
        parser.error(fault)
    given.max_tokens_per_microbatch = sorted(set(given.max_tokens_per_microbatch))
    defaults = benchmark_skip.parse(["--tp", str(given.tp), "--pp", str(given.pp), "--dp", str(given.dp)])
    return argparse.Namespace(**vars(defaults) | vars(given))


def fault_of(given: argparse.Namespace) -> str | None:
    """Return the fault in the options, or None if they are valid."""
    degrees, world = given.tp * given.pp * given.dp, int(os.environ.get("WORLD_SIZE", "1"))
    if degrees != world:
        return (
            f"--tp {given.tp} x --pp {given.pp} x --dp {given.dp} is {degrees} and {world} processes were started; "
            f"run torchrun --nproc_per_node {degrees} tools/benchmarks/policies.py ..."
        )
    if any(not 0 <= share <= 1 for share in given.dead_share):
        return f"--dead-share {given.dead_share} must lie between 0 and 1"
    caps = given.max_tokens_per_microbatch
    if len(set(caps)) < LEAST_CAPS or min(caps) < LEAST_TOKENS:
        return (
            f"--max-tokens-per-microbatch {caps} must name at least {LEAST_CAPS} different caps of at least "
            f"{LEAST_TOKENS} tokens"
        )
    for name in ("rollouts", "mini_batches", "repeats"):
        if getattr(given, name) < 1:
            return f"--{name.replace('_', '-')} {getattr(given, name)} must be at least 1"
    if given.groups % given.mini_batches:
        return f"--groups {given.groups} must be a multiple of --mini-batches {given.mini_batches}"
    return None


def make_rollouts(backend, given: argparse.Namespace, share: float) -> list:
    """Make rollouts, each of other samples and advantages, the same for every policy.

    No sample is longer than the smallest cap.
    """
    import numpy as np
    import policies_run as run

    from megatron_rl.planning.plan import split_mini_batches

    count = given.groups * given.group_size
    members = split_mini_batches(np.arange(count), count // given.mini_batches)
    rollouts = []
    for number in range(given.rollouts):
        seeded = vars(given) | {
            "seed": given.seed + 100 * number,
            "max_tokens_per_microbatch": min(given.max_tokens_per_microbatch),
        }
        sizes = argparse.Namespace(**seeded)
        values = benchmark_skip.make_advantages(share, sizes)
        rollouts.append(
            run.Rollout(batch=benchmark_skip.make_batch(backend, sizes), values=values, mini_batches=members)
        )
    return rollouts


def measure(backend, given: argparse.Namespace, share: float) -> dict:
    """Measure one dead share: costs at every setting, and each variant's error at its policy's fastest setting.

    Every trajectory starts at the reference weights.
    """
    import policies_run as run

    caps, rules = given.max_tokens_per_microbatch, backend.rules
    rollouts = make_rollouts(backend, given, share)
    with backend.reference_weights():
        start = run.exported(backend)
    backend.reset_optimizer(total_steps=10_000)
    # Time every policy at every cap; each then trains at its fastest.
    costs = run.costs(backend, rollouts[0], rules, caps, given.repeats)
    best = {name: min(rows, key=lambda row: row["seconds"]) for name, rows in costs.items()}
    # Train every variant from the same start, and compare its weights with the dense run's.
    rows, truth = [], None
    for name, policy, renormalised in VARIANTS:
        cost = best[policy]
        if name == "dense, other cut":
            cost = next(row for row in costs[policy] if row["max_tokens"] != cost["max_tokens"])
        cut = run.with_cap(rules, cost["max_tokens"])
        end = run.train(
            backend, rollouts, policy, cut, lr=given.lr, weight_decay=given.weight_decay, renormalised=renormalised
        )
        truth = truth or end
        ratio = best["dense"]["seconds"] / cost["seconds"]
        rows.append(
            {
                "name": name,
                "policy": policy,
                "renormalised": renormalised,
                **cost,
                "ratio": ratio,
                **run.errors(end, truth, start),
            }
        )
    return {"dead_share": share, "rows": rows, "settings": costs, "trajectory": describe(rollouts, rules, best)}


def describe(rollouts: list, rules, best: dict[str, dict]) -> dict[str, dict]:
    """Return sums over a trajectory's rollouts for each policy at its fastest setting.

    They count tokens, micro-batches, REAL and ghost steps.
    """
    import policies_run as run

    sums = {}
    for policy, cost in best.items():
        cut = run.with_cap(rules, cost["max_tokens"])
        descriptions = [run.describe(x.plan(policy, cut), x.lengths) for x in rollouts]
        sums[policy] = {key: sum(x[key] for x in descriptions) for key in descriptions[0]}
    return sums


def show(shares: list[dict], given: argparse.Namespace, machine: str) -> None:
    from rich.console import Console
    from rich.table import Table

    for share in shares:
        table = Table(
            title=f"{100 * share['dead_share']:.0f} % dead, {given.rollouts} rollouts of {given.mini_batches} "
            f"mini-batches: TP {given.tp}, PP {given.pp}, DP {given.dp}; {machine}"
        )
        names = (
            "policy",
            "cap",
            "s",
            "dense / s",
            "predicted s",
            "tokens",
            "micro-batches",
            "steps",
            "ghosts",
            "error / movement",
        )
        for name in (*names, "error / weights"):
            table.add_column(name, justify="left" if name == "policy" else "right")
        for row in share["rows"]:
            moved = row["error_of_movement"]
            table.add_row(
                row["name"],
                str(row["max_tokens"]),
                f"{row['seconds']:.3f}",
                f"{row['ratio']:.2f}",
                f"{row['predicted_s']:.3f}",
                str(row["tokens"]),
                str(row["microbatches"]),
                str(row["real_steps"]),
                str(row["ghost_steps"]),
                "-" if moved is None else f"{moved:.1e}",
                f"{row['error_of_weights']:.1e}",
            )
        Console(width=150).print(table)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)

    first = argparse.Namespace(**vars(given) | {"max_tokens_per_microbatch": min(given.max_tokens_per_microbatch)})
    backend = benchmark_skip.build_backend(first)
    optimizer = dataclasses.replace(backend.config.optimizer, epsilon=given.adam_epsilon)
    backend.config = dataclasses.replace(backend.config, optimizer=optimizer)  # read by every reset_optimizer
    backend.keep_reference()
    shares = [measure(backend, given, share) for share in given.dead_share]
    if backend.topology.is_main:
        machine = machine_name()
        show(shares, given, machine)
        write_json(given, machine, shares=shares)
        if given.json:
            print(f"written: {given.json}")
    backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
