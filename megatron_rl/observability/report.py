"""Draws a run's metrics as one HTML page with plots, readable offline, in light and dark.

Run it with ``python -m megatron_rl.observability.report RUN_DIR``.
"""

from __future__ import annotations

import argparse
import html
import pathlib
import sys
from collections.abc import Sequence

from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.json_text import read_bytes
from megatron_rl.observability.completions import FILE_NAME
from megatron_rl.observability.metrics import Row, read_metrics
from megatron_rl.observability.phases import in_phases, split_start
from megatron_rl.observability.phases import title as title_of
from megatron_rl.observability.report_completions import CSS as COMPLETIONS_CSS
from megatron_rl.observability.report_completions import completions_section
from megatron_rl.observability.report_plots import is_ghost, plots
from megatron_rl.observability.summary import RunSummary, duration, summarize
from megatron_rl.observability.svg import short, smoothing_window

PHASE_COLUMNS = ("phase", "steps", "real", "ghost", "loss", "reward", "executed of dense", "median step", "time")
CSS = """
:root { color-scheme: light dark; --page: #f4f5f8; --card: #ffffff; --ink: #171b22; --soft: #566072; --grid: #e8ebf0;
  --edge: #dfe3ea; --axis: #b4bcc9; --c1: #2a6fdb; --c2: #e2711d; --c3: #14967f;
  --c4: #8457d8; --c5: #d23f73;
  --c6: #c29208; --c7: #98a2b1; --ghost: #171b22; }
@media (prefers-color-scheme: dark) { :root {
  --page: #0d1015; --card: #161a21; --ink: #e9edf3; --soft: #98a3b3; --grid: #242a34;
  --edge: #262d38; --axis: #4a5464; --c1: #5b9bff; --c2: #f5944a; --c3: #34c3a7;
  --c4: #a98bf3; --c5: #f0719c;
  --c6: #dcb13a; --c7: #6c7787; --ghost: #e9edf3; } .layer { opacity: .82; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 36px 24px 56px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 12px; } h2 .sub { color: var(--soft); font-weight: 450; font-size: 14px; }
p { margin: 6px 0; color: var(--soft); max-width: 100ch; }
p.how { font-size: 13.5px; margin: 0 2px 14px; max-width: none; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(178px, 1fr)); gap: 12px; margin: 22px 0 16px; }
.tile, figure, table, details { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
.tile { padding: 13px 14px 12px; min-width: 0; }
.tile .name { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 22px; line-height: 1.4; font-weight: 650; letter-spacing: -0.015em; white-space: nowrap; }
.tile .value span { color: var(--soft); font-weight: 450; font-size: 17px; }
.tile .note { color: var(--soft); font-size: 12.5px; line-height: 1.35; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 14px 16px 8px; min-width: 0; }
figcaption b { font-size: 15.5px; font-weight: 650; }
figcaption span.sub { color: var(--soft); font-size: 13px; margin-left: 7px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 11px; min-height: 20px; font-size: 12px; color: var(--soft); }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px; }
.legend i.mark { width: 2px; margin-left: 2px; border-radius: 0; background: var(--ghost); }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft);
  font-variant-numeric: tabular-nums; }
.grid { stroke: var(--grid); } .axis { stroke: var(--axis); }
.ghost { stroke: var(--ghost); stroke-width: 1.4; }
.raw, .line { fill: none; stroke-linejoin: round; stroke-linecap: round; }
.raw { stroke-width: 1; opacity: .4; } .line { stroke-width: 2.2; }
.layer { stroke: var(--card); stroke-width: .8; } .tint { opacity: .13; }
.dot { stroke: var(--card); stroke-width: 1.5; }
.tip { fill: transparent; } .tip:hover { fill: var(--ink); opacity: .07; }
table { border-collapse: separate; border-spacing: 0; width: 100%;
  font-variant-numeric: tabular-nums; font-size: 14px; }
.scroll { overflow-x: auto; }
th, td { text-align: right; padding: 8px 16px; white-space: nowrap; } th { color: var(--soft); font-weight: 500; }
td { border-top: 1px solid var(--edge); } th:first-child, td:first-child { text-align: left; }
details { margin-top: 26px; padding: 12px 16px; } summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: 12px 0 4px; }
""" + "".join(
    f"path.c{i}.raw, path.c{i}.line {{ stroke: var(--c{i}); }} "
    f"path.c{i}.layer, path.c{i}.tint, circle.c{i} {{ fill: var(--c{i}); }} "
    f"i.c{i} {{ background: var(--c{i}); }}\n"
    for i in range(1, 8)
)


