"""Runs an example several ways and seeds, and compares what each needs to the same held-out score.

    python tools/benchmarks/whole_runs.py --example smollm2 --ways today rloo adaptive --seeds 0 1 2 --out runs/whole
    PREPARE="--test-rows 40" python tools/benchmarks/whole_runs.py --out runs/quick eval.every_rollouts=10 \\
        eval.path={run_dir}/inputs/test.jsonl eval.samples_per_prompt=8 eval.temperature=1

A way is a set of settings; the ways of a seed run one after the other, each as a user starts it. For each run: rollout
tokens, seconds of rollouts and weights, seconds of steps, the last held-out score, and the same to the first evaluation
whose score is at least --target. Evaluations are not counted. The example's own variables, such as PREPARE, go along.
A run whose folder in --out is whole is not run again, so a call that was ended goes on. Ratios are of the first way
named to each other, seed by seed, then their median.

ways: `today` is the example as it is; `rloo` has the unbiased estimator alone; `adaptive` adds adaptive group sizes to
it; `speculation` adds drafts from earlier answers to `today`; `both` is adaptive and speculation. --way adds one of
your own, and `+` puts ways together: --way ends=reward.decided=./my.py:decided --ways today both both+ends
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
RLOO = ("advantage.estimator=rloo",)
ADAPTIVE = (*RLOO, "rollout.group_sizes=adaptive")
HISTORY = ("rollout.speculation=history",)
WAYS: dict[str, tuple[str, ...]] = {
    "today": (),
    "rloo": RLOO,
    "adaptive": ADAPTIVE,
    "speculation": HISTORY,
    "both": (*ADAPTIVE, *HISTORY),
}
FIGURES = ("rollouts", "tokens", "rollout_s", "step_s")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/whole_runs.py --example quickstart --seeds 0 1 2 --out runs/whole "
        "eval.every_rollouts=20",
    )
    parser.add_argument("--example", default="quickstart", help="folder of examples/ with a run.sh")
    ways = f"of {', '.join(WAYS)} and --way's"
    parser.add_argument("--ways", nargs="+", default=list(WAYS), metavar="WAY", help=ways)
    parser.add_argument("--way", action="append", default=[], metavar="NAME=SETTING", help="a way of your own")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    parser.add_argument("--target", type=float, help="held-out score; default: the lowest last score of all runs")
    parser.add_argument("--timeout", type=float, default=7200, metavar="S", help="of one run")
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="of every way; {run_dir} is the run's"
    )
    given = parser.parse_args(arguments)
    own = {name: (setting,) for name, _, setting in (way.partition("=") for way in given.way)}
    given.settings = WAYS | own
    unknown = sorted({name for way in given.ways for name in way.split("+")} - set(given.settings))
    if unknown:
        parser.error(f"--ways {unknown[0]} is none of {', '.join(given.settings)}; --way {unknown[0]}=SETTING adds it")
    return given


def rows_of(folder: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(given: argparse.Namespace, way: str, seed: int) -> pathlib.Path:
    """Return the folder of a run, which is made unless it is whole."""
    folder = given.out / f"{way}-{seed}"
    if not (folder / "whole").exists():
        own = [setting.replace("{run_dir}", str(folder.resolve())) for setting in given.overrides]
        of_way = [setting for name in way.split("+") for setting in given.settings[name]]
        command = ["bash", f"examples/{given.example}/run.sh", f"run.seed={seed}", *own, *of_way]
        environment = os.environ | {"RUN_DIR": str(folder.resolve())}
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "output.txt").open("w") as output:
            subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=given.timeout, check=True
            )
        (folder / "whole").touch()
    return folder


def score_key(rows: Sequence[Mapping]) -> str:
    """Return the metric of the held-out score, the mean over the samples of each prompt."""
    (key,) = {key for row in rows for key in row if key.startswith("eval/") and "/mean@" in key and key[-1].isdigit()}
    return key


def figures_until(rows: Sequence[Mapping], target: float | None) -> dict[str, float] | None:
    """Return the sums over a run's steps, up to the first evaluation of at least ``target``; None if there is none.

    target: a held-out score; None: the whole run.
    """
    key, sums, rollouts = score_key(rows), dict.fromkeys(FIGURES, 0.0), set()
    for row in rows:
        if "rollout" in row:
            rollouts.add(row["rollout"])
        sums["tokens"] += row.get("rollout/tokens", 0.0)
        sums["rollout_s"] += row.get("time/rollout_s", 0.0) + row.get("time/weight_sync_s", 0.0)
        sums["step_s"] += row.get("time/step_s", 0.0)
        if target is not None and row.get(key, -1.0) >= target:
            break
    else:
        if target is not None:
            return None
    return sums | {"rollouts": float(len(rollouts))}


def compared(found: Mapping[str, Mapping[int, Sequence[Mapping]]], target: float | None) -> dict:
    """Return the figures of every run and the ratios to the first way. ``found``: way → seed → rows."""
    scores = {
        way: {seed: [row[score_key(rows)] for row in rows if score_key(rows) in row][-1] for seed, rows in runs.items()}
        for way, runs in found.items()
    }
    target = min(score for runs in scores.values() for score in runs.values()) if target is None else target
    whole = {way: {seed: figures_until(rows, None) for seed, rows in runs.items()} for way, runs in found.items()}
    reached = {way: {seed: figures_until(rows, target) for seed, rows in runs.items()} for way, runs in found.items()}
    first = next(iter(found))
    ratios: dict[str, dict[str, float]] = {}
    for way, runs in reached.items():
        for figure in FIGURES:
            pairs = [(reached[first][seed], own) for seed, own in runs.items()]
            own = [base[figure] / mine[figure] for base, mine in pairs if base and mine and mine[figure]]
            if len(own) == len(pairs):
                ratios.setdefault(way, {})[figure] = statistics.median(own)
    return {"target": target, "last_score": scores, "whole": whole, "to_target": reached, "ratios": ratios}


def table_of(result: Mapping) -> str:
    lines = [
        "| way | seed | last score | rollouts | tokens | rollout s | step s | to the target: rollouts, tokens, s |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for way, runs in result["whole"].items():
        for seed, all_ in runs.items():
            to = result["to_target"][way][seed]
            until = "not reached" if to is None else f"{to['rollouts']:.0f}, {to['tokens']:,.0f}, {to['step_s']:.0f}"
            lines.append(
                f"| {way} | {seed} | {result['last_score'][way][seed]:.3f} | {all_['rollouts']:.0f} | "
                f"{all_['tokens']:,.0f} | {all_['rollout_s']:.0f} | {all_['step_s']:.0f} | {until} |"
            )
    lines.append("")
    for way, ratios in result["ratios"].items():
        lines.append(f"{way}: " + ", ".join(f"{figure} {value:.2f}" for figure, value in ratios.items()))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    found: dict[str, dict[int, list[dict]]] = {way: {} for way in given.ways}
    for seed in given.seeds:
        for way in given.ways:
            print(f"{way}, seed {seed}", file=sys.stderr, flush=True)
            found[way][seed] = rows_of(run(given, way, seed))
    result = compared(found, given.target)
    print(table_of(result))
    print(f"target {result['target']:.3f}; {platform.machine()}, {os.cpu_count()} cores, {given.example}")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
