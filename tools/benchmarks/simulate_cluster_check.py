"""Compares predicted with measured update times over a dozen launches, each predicted from rates fitted to the others.

    python tools/benchmarks/simulate_cluster_check.py --json check.json        # measures for some minutes, then checks
    python tools/benchmarks/simulate_cluster_check.py --measured check.json    # checks earlier measurements again

Measure on an idle machine. Each launch is skip.py under torchrun with one or two processes of one thread; it measures
the dense update and the skip's at each dead share. For every launch simulator/machine.py's six rates are fitted by
least squares of relative errors to all launches but that one, and its updates are predicted by the real planner and the
clock of planning/timeline.py. The median of the relative errors is to be at most 15 %: above it the exit code is 1. The
table goes to stdout as Markdown, progress to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import numpy as np
import skip as benchmark_skip

from megatron_rl.config import load_config
from megatron_rl.model.hf_config import model_shape
from megatron_rl.planning.plan import plan_rules
from megatron_rl.simulator.degrees import degrees_of
from megatron_rl.simulator.forecast import Job, run_plan
from megatron_rl.simulator.machine import Machine, machine_costs
from megatron_rl.simulator.workload import Workload
from megatron_rl.types import BatchPlan

ROOT = pathlib.Path(__file__).resolve().parents[2]
ALLOWED_MEDIAN = 0.15
ROUNDS = 8  # of the fit: the makespan is piecewise linear in the rates
LAUNCHES = tuple(
    dict(zip(("dp", "pp", "hidden", "layers", "max_tokens_per_microbatch"), given, strict=True))
    for given in (
        (1, 1, 256, 4, 1024),
        (1, 1, 128, 4, 512),
        (1, 1, 256, 8, 512),
        (1, 1, 384, 4, 1024),
        (2, 1, 256, 4, 1024),
        (2, 1, 128, 8, 512),
        (2, 1, 384, 4, 512),
        (2, 1, 256, 4, 256),
        (1, 2, 256, 4, 1024),
        (1, 2, 128, 8, 512),
        (1, 2, 384, 4, 512),
        (1, 2, 256, 8, 256),
    )
)


def arguments_of(launch: dict, given: argparse.Namespace) -> list[str]:
    """Return skip.py's arguments for one launch."""
    options = launch | {"groups": given.groups, "mean_tokens": given.mean_tokens, "repeats": given.repeats}
    flat = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return [*flat, "--dead-share", *map(str, given.dead_share)]