def _tile(name: str, value: str, note: str, *, before: str = "") -> str:
    """Return the HTML of one headline figure; ``before`` is its value at the run's start."""
    was = f"<span>{html.escape(before)} → </span>" if before else ""
    return (
        f'<div class="tile"><div class="name">{html.escape(name)}</div><div '
        f'class="value">{was}{html.escape(value)}</div>'
        f'<div class="note">{html.escape(note)}</div></div>'
    )


def _tiles(rows: Sequence[Row]) -> str:
    summary = summarize(rows)
    tiles = []
    ends = f"means of the first and the last {summary.window} steps" if summary.window > 1 else "first and last step"
    if summary.reward is not None:
        tiles.append(_tile("Reward", f"{summary.reward[1]:.3f}", ends, before=f"{summary.reward[0]:.3f}"))
    if summary.supervised_phase is not None:
        tiles += _supervised_tiles(summary, ends)
    for label, ((first_step, first), (last_step, last)) in summary.evaluations.items():
        name, _, kind = label.rpartition(" ")
        before = f"{first:.3f}" if last_step > first_step else ""
        note = f"steps {first_step} and {last_step}, {kind}" if before else f"step {last_step}, {kind}"
        errors = summary.evaluation_errors.get(label, {})
        if last_step in errors:
            found = [f"{errors[step]:.3f}" for step in ([first_step] if before else []) + [last_step] if step in errors]
            note += f"; standard error {' and '.join(found)}"
        tiles.append(_tile(f"Evaluation: {name}", f"{last:.3f}", note, before=before))
    if summary.reward_errors:
        note = (
            f"samples whose reward failed, {100 * summary.reward_error_share:.1f} % in the last {summary.window} steps"
        )
        tiles.append(_tile("Reward errors", f"{summary.reward_errors:,}", note))
    if summary.truncated_share is not None:
        note = f"of the last {summary.window} steps, at the limit of their tokens"
        tiles.append(_tile("Truncated responses", f"{100 * summary.truncated_share:.1f} %", note))
    if summary.zero_advantage_ratio is not None:
        start, end = (f"{100 * value:.0f} %" for value in summary.zero_advantage_ratio)
        tiles.append(_tile("Zero-advantage ratio", end, ends, before=start))
    if summary.executed_ratio is not None:
        counts = f"{short(summary.tokens_executed)} of the dense run's {short(summary.tokens_dense)}"
        tiles.append(_tile("Tokens executed", f"{100 * summary.executed_ratio:.1f} %", counts))
    count = summary.num_real + summary.num_ghost
    if summary.supervised_phase is None or summary.num_ghost:
        warmup = f", after {summary.num_warmup} of warm-up" if summary.num_warmup else ""
        tiles.append(_tile("Ghost steps", f"{summary.num_ghost}", f"of {count} optimizer steps{warmup}"))
    else:
        tiles.append(_tile("Optimizer steps", f"{count:,}", title_of(summary.supervised_phase)))
    if summary.step_s is not None:
        median = duration(summary.step_s).replace(" ", "\u00a0")
        tiles.append(_tile("Time", duration(summary.total_s), f"in {len(rows)} steps, median {median}"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _supervised_tiles(summary: RunSummary, ends: str) -> list[str]:
    """Return the headline figures of a run of supervised steps alone."""
    tiles = []
    if summary.loss is not None:
        tiles.append(_tile("Loss", f"{summary.loss[1]:.3f}", ends, before=f"{summary.loss[0]:.3f}"))
    if summary.accuracy is not None:
        start, end = (f"{100 * value:.0f} %" for value in summary.accuracy)
        tiles.append(_tile("Pairs told apart", end, ends, before=start))
    for name, ((first_step, first), (last_step, last)) in summary.held_out.items():
        before = f"{first:.3f}" if last_step > first_step else ""
        note = f"steps {first_step} and {last_step}" if before else f"step {last_step}"
        tiles.append(_tile(name[0].upper() + name[1:], f"{last:.3f}", note, before=before))
    if summary.tokens_per_second is not None:
        tiles.append(_tile("Tokens a second", short(float(f"{summary.tokens_per_second:.3g}")), "median of the steps"))
    return tiles


def _phase_table(rows: Sequence[Row]) -> str:
    lines = []
    for phase, part in in_phases(rows):
        summary = summarize(part)
        found = {
            "phase": title_of(phase),
            "steps": f"{part[0]['step']} – {part[-1]['step']}",
            "real": str(summary.num_real),
            "ghost": str(summary.num_ghost),
        }
        for name, ends in (("loss", summary.loss), ("reward", summary.reward)):
            found |= {name: f"{ends[0]:.3f} → {ends[1]:.3f}"} if ends is not None else {}
        if summary.executed_ratio is not None:
            found["executed of dense"] = f"{100 * summary.executed_ratio:.1f} %"
        times = {"median step": summary.step_s, "time": summary.total_s}
        lines.append(found | {name: duration(value) for name, value in times.items() if value is not None})
    used = [name for name in PHASE_COLUMNS if any(name in line for line in lines)]
    cells = ([html.escape(line.get(name, "–")) for name in used] for line in lines)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in cells)
    names = "".join(f"<th>{name}</th>" for name in used)
    return f'<h2>Phases</h2><div class="scroll"><table><tr>{names}</tr>{body}</table></div>'


def _page(name: str, rows: Sequence[Row], completions: str, config_yaml: str) -> str:
    if rows:
        window = smoothing_window(len(split_start(rows)[1]))
        how = "Every step is drawn."
        if window > 1:
            how = f"Strong lines are running means over about {window} steps, faint ones the raw values."
        if any(is_ghost(row) for row in rows):
            how += " A ghost step had no sample with signal, and ran no forward or backward pass."
        body = f'{_tiles(rows)}<p class="how">{how}</p>{plots(rows)}{_phase_table(rows)}{completions}'
    else:
        body = "<p>metrics.jsonl holds no optimizer step yet, so there is nothing to draw.</p>"
    title = html.escape(name)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title} · megatron_rl</title>'
        f"<style>{CSS}{COMPLETIONS_CSS}</style></head>\n"
        f"<body><main><header><p>megatron_rl run report</p><h1>{title}</h1></header>"
        f"{body}<details><summary>Configuration, every default filled in</summary><pre>{html.escape(config_yaml)}</pre>"
        f"</details></main></body></html>\n"
    )


