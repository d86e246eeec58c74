"""Draws line plots and stacked areas over optimizer steps as SVG text, so that a page needs no network and no script.

Colours are CSS classes (``c1`` ... ``c7``, ``ghost`` ...), which the page defines for light and dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WIDTH, HEIGHT = 560, 246
LEFT, RIGHT, TOP, BOTTOM = 54, 546, 16, 206
GHOST_TOP, GHOST_BOTTOM = 3, 11  # above the data, where neither a fill nor an axis tick can be taken for a ghost step
MAX_POINTS = 600  # per line: more than a point per pixel only grows the file
MAX_TIPS = 200
FEW_POINTS = 8  # below that a running mean hides more than it shows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """Holds one named line of a plot.

    steps: [N] optimizer steps, rising.
    values: [N], non-finite ones break the line.
    color: 1 to 7.
    """

    label: str
    steps: np.ndarray
    values: np.ndarray
    color: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """Holds the x axis and the marks that all plots of a page share.

    first_step, last_step: ends of the x axis, in optimizer steps.
    ghost_steps: [K] steps that are marked above the data.
    phase_starts: first step of every phase; no running mean reaches across one.
    """

    first_step: int
    last_step: int
    ghost_steps: np.ndarray
    phase_starts: tuple[int, ...] = ()

    def x(self, steps: np.ndarray | float) -> np.ndarray | float:
        """Convert steps to pixels, with half a step of air on either side."""
        span = self.last_step - self.first_step + 1
        return LEFT + (np.asarray(steps, dtype=float) - self.first_step + 0.5) / span * (RIGHT - LEFT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Holds a y axis in the values' unit; with ``log`` its ticks are powers of ten."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def y(self, values: np.ndarray | float) -> np.ndarray:
        values = np.asarray(values, dtype=float)
        low, high = self.low, self.high
        if self.log:
            values, low, high = np.log10(np.where(values > 0, values, np.nan)), math.log10(low), math.log10(high)
        return BOTTOM - (values - low) / (high - low) * (BOTTOM - TOP)


def short(value: float) -> str:
    """Format a number for a tick or a tooltip: ``1.2M``, ``340``, ``0.05``, ``3e-05``."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def ticks_between(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """Return about ``count`` multiples of 1, 2 or 5 times a power of ten that cover [low, high]."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return tuple(float(f"{i * size:.12g}") for i in range(first, last + 1))


def linear_axis(values: np.ndarray, from_zero: bool) -> Axis:
    """Return an axis over finite ``values``, its ends on ticks; a constant gets room around it."""
    low, high = (float(np.min(values)), float(np.max(values))) if len(values) else (0.0, 1.0)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-30):
        room = 0.5 * abs(high) or 0.5
        low, high = (low if from_zero else low - room), high + room
    ticks = ticks_between(low, high)
    return Axis(low=ticks[0], high=ticks[-1], ticks=ticks)


def log_axis(values: np.ndarray) -> Axis:
    """Return an axis of whole decades over the positive ``values``, with at most seven ticks."""
    exponents = np.log10(values[values > 0])
    low, high = math.floor(exponents.min()), math.ceil(exponents.max() + 1e-9)
    high = max(high, low + 1)
    ticks = tuple(10.0**e for e in range(low, high + 1, math.ceil((high - low) / 6)))
    return Axis(low=10.0**low, high=10.0**high, ticks=ticks, log=True)


