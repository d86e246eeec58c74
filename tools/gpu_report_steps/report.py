"""Writes the records of tools/gpu_report.py as a page of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SIGNIFICANT = 4  # digits of a number in the table
# Of steps whose rows hold more, these figures alone.
WANTED = (
    *("dead_share", "dense_s", "skip_s", "ratio", "share_of_planned", "phase_share", "dense_tokens_per_s"),
    *("dense_mfu", "skip_mfu", "tokens", "lean_s", "plain_s", "lean_bytes", "plain_bytes"),
)
MOST = 8  # figures of one step in the table; report.json holds all


def headline(found: Mapping) -> list[str]:
    """Return the figures of a step that its table row shows: `headline`, or its tally, or its first numbers."""
    if "headline" in found:
        return [str(x) for x in found["headline"]]
    if "cells" in found:
        return [
            str(found["tally"]),
            *(f"{x['name']}: {x['reason']}" for x in found["cells"] if x["status"] == "failed"),
        ]
    if "rows" in found:
        return [_figures(row) for row in found["rows"]]
    return [_figures(found)] if _figures(found) else []


def _figures(row: Mapping) -> str:
    numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    numbers = {name: numbers[name] for name in WANTED if name in numbers} or dict(list(numbers.items())[:MOST])
    return ", ".join(f"{name} {value:.{SIGNIFICANT}g}" for name, value in numbers.items())


def markdown(records: Sequence[Mapping]) -> str:
    machines = {f"{_machine(x['machine'])}, commit {x['commit']}": None for x in records}
    lines = ["# GPU report", "", *(f"{machine}." for machine in machines), ""]
    tally = {name: sum(x["outcome"] == name for x in records) for name in sorted({x["outcome"] for x in records})}
    lines += [", ".join(f"{count} {name}" for name, count in tally.items()) + ".", ""]
    lines += ["| part | step | outcome | s | measured |", "|---|---|---|---|---|"]
    for x in records:
        says = "<br>".join([*([x["reason"]] if x["reason"] else []), *headline(x.get("found", {}))])
        cells = (str(x["part"]), x["name"], x["outcome"], f"{x['seconds']:.0f}", says)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    lines += ["", "Commands, by step:", ""]
    lines += [f"- {x['name']}: `{x['command']}`" if x["command"] else f"- {x['name']}: none here" for x in records]
    return "\n".join(lines) + "\n"


def _machine(machine: Mapping) -> str:
    parts = [machine["device"], f"driver {machine['driver']}", f"CUDA {machine['cuda']}", f"cuDNN {machine['cudnn']}"]
    parts += [f"NCCL {machine['nccl']}", f"Python {machine['python']}"]
    return ", ".join([*parts, *(f"{name} {version}" for name, version in machine["versions"].items())])