def write_report(metrics_path: str | pathlib.Path, config_yaml: str, out_path: str | pathlib.Path) -> None:
    """Write one self-contained HTML page, headed by the name of the folder that holds ``metrics_path``.

    Completions are read from that folder, if they were recorded.

    Raises FileNotFoundError if there are no metrics, ValueError ``file:line`` if a line of them is malformed.
    """
    metrics_path, out_path = pathlib.Path(metrics_path), pathlib.Path(out_path)
    completions = completions_section(metrics_path.with_name(FILE_NAME))
    page = _page(metrics_path.resolve().parent.name, read_metrics(metrics_path), completions, config_yaml)
    replace_text(out_path, page)  # a browser that reloads during a run never sees half a page


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Write RUN_DIR/report.html from RUN_DIR/metrics.jsonl."
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.observability.report", description=description)
    parser.add_argument("run_dir", type=pathlib.Path, metavar="RUN_DIR")
    run_dir = parser.parse_args(arguments).run_dir
    try:
        print(_report_of(run_dir))
    except (OSError, ValueError) as error:
        print(f"megatron_rl: {error}; give the folder of a run, the one that run.dir named", file=sys.stderr)
        return 2
    return 0


def _report_of(run_dir: pathlib.Path) -> pathlib.Path:
    config_path, config_yaml = run_dir / "config.yaml", "# config.yaml is not in the run's folder"
    if config_path.exists():
        config_yaml = read_bytes(config_path, "text", most_bytes=1 << 24, error=ValueError).decode("utf-8", "replace")
    write_report(run_dir / "metrics.jsonl", config_yaml, run_dir / "report.html")
    return run_dir / "report.html"


if __name__ == "__main__":
    sys.exit(main())
