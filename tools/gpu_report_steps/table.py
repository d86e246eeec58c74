"""Writes the records of tools/gpu_report.py as the table of docs/evidence/performance.md, each figure beside its floor.

A floor is what the GPU needs at least: multiplications at 989e12 FLOP/s in bfloat16, or bytes at 3.35e12 B/s of an
H100's memory, 4.8e12 of an H200's; "–" where a record says neither. Records of several kinds of GPU say each its own.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gpu_report_steps.parts import STEPS
from gpu_report_steps.records import measured, replace
from gpu_report_steps.report import headline

BEGIN, END = "<!-- gpu-report:begin -->", "<!-- gpu-report:end -->"
PEAK_FLOPS, PEAK_BYTES = 989e12, {"H100": 3.35e12, "H200": 4.8e12}
NONE = "–"
LEFT_OUT = ("doctor", "doctor, Transformer Engine", "topology")  # they measure nothing
NO_ERROR = ("held", "memory", "speed")  # shares and ratios, whose bounds say nothing about rounding
Row = tuple[str, str, str]  # what, measured, floor


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1e3 * value:.3g} ms"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def cells(name: str, found: Mapping) -> list[Row]:
    """Return how many cells passed, and the error that came nearest its bound."""
    rows = found["cells"]
    errors = [
        (row["checks"][check]["error"] / row["checks"][check]["allowed"], check, row["name"])
        for row in rows
        for check in row.get("checks", ())
        if check not in NO_ERROR
        and row["checks"][check]["allowed"]
        and not isinstance(row["checks"][check]["error"], str)
    ]
    passed = sum(row["status"] == "passed" for row in rows)
    says = [f"{passed} of {len(rows)} passed"]
    if errors:
        worst, check, cell = max(errors)
        says.append(f"worst error {worst:.2g} of its bound ({check} of {cell})")
    says += [f"{row['name']} {row['status']}: {row['reason']}" for row in rows if row["status"] != "passed"]
    return [(name, "; ".join(says), NONE)]


def skip(name: str, found: Mapping) -> list[Row]:
    """Return a row per share of dead groups: seconds, ratio, share of the planned ideal and MFU."""
    given = found["settings"]
    model = pathlib.PurePath(given["hf_path"] or f"hidden {given['hidden']}").name
    recipe = (
        f"{model}, {given['groups']} × {given['group_size']} samples of {given['mean_tokens']:,} tokens on average, "
        f"micro-batches of {given['max_tokens_per_microbatch']:,}, {given['dtype']}"
    )
    rows = []
    for row in found["rows"]:
        says = [f"dense {seconds(row['dense_s'])}, skip {seconds(row['skip_s'])}: {row['ratio']:.3g} times"]
        if "share_of_planned" in row:
            says.append(f"{percent(row['share_of_planned'])} of the planned ideal")
        shares = {x: row[f"{x}_mfu"] for x in ("dense", "skip") if f"{x}_mfu" in row}
        says += [f"MFU {', '.join(f'{x} {100 * mfu:.1f} %' for x, mfu in shares.items())}"] if shares else []
        floor = [f"{x} {seconds(mfu * row[f'{x}_s'])}" for x, mfu in shares.items()]
        what = f"{name}, {percent(row['dead_share'])} dead: {recipe}"
        rows.append((what, "; ".join(says), ", ".join(floor) or NONE))
    return rows


def shared_prompts(name: str, found: Mapping) -> list[Row]:
    rows = []
    for row in found["rows"]:
        ways = [x for x in ("dense before", "dense after", "skip before", "skip after") if x in row]
        says = ", ".join(f"{x} {seconds(row[x]['seconds'])} ({row[x]['ratio']:.3g} times)" for x in ways)
        rows.append((f"{name}, prompt : answer {row['batch']}, {percent(row['dead_share'])} dead", says, NONE))
    return rows


def logprobs(name: str, found: Mapping) -> list[Row]:
    """Return seconds and memory beside three matrix products: forward, and the gradients of both factors."""
    given, rows = found["settings"], []
    for row in found["rows"]:
        flops = 6 * row["tokens"] * given["hidden"] * given["vocab"]
        what = f"{name}: {row['tokens']:,} tokens, hidden {given['hidden']:,}, vocabulary {given['vocab']:,}"
        says = (
            f"{seconds(row['lean_s'])} and {row['lean_bytes'] / 2**30:.2f} GiB; with whole logits "
            f"{seconds(row['plain_s'])} and {row['plain_bytes'] / 2**30:.2f} GiB"
        )
        rows.append((what, says, seconds(flops / PEAK_FLOPS)))
    return rows


def packed_attention(name: str, found: Mapping) -> list[Row]:
    worst = max(x["error"] / x["bound"] for x in found["checks"])
    rows = [(name, f"worst error {worst:.2g} of its bound", NONE)]
    for row in found["speeds"]:
        says = f"{seconds(row['second_s'])}, {row['tflops']:.3g} TFLOP/s"
        rows.append((f"{name}, {row['case']}", says, seconds(row["second_s"] * row["tflops"] * 1e12 / PEAK_FLOPS)))
    return rows


def short_name(device: str) -> str:
    """Return "H200" for "1 x NVIDIA H200", and any other name whole."""
    return next((kind for kind in PEAK_BYTES if kind in device), device)


def moved_bytes(name: str, found: Mapping, device: str) -> list[Row]:
    """Return the step's own words beside one reading and one writing of its bytes in the GPU's memory."""
    peak = PEAK_BYTES.get(short_name(device))
    return [(name, "; ".join(headline(found)), seconds(2 * found["bytes"] / peak) if peak else NONE)]


def own_words(name: str, found: Mapping) -> list[Row]:
    return [(name, "; ".join(headline(found)) or "passed", NONE)]


def writer_of(name: str, device: str) -> Callable[[str, Mapping], list[Row]]:
    kinds: dict[str, Callable[[str, Mapping], list[Row]]] = {
        "cells": cells,
        "skip": skip,
        "shared": shared_prompts,
        "log-probs": logprobs,
        "packed": packed_attention,
    }
    kinds |= dict.fromkeys(("channels", "offload", "checkpoint", "reference"), partial(moved_bytes, device=device))
    return kinds.get(name.split()[0].rstrip(","), own_words)


def rows_of(record: Mapping | None, name: str) -> list[Row]:
    """Return the rows of one step: what it measured, and how it ended where it did not pass."""
    if record is None or not measured(record):
        return [(name, "not run", NONE)]
    found, write = record["found"], writer_of(name, record["machine"]["device"])
    if record["outcome"] == "passed" or "cells" in found:
        return write(name, found)
    before = write(name, found) if "rows" in found else []  # of a step that was cut off
    return [*before, (name, f"{record['outcome']}: {record['reason']}", NONE)]


def table(records: Sequence[Mapping]) -> str:
    """Return the table of all steps; those of a CPU do not stand where there are some of a GPU."""
    found = [x for x in records if x["machine"]["gpus"]] or list(records)
    by_name = {x["name"]: x for x in found}
    devices = {name: short_name(x["machine"]["device"]) for name, x in by_name.items() if measured(x)}
    several = len(set(devices.values())) > 1
    columns = ["what", "measured", "floor", *(["GPU"] if several else []), "step"]
    lines = [where([x for x in found if measured(x)]), ""]
    lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for step in STEPS:
        if step.name in LEFT_OUT:
            continue
        own = [devices.get(step.name, NONE)] if several else []
        for row in rows_of(by_name.get(step.name), step.name):
            lines.append(f"| {' | '.join(x.replace('|', '/') for x in (*row, *own, f'`{step.name}`'))} |")
    return "\n".join(lines)


def where(records: Sequence[Mapping]) -> str:
    """Return machine, dates and commits of what was measured."""
    if not records:
        return "No record yet."
    machines = {f"{x['machine']['device']}, driver {x['machine']['driver']}": None for x in records}
    versions: dict[str, None] = {}
    for x in records:
        versions |= dict.fromkeys(f"{name} {version}" for name, version in x["machine"]["versions"].items())
        versions[f"Python {x['machine']['python']}"] = None
    dates = sorted({x["date"][:10] for x in records})
    commits = {x["commit"]: None for x in records}
    parts = ["; ".join(machines), ", ".join(versions), " and ".join(dict.fromkeys((dates[0], dates[-1])))]
    return "; ".join([*parts, f"commit {', '.join(commits)}"]) + "."


def write_into(page: pathlib.Path, records: Sequence[Mapping]) -> None:
    """Put the table between the page's two markers. Raises SystemExit where it has none."""
    text = page.read_text() if page.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(
            f"gpu_report.py: --table {page} has no lines {BEGIN} and {END}; write them where it shall stand"
        )
    replace(page, f"{before}{BEGIN}\n{table(records)}\n{END}{after}")
