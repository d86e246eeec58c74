"""The output of megatron-rl verify: a table of checks, a line with the verdict, and a JSON file."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import platform as host_platform
from collections.abc import Mapping

import torch

from megatron_rl.commands.verify.thin import EXPERT_FIELDS
from megatron_rl.commands.verify.verdict import Verdict
from megatron_rl.config import ParallelConfig
from megatron_rl.distributed.platform import HOST

PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine", "apex")


def layout(parallel: ParallelConfig, world: int) -> str:
    """Return the topology's sizes in words, as in ``TP2 SP · PP2 · DP1 (4 processes)``."""
    dense = parallel.tensor * parallel.context * parallel.pipeline
    parts = [f"TP{parallel.tensor}" + (" SP" if parallel.sequence_parallel else ""), f"PP{parallel.pipeline}"]
    parts += [f"VPP{parallel.virtual_pipeline}"] if parallel.virtual_pipeline > 1 else []
    parts += [f"CP{parallel.context}"] if parallel.context > 1 else []
    parts += [f"EP{parallel.expert}"] if parallel.expert > 1 else []
    parts += [f"ETP{parallel.expert_tensor}"] if parallel.expert_tensor else []
    return f"{' · '.join(parts)} · DP{max(1, world // dense)} ({world} process{'es' if world > 1 else ''})"


def machine() -> dict:
    """Return the device, backend and package versions as JSON-able values, without host name or paths."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{host_platform.machine()} CPU, {os.cpu_count()} cores"
    )
    return {"device": device, "backend": HOST.backend, "python": host_platform.python_version(), "versions": versions}


def model_line(real, thin) -> str:
    """Return a line of text with the sizes of the thin model (the smaller copy) beside the real model's.

    real, thin: their Hugging Face configs.
    """
    full, small = real.to_dict(), thin.to_dict()
    named = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "ffn": "intermediate_size",
        "expert ffn": "moe_intermediate_size",
        "vocabulary": "vocab_size",
        "experts": next((name for name in EXPERT_FIELDS if name in full), EXPERT_FIELDS[0]),
    }
    sizes = [f"{name} {small[key]} (of {full[key]})" for name, key in named.items() if full.get(key)]
    heads = f"{real.num_attention_heads} heads over {real.num_key_value_heads} of {small['head_dim']}"
    return f"{real.model_type}: {', '.join(sizes)}; {heads}"


def show(verdict: Verdict, header: list[str], tolerance: float) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=165, soft_wrap=True)
    for line in header:
        console.print(line, highlight=False, markup=False)
    table = Table()
    for name in ("check", "relative error", "allowed", "", "worst at", "note"):
        table.add_column(name, justify="right" if name in ("relative error", "allowed") else "left")
    for row in verdict.rows:
        state = "not compared" if row.error is None else "ok" if row.passes(tolerance) else "DIFFERS"
        error = "-" if row.error is None else f"{row.error:.1e}"
        table.add_row(row.check, error, f"{tolerance:g}", state, row.where, row.note)
    console.print(table, soft_wrap=False)
    console.print(verdict_line(verdict, tolerance), highlight=False, markup=False)


def verdict_line(verdict: Verdict, tolerance: float) -> str:
    compared = [row for row in verdict.rows if row.error is not None]
    failed = [row for row in compared if not row.passes(tolerance)]
    if verdict.passed:
        worst = max(compared, key=lambda row: row.error)
        return (
            f"verdict: PASSED, {len(compared)} checks within {tolerance:g}; the nearest is {worst.check} at "
            f"{worst.error:.1e}"
        )
    return f"verdict: FAILED, {len(failed)} of {len(compared)} checks beyond {tolerance:g}: {verdict.diagnosis}"


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)  # JSON has no inf


def write_json(
    path: pathlib.Path, common: Mapping[str, object], verdict: Verdict | None, tolerance: float, said: str
) -> None:
    """Write the result to ``path`` as JSON.

    common: values to write beside the result, such as topology and machine.
    verdict: None if an error ended the comparison.
    said: the line with the verdict, or that error.
    """
    result = {**common, "tolerance": tolerance, "verdict": said, "passed": verdict is not None and verdict.passed}
    if verdict is not None:
        result |= {
            "diagnosis": verdict.diagnosis,
            "checks": [
                {**dataclasses.asdict(row), "error": _number(row.error), "passed": row.passes(tolerance)}
                for row in verdict.rows
            ],
            "gradient_tensors": {name: _number(x) for name, x in verdict.tensors.items()},
            "skip_gradient_tensors": {name: _number(x) for name, x in verdict.skip_tensors.items()},
            "samples": {name: _number(x) for name, x in verdict.samples.items()},
            "activations": [
                {
                    "replica": x.replica,
                    "layer": x.point.layer,
                    "point": x.point.name,
                    "error": _number(x.error),
                    "tokens": list(x.tokens),
                }
                for x in verdict.activations
            ],
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
