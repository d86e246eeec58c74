"""Draws the quickstart's first RL steps on the CPU, in which the loss is 0 and the policy learns.

Example:
  python tools/benchmarks/plot_zero_loss.py --out docs/zero-loss.svg --seeds 0 1 2 --noise-stds 0 0.01 0.1

The runs are made with and without noise on the advantages. Each run is one process and one optimizer step a rollout
under loss.reduction=sequence_mean, so that every loss is on-policy and over whole groups. Printed: a Markdown table of
the measurements over all seeds. Drawn: loss, gradient norm and reward of the first seed. docs/zero-loss.md explains
them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import html
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from megatron_rl.observability.svg import HEIGHT, WIDTH, Frame, Series, line_plot

ROOT = pathlib.Path(__file__).resolve().parents[2]
Runs = Mapping[float, Mapping[int, Sequence[dict]]]
"""Rows of metrics.jsonl by noise_std, then by seed."""

PANELS = (("train/loss", "Loss"), ("train/grad_norm", "Gradient norm, before clipping"), ("reward/mean", "Mean reward"))
TOP, TITLE = 46, 26
CSS = """
.page{fill:#fff}text{font:11px system-ui,sans-serif;fill:#566072}.ink{font-size:13px;font-weight:600;fill:#171b22}
.grid{stroke:#e8ebf0}.axis{stroke:#b4bcc9}.raw,.line{fill:none;stroke-linejoin:round}.raw{stroke-width:1;opacity:.4}.line{stroke-width:2}
.tip{fill:transparent}.dot{fill:#fff;stroke-width:2}.c1{stroke:#2a6fdb}.c2{stroke:#e2711d}.c3{stroke:#14967f}.c4{stroke:#8457d8}.c5{stroke:#d23f73}
@media (prefers-color-scheme:dark){.page{fill:#161a21}text{fill:#98a3b3}.ink{fill:#e9edf3}
.dot{fill:#161a21}.grid{stroke:#242a34}
.axis{stroke:#4a5464}.c1{stroke:#5b9bff}.c2{stroke:#f5944a}.c3{stroke:#34c3a7}.c4{stroke:#a98bf3}.c5{stroke:#f0719c}}
"""


def run(work: pathlib.Path, std: float, seed: int, steps: int) -> list[dict]:
    """Return the RL rows of one run; raises RuntimeError with its last output if it fails."""
    folder = work / f"std_{std:g}_seed_{seed}"
    noise = [f"advantage.noise_std={std}", f"advantage.noise_steps={steps}"] if std else []
    command = [
        sys.executable,
        "-m",
        "megatron_rl.train",
        "--config",
        str(ROOT / "examples/quickstart/quickstart.yaml"),
        "--run-dir",
        str(folder),
        f"model.hf_path={work / 'inputs/model'}",
        f"data.train={work / 'inputs/train.jsonl'}",
        "parallel.pipeline=1",
        f"run.seed={seed}",
        "loss.reduction=sequence_mean",
        "train.samples_per_mini_batch=null",
        f"train.num_rollouts={steps}",
        "train.export_last=false",
        "optimizer.schedule=constant",
        "metrics.progress=false",
        *noise,
    ]
    alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | alone, capture_output=True, text=True, timeout=1800, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"noise_std={std:g}, seed {seed} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["phase"] == "rl"]


def measure(work: pathlib.Path, stds: Sequence[float], seeds: Sequence[int], steps: int, jobs: int) -> Runs:
    """Run all the runs, ``jobs`` at a time."""
    prepare = [sys.executable, str(ROOT / "examples/quickstart/prepare.py"), "--out", str(work / "inputs")]
    subprocess.run(prepare, cwd=ROOT, capture_output=True, text=True, check=True)
    with concurrent.futures.ThreadPoolExecutor(jobs) as threads:
        asked = {(std, seed): threads.submit(run, work, std, seed, steps) for seed in seeds for std in stds}
        return {std: {seed: asked[std, seed].result() for seed in seeds} for std in stds}


def table(runs: Runs) -> str:
    """Return the Markdown table: one row per noise_std, over all seeds and steps; rewards over five rollouts."""
    lines = [
        "| `noise_std` | \\|loss\\|, median | largest | gradient norm, median | smallest | reward, first 5 | last 5, "
        "per seed |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for std, by_seed in runs.items():
        loss, norm = (
            np.abs([[row[name] for row in rows] for rows in by_seed.values()])
            for name in ("train/loss", "train/grad_norm")
        )
        reward = np.array([[row["reward/mean"] for row in rows] for rows in by_seed.values()])
        last = ", ".join(f"{x:.3f}" for x in reward[:, -5:].mean(1))
        lines.append(
            f"| {std:g} | {np.median(loss):.1e} | {loss.max():.1e} | {np.median(norm):.2f} | {norm.min():.2f} | "
            f"{reward[:, :5].mean():.3f} | {reward[:, -5:].mean():.3f} ({last}) |"
        )
    return "\n".join(lines)


def picture(runs: Runs, seed: int) -> str:
    """Draw one SVG: the panels below each other, a line for each noise_std, steps counted from the first of RL."""
    steps = len(next(iter(runs.values()))[seed])
    frame = Frame(first_step=1, last_step=steps, ghost_steps=np.empty(0, dtype=np.int64))
    height = TOP + len(PANELS) * (HEIGHT + TITLE)
    name = html.escape(f"The quickstart's first {steps} RL steps under sequence_mean, seed {seed}")
    parts = [f'<rect class="page" width="{WIDTH}" height="{height}"/><text class="ink" x="14" y="20">{name}</text>']
    for color, std in enumerate(runs, start=1):
        x = 14 + 120 * (color - 1)
        parts.append(f'<path class="line c{color}" d="M{x} 36h18"/><text x="{x + 24}" y="40">noise_std {std:g}</text>')
    for number, (key, title) in enumerate(PANELS):
        series = [
            Series(
                label=f"noise_std {std:g}",
                steps=np.arange(1, steps + 1),
                values=np.array([row[key] for row in rows[seed]]),
                color=color,
            )
            for color, (std, rows) in enumerate(runs.items(), start=1)
        ]
        plot = line_plot(title, series, frame, from_zero=True, share=key == "reward/mean")
        y = TOP + number * (HEIGHT + TITLE)
        parts.append(f'<text class="ink" x="14" y="{y + 16}">{title}</text>')
        parts.append(plot.replace("<svg ", f'<svg x="0" y="{y + TITLE}" width="{WIDTH}" height="{HEIGHT}" ', 1))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{name}"><title>{name}</title>'
        f"<style>{CSS}</style>{''.join(parts)}</svg>\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/zero-loss/zero-loss.svg"), metavar="SVG")
    parser.add_argument(
        "--work", type=pathlib.Path, default=pathlib.Path("runs/zero-loss"), metavar="DIR", help="of the runs"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="run.seed of each run; the first is drawn (default: 0)"
    )
    parser.add_argument(
        "--noise-stds", type=float, nargs="+", default=[0.0, 0.01], help="one line each, at most 5 (default: 0 0.01)"
    )
    parser.add_argument("--steps", type=int, default=40, help="rollouts, one optimizer step each (default: 40)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    options = parser.parse_args(arguments)
    if len(options.noise_stds) > 5 or options.steps < 5:
        parser.error(
            f"--noise-stds takes at most 5 numbers (given: {len(options.noise_stds)}), --steps at least 5 "
            f"({options.steps})"
        )
    runs = measure(options.work.resolve(), options.noise_stds, options.seeds, options.steps, options.jobs)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(picture(runs, options.seeds[0]), encoding="utf-8")
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