def measure(launch: dict, given: argparse.Namespace) -> dict:
    """Return one launch's settings and rows, as skip.py writes them.

    Raises RuntimeError with its output if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "skip.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr",
            "127.0.0.1",
            "--nproc_per_node",
            str(launch["dp"] * launch["pp"]),
        ]
        command += [str(ROOT / "tools/benchmarks/skip.py"), *arguments_of(launch, given), "--json", str(out)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=given.timeout_s, check=False
        )
        if not out.exists():
            output = (done.stdout + done.stderr)[-3000:]
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode} and wrote nothing:\n{output}")
        return json.loads(out.read_text())


def case_of(settings: dict, share: float) -> tuple[Job, np.ndarray]:
    """Return the job that skip.py ran (without costs), and its signal [S]."""
    from transformers import Qwen2Config

    named = argparse.Namespace(**settings)
    world = named.tp * named.pp * named.dp
    overrides = [f"parallel.tensor={named.tp}", f"parallel.pipeline={named.pp}", f"model.dtype={named.dtype}"]
    config = load_config(None, [*overrides, f"plan.max_tokens_per_microbatch={named.max_tokens_per_microbatch}"])
    degrees = degrees_of(config, world)
    heads = named.hidden // 64
    hf_config = Qwen2Config(
        vocab_size=named.vocab,
        hidden_size=named.hidden,
        num_hidden_layers=named.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=named.hidden * 3,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    shape = model_shape(hf_config, config, degrees, layer_spec="torch")
    alone = SimpleNamespace(
        shape=shape, topology=SimpleNamespace(rank=0, world_size=1), gather=lambda samples, groups, order: samples
    )
    samples = benchmark_skip.make_batch(alone, named)
    prompt = np.array([s.prompt_tokens for s in samples])
    response = np.array([len(s.token_ids) for s in samples]) - prompt
    values = benchmark_skip.make_advantages(share, named)
    groups = np.arange(len(samples)) // named.group_size
    workload = Workload(
        prompt_tokens=prompt, response_tokens=response, loss_tokens=response, rewards=values, groups=groups
    )
    return Job(config=config, shape=shape, degrees=degrees, workload=workload, costs=None), values != 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """Holds one measured update or optimizer step, in seconds, and the job that predicts it.

    kind: dense, skip or step.
    plan: the plan of a dense or skip update, None for a step.
    """

    launch: int
    name: str
    kind: str
    seconds: float
    job: Job
    signal: np.ndarray
    plan: BatchPlan | None

    def predict(self, theta: np.ndarray) -> float:
        """Return the predicted seconds.

        theta: [6], seconds per FLOP, per attention FLOP, per layer and micro-batch, per AdamW's and per reduced
            parameter, per update.
        """
        linear, scores, *others = (max(float(x), 1e-30) for x in theta)
        names = ("layer_overhead_s", "adam_s", "reduce_s", "update_overhead_s")
        rates = Machine(
            flops_per_s=1 / linear, attention_flops_per_s=1 / scores, **dict(zip(names, others, strict=True))
        )
        job = self.job
        share = float(job.workload.loss_tokens.sum() / job.workload.lengths.sum())
        costs = machine_costs(rates, job.shape, job.config, job.degrees, loss_share=share, source="fitted")
        if self.kind == "step":
            return costs.optimizer_s
        rules = plan_rules(job.config, job.degrees, job.shape)
        job = dataclasses.replace(job, costs=costs)
        return run_plan(job, rules, self.signal, drops=self.kind == "skip", plan=self.plan).update_s


def cases(records: list[dict]) -> list[Measured]:
    """Return every measured skip update, and each launch's dense update and optimizer step, once.

    The last two are medians over the launch's rows.
    """
    measured = []
    for number, record in enumerate(records):
        settings = record["settings"]
        parts = (("DP", "dp"), ("PP", "pp"), ("h", "hidden"), ("l", "layers"), ("cap", "max_tokens_per_microbatch"))
        name = " ".join(f"{short}{settings[key]}" for short, key in parts)
        for position, row in enumerate(record["rows"]):
            job, signal = case_of(settings, row["dead_share"])
            plans = plans_of(name, row, job, signal)
            common = dict(launch=number, job=job, signal=signal)
            if position == 0:
                dense_s, step_s = (
                    statistics.median(x[key] for x in record["rows"]) for key in ("dense_s", "optimizer_step_s")
                )
                measured.append(
                    Measured(name=f"{name} dense", kind="dense", seconds=dense_s, plan=plans["dense"], **common)
                )
                measured.append(Measured(name=f"{name} step", kind="step", seconds=step_s, plan=None, **common))
            measured.append(
                Measured(
                    name=f"{name} skip {row['dead_share']:g}",
                    kind="skip",
                    seconds=row["skip_s"],
                    plan=plans["skip"],
                    **common,
                )
            )
    return measured


def plans_of(name: str, row: dict, job: Job, signal: np.ndarray) -> dict[str, BatchPlan]:
    """Return the dense and the skip plan.

    Raises ValueError if the planner now cuts otherwise than in the measured run.
    """
    rules, plans = plan_rules(job.config, job.degrees, job.shape), {}
    for kind in ("dense", "skip"):
        plans[kind] = job.plan(rules, signal, drops=kind == "skip")
        planned, measured = plans[kind].mini_batches[0].num_microbatches.tolist(), row[f"{kind}_microbatches"]
        if planned != measured:
            raise ValueError(
                f"{name}, dead share {row['dead_share']:g}: the {kind} update was measured with {measured} "
                f"micro-batches per rank and the planner now makes {planned}; measure again, without --measured"
            )
    return plans


def fit(measured: list[Measured]) -> np.ndarray:
    """Return theta [6] ≥ 0 of least relative error.

    The prediction is piecewise linear in theta, so a few linear problems are solved in turn.
    """
    theta = np.array([1e-10, 1e-10, 1e-4, 1e-9, 1e-9, 1e-4])
    for _ in range(ROUNDS):
        rows = []
        for update in measured:
            base = update.predict(theta)
            slopes = [
                (update.predict(theta + np.eye(6)[k] * step) - base) / step
                for k, step in enumerate(theta * 1e-4 + 1e-16)
            ]
            rows.append(np.array(slopes) / update.seconds)
        theta = nonnegative_least_squares(np.stack(rows), np.ones(len(rows)))
    return theta


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray, sweeps: int = 5000) -> np.ndarray:
    """Return argmin over x ≥ 0 of ‖a x − b‖, coordinate by coordinate, columns scaled to length 1."""
    scale = np.maximum(np.linalg.norm(a, axis=0), 1e-300)
    gram, moment = (a / scale).T @ (a / scale), (a / scale).T @ b
    x = np.zeros(len(moment))
    for _ in range(sweeps):
        before = x.copy()
        for k in range(len(x)):
            x[k] = max(0.0, x[k] + (moment[k] - gram[k] @ x) / max(gram[k, k], 1e-12))
        if np.abs(x - before).max() < 1e-12:
            break
    return x / scale


def check(records: list[dict]) -> dict:
    """Predict every update, in seconds, from rates fitted without its launch.

    Gains are the launch's dense update over the update.
    """
    if len(records) < 2:
        raise ValueError(
            f"{len(records)} launch(es) were measured and each is predicted from the others; measure at least 2"
        )
    measured, rows = cases(records), []
    for launch in range(len(records)):
        theta = fit([x for x in measured if x.launch != launch])
        dense: tuple[float, float] | None = None
        for update in (x for x in measured if x.launch == launch and x.kind != "step"):
            predicted = update.predict(theta)
            row = {
                "name": update.name,
                "measured_s": update.seconds,
                "predicted_s": predicted,
                "error": predicted / update.seconds - 1,
            }
            if update.kind == "dense":
                dense = (update.seconds, predicted)
            else:
                row |= {"measured_gain": dense[0] / update.seconds, "predicted_gain": dense[1] / predicted}
            rows.append(row)
    errors = [abs(row["error"]) for row in rows]
    return {
        "machine": "; ".join(sorted({record["machine"] for record in records})),
        "launches": len(records),
        "rows": rows,
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "theta": fit(measured).tolist(),
    }


def markdown(checked: dict) -> str:
    """Return the table for docs/simulate-cluster.md."""
    lines = [
        f"{checked['machine']}: {len(checked['rows'])} predictions of {checked['launches']} launches, each from rates "
        f"fitted to the other launches; relative error in the median **{100 * checked['median_error']:.1f} %** "
        f"(allowed: {100 * ALLOWED_MEDIAN:.0f} %), at most {100 * checked['largest_error']:.1f} %.",
        "",
        "| update | measured s | predicted s | error | gain measured | gain predicted |",
        "|---|---|---|---|---|---|",
    ]
    for row in checked["rows"]:
        gains = [f"{row[key]:.2f}" if key in row else "" for key in ("measured_gain", "predicted_gain")]
        cells = (
            row["name"],
            f"{row['measured_s']:.4f}",
            f"{row['predicted_s']:.4f}",
            f"{100 * row['error']:+.1f} %",
            *gains,
        )
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="example: simulate_cluster_check.py --json check.json > table.md"
    )
    parser.add_argument(
        "--measured", type=pathlib.Path, help="what an earlier run wrote by --json: nothing is measured"
    )
    parser.add_argument(
        "--json", type=pathlib.Path, help="write measurements (after each launch) and predictions there"
    )
    parser.add_argument(
        "--launches", type=int, default=len(LAUNCHES), help="only the first so many, evenly over the layouts"
    )
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--mean-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dead-share", type=float, nargs="+", default=[0.5, 0.75])
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one launch")
    given = parser.parse_args(arguments)
    if not 2 <= given.launches <= len(LAUNCHES):
        parser.error(f"--launches {given.launches} must be 2 to {len(LAUNCHES)}: each is predicted from the others")
    return given


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)

    def keep(content: dict) -> None:
        if given.json:
            given.json.write_text(json.dumps(content, indent=1) + "\n")

    if given.measured:
        records = json.loads(given.measured.read_text())["records"]
    else:
        order = [LAUNCHES[i + j] for i in range(4) for j in (0, 4, 8)]
        records = []
        for number, launch in enumerate(order[: given.launches], start=1):
            records.append(measure(launch, given))
            keep({"records": records})
            print(f"measured {number} of {given.launches}: {launch}", file=sys.stderr, flush=True)
    checked = check(records)
    print(markdown(checked))
    keep({"records": records, **checked})
    return 0 if checked["median_error"] <= ALLOWED_MEDIAN else 1


if __name__ == "__main__":
    sys.exit(main())
