"""Draws a run's metrics as one HTML page with plots, readable offline, in light and dark.

Run it with ``python -m megatron_rl.observability.report RUN_DIR``.
"""

from __future__ import annotations

import argparse
import html
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.json_text import read_bytes
from megatron_rl.observability.completions import FILE_NAME
from megatron_rl.observability.metrics import Row, read_metrics
from megatron_rl.observability.report_completions import CSS as COMPLETIONS_CSS
from megatron_rl.observability.report_completions import completions_section
from megatron_rl.observability.report_figures import FIGURES, TIME_TITLE, Figure
from megatron_rl.observability.summary import WARMUP_PHASE, duration, eval_points, summarize
from megatron_rl.observability.svg import Frame, Series, band_plot, line_plot, short, smoothing_window, stacked_plot
from megatron_rl.types import StepKind

TIME_PARTS = ("rollout", "reward", "logprob", "update", "weight_sync", "critic")
OTHER_COLOR = 7  # grey
SPREAD = ("min", "p25", "median", "p75", "max")
SPREAD_COLORS = (OTHER_COLOR, 1, 1, 1, OTHER_COLOR)
SPREAD_TITLE = "Spread of rewards"
EVAL_COLORS = (3, 1, 2, 4, 5, 6)  # the mean first, then pass@1, pass@2, ...


CSS = """
:root { color-scheme: light dark; --page: #f4f5f8; --card: #ffffff; --ink: #171b22; --soft: #566072; --grid: #e8ebf0;
  --edge: #dfe3ea; --axis: #b4bcc9; --shade: #eef1f6; --c1: #2a6fdb; --c2: #e2711d; --c3: #14967f;
  --c4: #8457d8; --c5: #d23f73;
  --c6: #c29208; --c7: #98a2b1; --ghost: #171b22; }
@media (prefers-color-scheme: dark) { :root {
  --page: #0d1015; --card: #161a21; --ink: #e9edf3; --soft: #98a3b3; --grid: #242a34;
  --edge: #262d38; --axis: #4a5464; --shade: #1d232d; --c1: #5b9bff; --c2: #f5944a; --c3: #34c3a7;
  --c4: #a98bf3; --c5: #f0719c;
  --c6: #dcb13a; --c7: #6c7787; --ghost: #e9edf3; } .layer { opacity: .82; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 36px 24px 56px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 12px; }
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
.grid { stroke: var(--grid); } .axis { stroke: var(--axis); } .shade { fill: var(--shade); }
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


def _is_ghost(row: Row) -> bool:
    return row["step_kind"] != StepKind.REAL.value


def _phases(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    return [(str(phase), list(part)) for phase, part in groupby(rows, key=lambda row: row["phase"])]


def _frame(rows: Sequence[Row]) -> Frame:
    warmups = [part for phase, part in _phases(rows) if phase == WARMUP_PHASE]
    return Frame(
        first_step=rows[0]["step"],
        last_step=rows[-1]["step"],
        shaded=tuple((part[0]["step"], part[-1]["step"]) for part in warmups),
        phase_starts=tuple(part[0]["step"] for _, part in _phases(rows)),
        ghost_steps=np.asarray([row["step"] for row in rows if _is_ghost(row)], dtype=np.int64),
    )


def _series(rows: Sequence[Row], key: str, label: str, color: int) -> Series:
    having = [row for row in rows if key in row]
    return Series(
        label=label,
        steps=np.asarray([row["step"] for row in having], dtype=np.int64),
        values=np.asarray([row[key] for row in having], dtype=float),
        color=color,
    )


def _card(title: str, subtitle: str, series: Sequence[Series], has_ghosts: bool, svg: str) -> str:
    keys = [f'<span><i class="c{s.color}"></i>{html.escape(s.label)}</span>' for s in series] if len(series) > 1 else []
    if has_ghosts:
        keys.append('<span><i class="mark"></i>ghost step</span>')
    num_lost = sum(int((~np.isfinite(s.values)).sum()) for s in series)
    if num_lost:
        keys.append(f"<span>{num_lost} non-finite values are not drawn</span>")
    return (
        f'<figure><figcaption><b>{html.escape(title)}</b><span class="sub">{html.escape(subtitle)}</span></figcaption>'
        f'<div class="legend">{"".join(keys)}</div>{svg}</figure>'
    )


def _draw(figure: Figure, rows: Sequence[Row], frame: Frame) -> str | None:
    """Draw one figure's card; return None if no line of it has a finite value."""
    used = [row for row in rows if not (figure.real_only and _is_ghost(row))]
    colors = (OTHER_COLOR, 1) if len(figure.lines) == 2 else (1,)
    drawn = [_series(used, key, label, color) for (key, label), color in zip(figure.lines, colors, strict=True)]
    drawn = [s for s in drawn if np.isfinite(s.values).any()]
    if not drawn or (figure.nonzero and not any(np.nan_to_num(s.values).any() for s in drawn)):
        return None
    svg = line_plot(
        figure.title,
        drawn,
        frame,
        unit=figure.unit,
        from_zero=figure.from_zero,
        share=figure.share,
        spiky=figure.spiky,
        filled=figure.filled,
    )
    return _card(figure.title, figure.subtitle, drawn, len(frame.ghost_steps) > 0, svg)


