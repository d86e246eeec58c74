"""Draws the plots of a run's report: one card a figure, over the steps of the run's own phase or of its start."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.observability.metrics import Row
from megatron_rl.observability.phases import PREFERENCE, in_phases, is_supervised, split_start
from megatron_rl.observability.report_figures import RL_FIGURES, SUPERVISED_FIGURES, TIME_TITLE, Figure
from megatron_rl.observability.summary import eval_points, held_out_points
from megatron_rl.observability.svg import Frame, Series, band_plot, line_plot, stacked_plot
from megatron_rl.types import StepKind

TIME_PARTS = ("rollout", "reward", "logprob", "update", "weight_sync", "critic")
OTHER_COLOR = 7  # grey
SPREAD = ("min", "p25", "median", "p75", "max")
SPREAD_COLORS = (OTHER_COLOR, 1, 1, 1, OTHER_COLOR)
SPREAD_TITLE = "Spread of rewards"
EVAL_COLORS = (3, 1, 2, 4, 5, 6)  # the mean first, then pass@1, pass@2, ...
Points = Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]  # of each set and metric: (step, value)


def is_ghost(row: Row) -> bool:
    return row["step_kind"] != StepKind.REAL.value


def _frame(rows: Sequence[Row], evaluated: Points) -> Frame:
    """Return the x axis of a part of the run; it begins a step early where something was measured before a step."""
    first = rows[0]["step"]
    steps = [step for metrics in evaluated.values() for points in metrics.values() for step, _ in points]
    if any(key.endswith("_before") for key in rows[0]):
        steps.append(first - 1)
    return Frame(
        first_step=min([first, *steps]),
        last_step=rows[-1]["step"],
        phase_starts=tuple(part[0]["step"] for _, part in in_phases(rows)),
        ghost_steps=np.asarray([row["step"] for row in rows if is_ghost(row)], dtype=np.int64),
    )


def _series(rows: Sequence[Row], key: str, label: str, color: int) -> Series:
    points = held_out_points(rows, key)
    return Series(
        label=label,
        steps=np.asarray([step for step, _ in points], dtype=np.int64),
        values=np.asarray([value for _, value in points], dtype=float),
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
    used = [row for row in rows if not (figure.real_only and is_ghost(row))]
    drawn = [_series(used, key, label, color) for key, label, color in figure.lines]
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


def _draw_evals(evaluated: Points, frame: Frame) -> list[str]:
    cards = []
    for name, metrics in evaluated.items():
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


def _within(evaluated: Points, first: float, last: float) -> Points:
    """Return the evaluations of the steps from ``first`` to ``last``."""
    chosen = {
        name: {metric: [p for p in points if first <= p[0] <= last] for metric, points in metrics.items()}
        for name, metrics in evaluated.items()
    }
    return {name: {metric: p for metric, p in metrics.items() if p} for name, metrics in chosen.items()}


def _plots_of(rows: Sequence[Row], evaluated: Points) -> str:
    """Draw the figures of one part of a run: the first, evaluations, two more, a step's time, and the rest."""
    figures = SUPERVISED_FIGURES if is_supervised(rows[0]) else RL_FIGURES
    frame = _frame(rows, evaluated)
    cards = {figure.title: _draw(figure, rows, frame) for figure in figures}
    first, *others = cards.values()
    times = _draw_times(rows, frame)
    ordered = [first, *_draw_evals(evaluated, frame), _draw_spread(rows, frame), *others[:2], times, *others[2:]]
    missing = [figure.title for figure in figures if figure.required and cards[figure.title] is None]
    missing += [TIME_TITLE] if times is None else []
    note = f"<p>Not in this run's metrics, so not drawn: {html.escape(', '.join(missing))}.</p>" if missing else ""
    return f'<div class="plots">{"".join(card for card in ordered if card)}</div>{note}'


def plots(rows: Sequence[Row]) -> str:
    """Return the HTML of all plots: of the run's own steps, and below them those of a supervised start."""
    start, own = split_start(rows)
    evaluated, own_from = eval_points(rows), own[0]["step"] - 1 if start else -math.inf
    own_plots = _plots_of(own, _within(evaluated, own_from, math.inf))
    if not start:
        return own_plots
    kind = "preference pairs" if start[0]["phase"] == PREFERENCE else "imitation"
    steps = f"{kind}, steps {start[0]['step']} – {start[-1]['step']}"
    below = _plots_of(start, _within(evaluated, -math.inf, own_from))
    return f'{own_plots}<h2>Supervised start <span class="sub">{steps}</span></h2>{below}'
