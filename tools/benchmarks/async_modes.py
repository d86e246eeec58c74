"""Times a rollout made while the trainer trains, and one made before it trains: wall time, and the achieved overlap.

Each mode is a short run of its own of the same model and data, one trainer and one engine, round after round in turn.
The ideal is max(production, training) of the synchronous run, production being generation and rewards; an overlap of 1
reaches it. Needs vLLM in this environment, or --engine transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable

from short_run import prepare, short_run

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools" / "benchmarks"))
WORKERS = ("reward.num_workers=1",)
MODES = {
    "sync": ("rollout.producer.mode=sync",),
    "streaming, no staleness": ("rollout.producer.mode=streaming", "rollout.producer.max_staleness_steps=0"),
    "prefetch": ("rollout.producer.mode=prefetch",),
    "streaming": ("rollout.producer.mode=streaming",),
    "streaming, in flight": (
        "rollout.producer.mode=streaming",
        "rollout.producer.prefetch_rollouts=2",
        "weight_sync.in_flight=true",
    ),
}
FIRST_ROLLOUTS = 2  # left out: the engine starts in the first, and no rollout was made ahead of it


def slow_arithmetic(prompts, completions, completion_ids, answer, **columns):
    """Return the quickstart's reward after --reward-ms per sample, as a verifier that runs a program would."""
    from megatron_rl.reward.arithmetic import arithmetic

    time.sleep(len(prompts) * float(os.environ["BENCHMARK_REWARD_MS"]) / 1000)
    return arithmetic(prompts=prompts, completions=completions, completion_ids=completion_ids, answer=answer, **columns)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/async_modes.py --steps 12 --rounds 2 --json runs/benchmark_async.json",
    )
    parser.add_argument("--engine", default="vllm", choices=["vllm", "transformers"])
    parser.add_argument(
        "--modes",
        nargs="+",
        default=list(MODES),
        choices=list(MODES),
        metavar="MODE",
        help="; ".join(MODES) + " (vLLM alone)",
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=24, help="per rollout")
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--min-groups", type=int, default=6, help="of a part")
    parser.add_argument("--response-tokens", type=int, default=48)
    parser.add_argument("--reward-ms", type=float, default=2.0, help="that the reward of one sample takes")
    parser.add_argument("--steps", type=int, default=12, help="rollouts of each short run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    given = parser.parse_args(arguments)
    for name in ("hidden", "layers", "prompts", "samples", "min_groups", "response_tokens", "rounds"):
        if vars(given)[name] < 1:
            parser.error(f"--{name.replace('_', '-')} {vars(given)[name]} must be at least 1")
    if given.steps <= FIRST_ROLLOUTS:
        parser.error(f"--steps {given.steps} must be above {FIRST_ROLLOUTS}, the rollouts that are left out")
    if given.engine == "transformers":
        given.modes = [mode for mode in given.modes if "weight_sync.in_flight=true" not in MODES[mode]]
    if "sync" not in given.modes:
        parser.error("--modes must name sync, which the others are compared with")
    return given


def short_rows(
    given: argparse.Namespace, inputs: pathlib.Path, run_dir: pathlib.Path, *overrides: str, **variables: str
) -> list[dict]:
    """Return the rows of metrics.jsonl of a short run of the given sizes.

    variables: variables for the run's environment.
    """
    sizes = (
        f"train.num_rollouts={given.steps}",
        f"train.prompts_per_rollout={given.prompts}",
        f"rollout.samples_per_prompt={given.samples}",
        "train.samples_per_mini_batch=null",
        f"rollout.engine={given.engine}",
        f"rollout.max_response_tokens={given.response_tokens}",
        "eval.path=null",
        "eval.every_rollouts=null",
    )
    rows, _ = short_run(inputs, run_dir, *sizes, *overrides, **variables)
    return rows


def in_turn(given: argparse.Namespace, modes: Iterable[str], run: Callable[..., list[dict]]) -> dict[str, list[dict]]:
    """Return the results of ``run(given, inputs, run_dir, mode)`` for each mode, run round after round."""
    measured: dict[str, list[dict]] = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        prepare(folder / "inputs", hidden=given.hidden, layers=given.layers, max_position=512)
        for turn in range(given.rounds):
            for mode, rows in measured.items():
                rows += run(given, folder / "inputs", folder / f"{mode.replace(' ', '_')}_{turn}", mode)
    return measured


def run(given: argparse.Namespace, inputs: pathlib.Path, run_dir: pathlib.Path, mode: str) -> list[dict]:
    """Return one short run's measured rollouts: total seconds, seconds of generation and rewards, and staleness."""
    overrides = (
        "reward.functions=[async_modes:slow_arithmetic]",
        "reward.worker_environment=[BENCHMARK_REWARD_MS]",
        f"rollout.producer.min_groups={given.min_groups}",
        "skip.mode=off",
        "correction.mode=token_truncate",
        *WORKERS,
        *MODES[mode],
    )
    rollouts: dict[int, dict] = {}
    for row in short_rows(given, inputs, run_dir, *overrides, BENCHMARK_REWARD_MS=str(given.reward_ms)):
        rollout = rollouts.setdefault(row["rollout"], {"seconds": 0.0, "production": 0.0, "staleness": 0.0})
        rollout["seconds"] += row["time/step_s"]
        rollout["production"] += row.get("perf/rollout_generation_s", 0.0) + row.get("time/reward_s", 0.0)
        rollout["staleness"] = max(rollout["staleness"], row.get("async/staleness_max", 0.0))
    return [rollouts[number] for number in sorted(rollouts) if number > FIRST_ROLLOUTS]


def table_of(measured: dict[str, list[dict]]) -> list[dict]:
    """Return the medians per mode.

    ``overlap`` is the hidden share of the shorter of production and training, which the longer could hide.
    """
    by_mode = {
        mode: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for mode, rows in measured.items()
    }
    production = by_mode["sync"]["production"]
    training = by_mode["sync"]["seconds"] - production
    ideal = max(production, training)
    return [
        {
            "mode": mode,
            "seconds": medians["seconds"],
            "over sync": medians["seconds"] / by_mode["sync"]["seconds"],
            "over ideal": medians["seconds"] / ideal,
            "overlap": (production + training - medians["seconds"]) / min(production, training),
            "staleness": medians["staleness"],
        }
        for mode, medians in by_mode.items()
    ]


def show(rows: list[dict]) -> None:
    names = list(rows[0])
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        print("| " + " | ".join(f"{row[x]:.3g}" if isinstance(row[x], float) else row[x] for x in names) + " |")


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    from skip_table import machine_name

    measured = in_turn(given, given.modes, run)
    rows = table_of(measured)
    print(
        f"{machine_name()}; {given.engine}; {given.prompts} x {given.samples} samples a rollout; "
        f"{len(measured['sync'])} rollouts a mode"
    )
    one = {name: statistics.median(row[name] for row in measured["sync"]) for name in ("seconds", "production")}
    print(
        f"sync: {one['production']:.3g} s of generation and rewards, {one['seconds'] - one['production']:.3g} s of "
        "training"
    )
    show(rows)
    if given.json:
        given.json.write_text(json.dumps({"machine": machine_name(), "modes": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
