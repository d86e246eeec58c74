"""Compares training on groups without signal, skipping them, and asking further prompts in their places.

The settings are skip.mode=off, skip.mode=exact and rollout.dynamic_sampling. Per rollout: generated tokens, seconds of
generation, log-probs and update, and groups with signal. Each mode is a short run of its own of the same model and
data, round after round in turn; --dead of the prompts never have signal. The learning rate is 0, so that all modes
sample from the same policy.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools" / "benchmarks"))
MODES = {
    "train all": ("skip.mode=off",),
    "skip": ("skip.mode=exact",),
    "refill": ("skip.mode=exact", "rollout.dynamic_sampling.max_rounds=50"),
}
COUNTED = {
    "tokens": "rollout/tokens",
    "rollout s": "time/rollout_s",
    "logprob s": "time/logprob_s",
    "update s": "time/update_s",
}


def partly_dead(prompts, completions, completion_ids, **columns):
    """Return 1 for a share of the prompts, whatever the answer; for the others 1 if the completion's length is odd."""
    dead = float(os.environ["BENCHMARK_DEAD"])
    return [
        1.0 if zlib.crc32(prompt.encode()) / 2**32 < dead else float(len(ids) % 2)
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0].rstrip(","),
        epilog="example: python tools/benchmarks/refill.py --dead 0.75 --steps 8",
    )
    parser.add_argument("--dead", type=float, default=0.75, help="share of the prompts without signal")
    parser.add_argument("--engine", default="vllm", choices=["vllm", "transformers"])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=32, help="per rollout")
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--response-tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8, help="rollouts of each short run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    given = parser.parse_args(arguments)
    for name in ("hidden", "layers", "prompts", "samples", "response_tokens", "rounds"):
        if vars(given)[name] < 1:
            parser.error(f"--{name.replace('_', '-')} {vars(given)[name]} must be at least 1")
    if not 0.0 <= given.dead < 1.0:
        parser.error(f"--dead {given.dead} must be at least 0 and below 1")
    if given.steps < 2:
        parser.error(f"--steps {given.steps} must be at least 2: the first rollout is left out")
    return given


def run(given: argparse.Namespace, inputs: pathlib.Path, run_dir: pathlib.Path, mode: str) -> list[dict[str, float]]:
    """Return one short run's rollouts without the first, in which the engine starts."""
    from async_modes import short_rows

    overrides = (
        "reward.functions=[refill:partly_dead]",
        "metrics.dense_every_rollouts=0",
        "optimizer.lr=0",
        *MODES[mode],
    )
    rollouts = []
    for row in short_rows(given, inputs, run_dir, *overrides, BENCHMARK_DEAD=str(given.dead)):
        live = (1.0 - row["skip/zero_advantage_ratio"]) * given.prompts
        rollouts.append(
            {
                "groups with signal": live,
                **{name: row.get(key, 0.0) for name, key in COUNTED.items()},
                "all s": row["time/step_s"],
            }
        )
    return rollouts[1:]


def table_of(measured: dict[str, list[dict[str, float]]]) -> list[dict]:
    """Return means per mode, since refills come in rounds; the last column is a live group's total seconds."""
    rows = []
    for mode, rollouts in measured.items():
        mean = {name: statistics.fmean(row[name] for row in rollouts) for name in rollouts[0]}
        live = max(mean["groups with signal"], 1e-9)
        rows.append(
            {"mode": mode, **mean, "tokens a live group": mean["tokens"] / live, "s a live group": mean["all s"] / live}
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    from async_modes import in_turn, show
    from skip_table import machine_name

    measured = in_turn(given, MODES, run)
    rows = table_of(measured)
    print(
        f"{machine_name()}; {given.engine}; {given.prompts} x {given.samples} samples a rollout, {given.dead:.0%} of "
        "the prompts dead"
    )
    show(rows)
    if given.json:
        given.json.write_text(json.dumps({"machine": machine_name(), "modes": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