def smoothing_window(count: int) -> int:
    """Return the points in the running mean: a fifteenth of the line, odd, at most 201; 1 for few points."""
    return 1 if count < FEW_POINTS else min(201, max(3, count // 15 | 1))


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the centred mean over the finite values within the window; NaN if it has none.

    A direct convolution is used: a difference of cumulated sums would turn to rounding noise after one huge spike.
    """
    if window <= 1 or not len(values):
        return np.asarray(values, dtype=float)
    finite, ones, half = np.isfinite(values), np.ones(window), window // 2
    inside = slice(half, half + len(values))  # of mode=full: mode=same would give max(N, window) points
    totals = np.convolve(np.where(finite, values, 0.0), ones, mode="full")[inside]
    counts = np.convolve(finite.astype(float), ones, mode="full")[inside]
    return np.where(counts > 0, totals / np.maximum(counts, 1.0), np.nan)


def _smooth(frame: Frame, series: Series) -> np.ndarray:
    """Return [N] a line's running mean, phase by phase: steps of one say nothing of another's."""
    window = smoothing_window(len(series.steps))
    parts = np.split(series.values, np.searchsorted(series.steps, frame.phase_starts))
    return np.concatenate([running_mean(part, window) for part in parts])


def _thin(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the indices of at most MAX_POINTS points.

    Every bucket's minimum and maximum are kept, so that no spike is lost.
    """
    if len(steps) <= MAX_POINTS:
        return np.arange(len(steps))
    kept = [0, len(steps) - 1]
    for bucket in np.array_split(np.arange(len(steps)), MAX_POINTS // 2):
        finite = bucket[np.isfinite(values[bucket])]
        kept += [finite[values[finite].argmin()], finite[values[finite].argmax()]] if len(finite) else [bucket[0]]
    return np.unique(kept)


def _path(x: np.ndarray, y: np.ndarray) -> str:
    commands, pen_down = [], False
    for px, py in zip(x, y, strict=True):
        if math.isfinite(py):
            commands.append(f"{'L' if pen_down else 'M'}{px:.1f} {py:.1f}")
        pen_down = math.isfinite(py)
    return "".join(commands)


def _line(frame: Frame, axis: Axis, series: Series, values: np.ndarray, css: str) -> str:
    kept = _thin(series.steps, values)
    x, y = np.atleast_1d(frame.x(series.steps[kept])), np.clip(axis.y(values[kept]), TOP, BOTTOM)
    return f'<path class="{css} c{series.color}" d="{_path(x, y)}"/>'


def _scenery(frame: Frame, axis: Axis) -> str:
    """Draw the background: grid and tick labels."""
    parts = []
    for tick in axis.ticks:
        y = float(axis.y(tick))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 7}" y="{y + 3.5:.1f}">{short(tick)}</text>')
    span = max(frame.last_step - frame.first_step, 1)
    steps = [t for t in ticks_between(frame.first_step, frame.first_step + span, 6) if t == int(t)]
    for tick in (t for t in steps if frame.first_step <= t <= frame.last_step):
        x = float(frame.x(tick))
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{BOTTOM}" y2="{BOTTOM + 4}"/>')
        parts.append(f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{BOTTOM + 17}">{short(tick)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>')
    parts.append(f'<text class="axis-label" text-anchor="end" x="{RIGHT}" y="{HEIGHT - 6}">optimizer step</text>')
    return "".join(parts)


def _ghosts(frame: Frame) -> str:
    """Draw one short mark per ghost step above the data; steps that share a pixel share their mark."""
    pixels = np.unique(np.round(np.atleast_1d(frame.x(frame.ghost_steps)), 1))
    d = "".join(f"M{x:.1f} {GHOST_TOP}V{GHOST_BOTTOM}" for x in pixels)
    return f'<path class="ghost" d="{d}"/>' if d else ""


def _tips(frame: Frame, series: Sequence[Series], unit: str) -> str:
    """Draw invisible columns with a <title>, so that the browser's tooltip shows the values of a step."""
    tables = [dict(zip(s.steps.tolist(), s.values.tolist(), strict=True)) for s in series]
    steps = sorted(set().union(*tables))
    if len(steps) > MAX_TIPS:
        steps = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, MAX_TIPS).astype(int))]
    if not steps:
        return ""
    x = np.atleast_1d(frame.x(np.asarray(steps)))
    edges = np.concatenate([[LEFT], (x[1:] + x[:-1]) / 2, [RIGHT]])
    parts = []
    for i, step in enumerate(steps):
        values = [
            f"{s.label}: {short(t[step])} {unit}".rstrip() for s, t in zip(series, tables, strict=True) if step in t
        ]
        tip = html.escape("\n".join([f"step {step}", *values]))
        rect = f'x="{edges[i]:.1f}" y="{TOP}" width="{edges[i + 1] - edges[i]:.1f}" height="{BOTTOM - TOP}"'
        parts.append(f'<rect class="tip" {rect}><title>{tip}</title></rect>')
    return "".join(parts)


def _svg(title: str, content: str) -> str:
    name = html.escape(title, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}"><title>{name}</title>{content}</svg>'


def _all_finite(series: Sequence[Series]) -> np.ndarray:
    values = np.concatenate([s.values for s in series])
    return values[np.isfinite(values)]


