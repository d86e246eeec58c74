"""Trains the quickstart for some rollouts in one process: reward, seconds a rollout, and the exported weights.

python tools/gpu_report_steps/short_run.py --json run.json --work /tmp/work --set model.dtype=bfloat16
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import re
import statistics
import subprocess
import sys

from clock import write

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMON = ("parallel.pipeline=1", "metrics.progress=false", "train.export_last=true", "run.deadline_s=60")
QUICKSTART = ("sft.steps=40", "train.num_rollouts=20")
# A base that was never trained answers nothing right: rewards by length, which any policy can earn.
ADAPTERS = (
    "lora.rank=8",
    "lora.alpha=16",
    "model.layer_spec=torch",
    "sft.steps=0",
    "train.num_rollouts=5",
    "optimizer.lr=2e-3",
    "reward.functions=[tests.reward_functions:parity]",
)
SMALL = ("sft.steps=2", "train.num_rollouts=2", "train.prompts_per_rollout=8", "train.samples_per_mini_batch=32")
DRAFTS = ("speculation/drafted", "speculation/accepted")
FINITE = ("train/loss", "train/grad_norm", "reward/mean")


def train(given: argparse.Namespace) -> list[dict]:
    """Run the command line, and return the rows of its metrics. Raises RuntimeError where it fails."""
    inputs, run = given.work / "inputs", given.work / "run"
    commands = [
        [str(ROOT / "examples/quickstart/prepare.py"), "--out", str(inputs), "--digits", "1", "--operations", "+,-"],
        ["-m", "megatron_rl.train", "--config", str(ROOT / "examples/quickstart/quickstart.yaml")],
    ]
    commands[1] += ["--run-dir", str(run), f"model.hf_path={inputs / 'model'}", f"data.train={inputs / 'train.jsonl'}"]
    commands[1] += [*COMMON, *(ADAPTERS if given.adapters else QUICKSTART), *(SMALL if given.small else ())]
    commands[1] += ["sft.steps=0"] if given.adapters else []
    for command in commands:
        done = subprocess.run([sys.executable, *command, *(given.set if command[0] == "-m" else ())], cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"{command[1]} ended with exit code {done.returncode}; its output is above")
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def summarise(rows: list[dict], exported: list[str]) -> dict:
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    # a rollout's own seconds stand in its first row
    seconds = {
        key: statistics.median(row[key] for row in rows if key in row)
        for key in sorted({key for row in rows for key in row if re.fullmatch(r"time/\w+_s", key)})
    }
    wrong = [f"{key} is {row[key]}" for row in rows for key in FINITE if key in row and not math.isfinite(row[key])]
    few, drafts = max(1, len(rewards) // 4), {key: sum(row.get(key, 0) for row in rows) for key in DRAFTS}
    says = [
        f"reward {statistics.mean(rewards[:few]):.3f} → {statistics.mean(rewards[-few:]):.3f}; {len(rows)} optimizer "
        f"steps; {', '.join(f'{key[5:-2]} {value:.3f} s' for key, value in seconds.items())} (medians)",
        f"exported: {', '.join(exported) or 'nothing'}",
    ]
    if drafts[DRAFTS[0]]:
        says.append(f"{drafts[DRAFTS[0]]:,.0f} tokens drafted, {drafts[DRAFTS[1]]:,.0f} taken")
    failed = "; ".join(wrong[:3]) or ("" if exported else "no weights were exported")
    return {"headline": says, "rewards": rewards, "seconds": seconds, **drafts, "exported": exported, "failed": failed}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/gpu_report_steps/short_run.py --json run.json --work /tmp/work",
    )
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="a folder for the run")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the run")
    parser.add_argument("--adapters", action="store_true", help="train low-rank adapters")
    parser.add_argument("--small", action="store_true", help="two rollouts of eight prompts")
    given = parser.parse_args(arguments)
    try:
        rows = train(given)
    except RuntimeError as error:
        return write(given.json, {"failed": str(error)})
    files = sorted({x.name for x in (given.work / "run").rglob("*.safetensors")})
    return write(given.json, summarise(rows, files))


if __name__ == "__main__":
    raise SystemExit(main())
