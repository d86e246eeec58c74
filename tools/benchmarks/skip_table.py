"""Turns skip.py's measurements into its table: times predicted on planning/timeline.py's clock, shares of ideals."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import statistics

import numpy as np
import torch

from megatron_rl.distributed.platform import HOST
from megatron_rl.model.costs import flops_per_token
from megatron_rl.planning.cost import CostModel
from megatron_rl.planning.timeline import simulate
from megatron_rl.planning.tokens import padded_lengths, tokens_of
from megatron_rl.types import StepPlan


def plan_clock(model: CostModel, mini_batch: StepPlan, padded: np.ndarray) -> float:
    """Predict forward and backward of a plan: the makespan of the slowest data-parallel rank.

    A third of each stage's time is forward.
    """
    slowest = 0.0
    for rank in range(len(mini_batch.rank_offsets) - 1):
        cut = [padded[m.samples].astype(np.float64) for m in mini_batch.microbatches(rank)]
        tokens, squares = np.array([x.sum() for x in cut]), np.array([(x**2).sum() for x in cut])
        stage_s = np.array([stage.seconds(tokens, squares) for stage in model.stages]) / model.virtual
        chunk_s = np.concatenate([stage_s] * model.virtual)
        slowest = max(slowest, simulate(chunk_s / 3, chunk_s * 2 / 3, pipeline=len(model.stages)).makespan)
    return slowest


def without_overhead(model: CostModel) -> CostModel:
    return dataclasses.replace(model, stages=tuple(dataclasses.replace(stage, overhead=0.0) for stage in model.stages))


def replay(backend) -> tuple[float, list[float]]:
    """Return the last ``forward_backward``'s makespan, from the times of each stage's micro-batches on their own ranks.

    It is the slowest replica's. The second value is, for each micro-batch on each stage, measured over predicted
    seconds.
    """
    import torch.distributed as dist

    topology = backend.topology
    runs = backend.schedule.take_laps()
    stage = backend.fit.model().stages[topology.pipeline_rank]
    factors = [
        x for run in runs for x in (run.forward_s + run.backward_s).sum(0) / stage.seconds(run.tokens, run.squares)
    ]
    mine = [(run.forward_s, run.backward_s) for run in runs]
    everyone: list = [None] * topology.world_size
    dist.all_gather_object(everyone, (topology.data_rank, topology.pipeline_rank, mine, factors))
    replicas: dict[int, dict[int, list]] = {}
    for data_rank, pipeline_rank, theirs, _ in everyone:
        replicas.setdefault(data_rank, {})[pipeline_rank] = theirs
    slowest = 0.0
    for runs_by_rank in replicas.values():
        if any(runs_by_rank[0]):
            chunks = range(topology.virtual_size)
            forward_s, backward_s = (
                np.array(
                    [runs_by_rank[rank][0][kind][chunk] for chunk in chunks for rank in range(topology.pipeline_size)]
                )
                for kind in (0, 1)
            )
            slowest = max(slowest, simulate(forward_s, backward_s, pipeline=topology.pipeline_size).makespan)
    return slowest, [float(x) for *_, theirs in everyone for x in theirs]


def summarise(share: float, cases: list, backend) -> dict:
    """Return one row; the fields of several batches are medians over them."""
    alone = [_of_case(case, backend) for case in cases]
    row = {"dead_share": share} | {
        name: [x[name] for x in alone][0] if isinstance(value, list) else statistics.median(x[name] for x in alone)
        for name, value in alone[0].items()
    }
    for name in ("dense", "skip"):
        factors = [x for of_case in alone for x in of_case[f"{name}_over_predicted"]]
        row[f"{name}_over_predicted"] = factors
        row[f"{name}_spread"] = _spread(factors)
        row[f"{name}_microbatch_spread"] = _spread([x for case in cases for x in case.factors[name]])
    return row


def _spread(factors: list[float]) -> float | None:
    return statistics.pstdev(factors) / statistics.mean(factors) if factors else None


def _of_case(case, backend) -> dict:
    plans = {name: case.plans["train", name].mini_batches[0] for name in ("dense", "skip")}
    tokens = tokens_of(case.batch.facts, share_prompts=False).whole
    padded = padded_lengths(tokens, backend.rules.pad_multiple)
    survivors, dense_tokens = int(tokens[plans["skip"].order].sum()), int(tokens.sum())
    row = {
        "dense_tokens": dense_tokens,
        "surviving_tokens": survivors,
        "planning_s": case.planning_s,
        "dense_microbatches": plans["dense"].num_microbatches.tolist(),
        "skip_microbatches": plans["skip"].num_microbatches.tolist(),
    }
    # Measured seconds, and predictions of the same plans.
    row |= _clock_fields(case) if case.clocks["dense"] else _wall_fields(case)
    row |= {} if case.clocks["dense"] else _rate_fields(row, tokens, plans, backend)
    row["ratio"] = row["dense_s"] / row["skip_s"] if row["skip_s"] else float("inf")
    model, bare = backend.fit.model(), without_overhead(backend.fit.model())
    for name, plan in plans.items():
        seconds = case.clocks[name] or [x for x, _ in case.updates[name]]
        predicted = plan_clock(model, plan, padded) + (0.0 if case.clocks[name] else row["optimizer_step_s"])
        row[f"{name}_over_predicted"] = [x / predicted for x in seconds] if survivors or name == "dense" else []
    if survivors:
        # Shares of the ideals, which a ghost step does not have.
        ideal = dense_tokens / survivors
        planned = plan_clock(bare, plans["dense"], padded) / plan_clock(bare, plans["skip"], padded)
        fixed = row.get("fixed_fraction", 0.0)
        row |= {
            "ideal": ideal,
            "share_of_ideal": row["ratio"] / ideal,
            "reachable_share": 1 / (1 + fixed * (ideal - 1)),
        }
        row |= {"planned_ideal": planned, "share_of_planned": row["ratio"] / planned}
        if "phase_ratio" in row:
            row["phase_share"] = row["phase_ratio"] / planned
    return row


def _clock_fields(case) -> dict:
    dense_s, skip_s = (statistics.median(case.clocks[name]) for name in ("dense", "skip"))
    return {"dense_s": dense_s, "skip_s": skip_s}


def _wall_fields(case) -> dict:
    (dense_s, skip_s), (dense_pass, skip_pass) = (
        (statistics.median(times["dense"]), statistics.median(times["skip"]))
        for times in ({k: [x for x, _ in v] for k, v in case.updates.items()}, case.passes)
    )
    step_s = statistics.median(x for _, x in case.updates["dense"])
    fields = {
        "dense_s": dense_s,
        "skip_s": skip_s,
        "optimizer_step_s": step_s,
        "fixed_fraction": step_s / dense_s,
        "planning_fraction": case.planning_s / skip_s,
        "phase_ratio": (dense_s + dense_pass) / (skip_s + skip_pass),
    }
    if not len(case.plans["train", "skip"].mini_batches[0].order):
        fields["ghost_over_optimizer_step"] = statistics.median(x for _, x in case.updates["skip"]) / step_s
    return fields


def _rate_fields(row: dict, tokens: np.ndarray, plans: dict[str, StepPlan], backend) -> dict:
    """Return tokens a second of the dense update, and each update's share of the GPU's peak where that is known."""
    fields, peak = {"dense_tokens_per_s": row["dense_tokens"] / row["dense_s"]}, HOST.peak_flops()
    for name in ("dense", "skip") if peak else ():
        lengths = tokens[plans[name].order].astype(np.float64)
        if len(lengths):
            flops = lengths.sum() * flops_per_token(backend.shape, (lengths**2).sum() / lengths.sum() / 2)
            fields[f"{name}_mfu"] = flops / row[f"{name}_s"] / peak / backend.topology.world_size
    return fields


def machine_name() -> str:
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{platform.machine()} CPU, {os.cpu_count()} cores"
    )
    return f"{device}, torch {torch.__version__}"


def write_json(given: argparse.Namespace, machine: str, **content: object) -> None:
    """Write the measurements, with their settings, if ``--json`` asks for it."""
    if given.json:
        settings = {key: str(value) if isinstance(value, pathlib.Path) else value for key, value in vars(given).items()}
        given.json.write_text(json.dumps({"machine": machine, "settings": settings, **content}, indent=1) + "\n")


COLUMNS = {
    "dead": lambda r: f"{100 * r['dead_share']:.0f} %",
    "dense s": "dense_s:.3f",
    "skip s": "skip_s:.4f",
    "ratio": "ratio:.2f",
    "ideal": "ideal:.2f",
    "share": "share_of_ideal:.3f",
    "planned ideal": "planned_ideal:.2f",
    "share of planned": "share_of_planned:.3f",
    "with log-probs": "phase_share:.3f",
    "f": "fixed_fraction:.4f",
    "reachable": "reachable_share:.3f",
    "spread dense": "dense_spread:.3f",
    "skip": "skip_spread:.3f",
    "of micro-batches": "dense_microbatch_spread:.3f",
    " skip": "skip_microbatch_spread:.3f",
    "planning": "planning_fraction:.4f",
    "ghost / step": "ghost_over_optimizer_step:.2f",
    "dense MFU": "dense_mfu:.3f",
    "skip MFU": "skip_mfu:.3f",
    "M": lambda r: f"{max(r['dense_microbatches'])}, {max(r['skip_microbatches'])}",
}


def show(rows: list[dict], given: argparse.Namespace, machine: str) -> None:
    from rich.console import Console
    from rich.table import Table

    layout = (
        f"TP {given.tp}, PP {given.pp}"
        + (f"·VPP {given.virtual_pipeline}" if given.virtual_pipeline > 1 else "")
        + f", DP {given.dp}"
    )
    clock = "CPU seconds on a virtual clock" if given.virtual_clock else "wall time"
    table = Table(title=f"skip against dense: {layout}; {clock}; {given.batches} batch(es); {machine}")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(_cell(row, column) for column in COLUMNS.values()))
    Console(width=170).print(table)


def _cell(row: dict, column) -> str:
    if callable(column):
        return column(row)
    name, form = column.split(":")
    return "-" if row.get(name) is None else format(row[name], form)