def line_plot(
    title: str,
    series: Sequence[Series],
    frame: Frame,
    *,
    unit: str = "",
    from_zero: bool = False,
    share: bool = False,
    spiky: bool = False,
    filled: bool = False,
) -> str:
    """Draw lines: the running mean over the faint raw values; with few points, the points themselves.

    share: the axis is 0 to 1.
    spiky: the axis is logarithmic if the largest value is above 20 medians.
    filled: the area under each line is tinted.
    Raises ValueError if nothing is finite: the caller is to leave such a series out.
    """
    values = _all_finite(series)
    if not len(values):
        raise ValueError(f"plot {title!r} has no finite value; leave it out and say so")
    positive = values[values > 0]
    if share:
        axis = Axis(low=0.0, high=1.0, ticks=(0.0, 0.25, 0.5, 0.75, 1.0))
    elif spiky and len(positive) == len(values) and values.max() > 20 * np.median(values):
        axis = log_axis(values)
    else:
        axis = linear_axis(values, from_zero)
    parts = [_scenery(frame, axis)]
    for s in series:
        smooth = _smooth(frame, s)
        if filled:
            known = np.isfinite(smooth)
            parts.append(
                _area(frame, axis, s.steps[known], np.full(known.sum(), axis.low), smooth[known], f"tint c{s.color}")
            )
        if len(s.values) < FEW_POINTS:
            parts.append(_line(frame, axis, s, s.values, "line"))
            for x, y in zip(np.atleast_1d(frame.x(s.steps)), axis.y(s.values), strict=True):
                parts.append(
                    f'<circle class="dot c{s.color}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' if math.isfinite(y) else ""
                )
        else:
            parts += [_line(frame, axis, s, s.values, "raw"), _line(frame, axis, s, smooth, "line")]
    return _svg(title, "".join(parts) + _ghosts(frame) + _tips(frame, series, unit))


def band_plot(title: str, bands: Sequence[tuple[Series, Series]], line: Series, frame: Frame, *, unit: str = "") -> str:
    """Draw a line in tinted bands, the widest first, as running means over the same steps.

    bands: (lower edge, upper edge) of each, with the color of the first.
    """
    edges = [series for band in bands for series in band]
    axis = linear_axis(_all_finite([*edges, line]), from_zero=False)
    parts = [_scenery(frame, axis)]
    for low, high in bands:
        parts.append(_area(frame, axis, line.steps, _smooth(frame, low), _smooth(frame, high), f"tint c{low.color}"))
    parts.append(_line(frame, axis, line, _smooth(frame, line), "line"))
    return _svg(title, "".join(parts) + _ghosts(frame) + _tips(frame, [*edges, line], unit))


def _area(frame: Frame, axis: Axis, steps: np.ndarray, low: np.ndarray, high: np.ndarray, css: str) -> str:
    if not len(steps):
        return ""
    kept = _thin(steps, high)
    x = np.atleast_1d(frame.x(steps[kept]))
    top, foot = np.clip(axis.y(high[kept]), TOP, BOTTOM), np.clip(axis.y(low[kept]), TOP, BOTTOM)
    return f'<path class="{css}" d="{_path(x, top)}{_path(x[::-1], foot[::-1]).replace("M", "L", 1)}Z"/>'


def stacked_plot(title: str, series: Sequence[Series], total: Series, frame: Frame, *, unit: str) -> str:
    """Stack areas, as running means over the same steps, with the raw total as a faint line over them.

    series: first at the bottom, all on ``total.steps``. The axis ends at the 99th percentile of the total, so that one
        slow step does not flatten the rest; higher values are drawn at the upper edge.
    """
    layers = np.cumsum([_smooth(frame, s) for s in series], axis=0)
    finite = total.values[np.isfinite(total.values)]
    axis = linear_axis(
        np.asarray([layers[-1].max(), np.percentile(finite, 99) if len(finite) else 0.0]), from_zero=True
    )
    foot, parts = np.zeros(len(total.steps)), [_scenery(frame, axis)]
    for s, top in zip(series, layers, strict=True):
        parts.append(_area(frame, axis, s.steps, foot, top, f"layer c{s.color}"))
        foot = top
    parts.append(_line(frame, axis, total, total.values, "raw"))
    return _svg(title, "".join(parts) + _ghosts(frame) + _tips(frame, [*series, total], unit))