def _draw_spread(rows: Sequence[Row], frame: Frame) -> str | None:
    """Draw the rewards' median in a band of their quartiles, in a band of least and largest."""
    names = {"reward/min": "least to largest", "reward/p25": "quartiles", "reward/median": "median"}
    having = [row for row in rows if all(math.isfinite(row.get(f"reward/{key}", math.nan)) for key in SPREAD)]
    if not having:
        return None
    series = {
        key: _series(having, f"reward/{key}", key, color) for key, color in zip(SPREAD, SPREAD_COLORS, strict=True)
    }
    bands = [(series["min"], series["max"]), (series["p25"], series["p75"])]
    svg = band_plot(SPREAD_TITLE, bands, series["median"], frame)
    legend = [replace(series[key.removeprefix("reward/")], label=label) for key, label in names.items()]
    return _card(SPREAD_TITLE, "over the samples of the rollout", legend, len(frame.ghost_steps) > 0, svg)


def _draw_times(rows: Sequence[Row], frame: Frame) -> str | None:
    """Stack a step's stages up to its total time; seconds that belong to no stage are drawn as "other"."""
    timed = [row for row in rows if "time/step_s" in row and np.isfinite(row["time/step_s"])]
    parts = [part for part in TIME_PARTS if any(f"time/{part}_s" in row for row in timed)]
    if not timed:
        return None
    total = _series(timed, "time/step_s", "whole step", OTHER_COLOR)
    values = [np.nan_to_num([row.get(f"time/{part}_s", 0.0) for row in timed]) for part in parts]
    rest = np.maximum(total.values - np.sum(values, axis=0), 0.0) if parts else total.values
    names = [part.replace("_", " ") for part in parts]
    colors = [TIME_PARTS.index(part) + 1 for part in parts]
    if rest.sum() > 0.01 * total.values.sum():
        names, values, colors = [*names, "other"], [*values, rest], [*colors, OTHER_COLOR]
    stack = [
        Series(label=n, steps=total.steps, values=v, color=c) for n, v, c in zip(names, values, colors, strict=True)
    ]
    svg = stacked_plot(TIME_TITLE, stack, total, frame, unit="s")
    return _card(TIME_TITLE, "seconds per optimizer step, by stage", stack, len(frame.ghost_steps) > 0, svg)


def _eval_series(metrics: Mapping[str, Sequence[tuple[int, float]]]) -> list[Series]:
    """Return one line per metric; pass@1 shares the mean's line and label if rewards are 0 or 1."""
    drawn: list[Series] = []
    for label, points in metrics.items():
        steps, values = zip(*points, strict=True)
        new = Series(
            label=label,
            steps=np.asarray(steps, dtype=np.int64),
            values=np.asarray(values, dtype=float),
            color=EVAL_COLORS[len(drawn) % len(EVAL_COLORS)],
        )
        old = drawn[0] if drawn and new.label == "pass@1" else None
        if (
            old is not None
            and np.array_equal(old.steps, new.steps)
            and np.allclose(old.values, new.values, equal_nan=True)
        ):
            drawn[0] = replace(old, label=f"{old.label} = {new.label}")
        elif np.isfinite(new.values).any():
            drawn.append(new)
    return drawn


def _draw_evals(rows: Sequence[Row], frame: Frame) -> list[str]:
    cards = []
    for name, metrics in eval_points(rows).items():
        drawn = _eval_series(metrics)
        if any(np.isfinite(s.values).sum() >= 2 for s in drawn):
            title, values = f"Evaluation: {name}", np.concatenate([s.values[np.isfinite(s.values)] for s in drawn])
            svg = line_plot(title, drawn, frame, share=bool(values.min() >= 0 and values.max() <= 1))
            subtitle = (
                "mean@1, greedy, on held-out prompts"
                if [s.label for s in drawn] == ["mean@1"]
                else "on held-out prompts"
            )
            cards.append(_card(title, subtitle, drawn, len(frame.ghost_steps) > 0, svg))
    return cards


def _plots(rows: Sequence[Row]) -> str:
    frame = _frame(rows)
    cards = {figure.title: _draw(figure, rows, frame) for figure in FIGURES}
    ordered = [
        cards["Reward"],
        *_draw_evals(rows, frame),
        _draw_spread(rows, frame),
        cards["Zero-advantage ratio"],
        cards["Tokens: executed and dense"],
    ]
    cards[TIME_TITLE] = _draw_times(rows, frame)
    ordered += [cards[TIME_TITLE]] + [cards[figure.title] for figure in FIGURES[3:]]
    missing = [title for title in (*(f.title for f in FIGURES if f.required), TIME_TITLE) if cards[title] is None]
    note = f"<p>Not in this run's metrics, so not drawn: {html.escape(', '.join(missing))}.</p>" if missing else ""
    return f'<div class="plots">{"".join(card for card in ordered if card)}</div>{note}'


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
    warmup = f", after {summary.num_warmup} of warm-up" if summary.num_warmup else ""
    count = summary.num_real + summary.num_ghost
    tiles.append(_tile("Ghost steps", f"{summary.num_ghost}", f"of {count} optimizer steps{warmup}"))
    if summary.step_s is not None:
        median = duration(summary.step_s).replace(" ", "\u00a0")
        tiles.append(_tile("Time", duration(summary.total_s), f"in {len(rows)} steps, median {median}"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _phase_table(rows: Sequence[Row]) -> str:
    head = (
        "phase",
        "steps",
        "real",
        "ghost",
        "reward, first",
        "reward, last",
        "executed of dense",
        "median step",
        "time",
    )
    lines = []
    for phase, part in _phases(rows):
        # summarize() excludes the warm-up phase; under another name each phase is summarized by itself.
        summary = summarize([{**row, "phase": "alone"} for row in part])
        reward = [f"{value:.3f}" for value in summary.reward] if summary.reward else ["–", "–"]
        share = f"{100 * summary.executed_ratio:.1f} %" if summary.executed_ratio is not None else "–"
        times = [duration(value) if value is not None else "–" for value in (summary.step_s, summary.total_s)]
        steps = f"{part[0]['step']} – {part[-1]['step']}"
        lines.append([phase, steps, str(summary.num_real), str(summary.num_ghost), *reward, share, *times])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    names = "".join(f"<th>{name}</th>" for name in head)
    return f'<h2>Phases</h2><div class="scroll"><table><tr>{names}</tr>{body}</table></div>'


def _page(name: str, rows: Sequence[Row], completions: str, config_yaml: str) -> str:
    if rows:
        window = smoothing_window(sum(row["phase"] != WARMUP_PHASE for row in rows) or len(rows))
        how = "Every step is drawn."
        if window > 1:
            how = f"Strong lines are running means over about {window} steps, faint ones the raw values."
        if any(_is_ghost(row) for row in rows):
            how += " A ghost step had no sample with signal, and ran no forward or backward pass."
        body = f'{_tiles(rows)}<p class="how">{how}</p>{_plots(rows)}{_phase_table(rows)}{completions}'
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
