"""The picture of a forecast as SVG: two pipeline schedules, one above the other, on a common axis of seconds.

The upper one is dense: it runs all samples. The lower one skips samples without signal, which have
advantage 0. In the upper one, the share of a micro-batch's tokens that the lower one skips is grey.
Colours are those of the run report (observability/page/watch.css), light and dark.
"""

from __future__ import annotations

import html
import math

import numpy as np

from megatron_rl.simulator.forecast import Drawn, Forecast
from megatron_rl.simulator.table import short

WIDTH, LEFT, RIGHT = 980, 64, 964
ROW, GAP, HEADING = 22, 4, 40
MAX_ROWS = 16
MAX_BOXES = 12_000

CSS = """
.page{fill:#fff}.ink,.soft{font:12px system-ui,sans-serif}.ink{fill:#171b22;font-weight:600}
.soft{fill:#566072}.row{fill:#eef1f6}
.forward{fill:#2a6fdb}.backward{fill:#14967f}.dead{fill:#98a2b1}.filler{fill:#c29208}.edge{stroke:#b4bcc9;stroke-width:1}
.saved{fill:#e2711d;opacity:.14}.limit{stroke:#e2711d;stroke-width:1.4;stroke-dasharray:4 3}
@media (prefers-color-scheme:dark){.page{fill:#161a21}.ink{fill:#e9edf3}.soft{fill:#98a3b3}.row{fill:#1d232d}
.forward{fill:#5b9bff}
.backward{fill:#34c3a7}.dead{fill:#6c7787}.filler{fill:#dcb13a}.edge{stroke:#4a5464}}
"""


def picture(forecast: Forecast, title: str) -> str:
    """Return SVG text: a pipeline schedule with all samples, and below it one without those that the skip drops.

    Each schedule shows the first mini-batch of which not all samples are dropped, on the slowest
    data-parallel replica.

    title: the picture's heading.
    """
    panels = [
        (name, drawn)
        for name, drawn in (("dense", forecast.dense.drawn), ("skip", forecast.skip.drawn))
        if drawn is not None
    ]
    if not panels:
        raise ValueError(
            "nothing runs in the dense plan, so there is no pipeline to draw; give a trace with at least one sample"
        )
    seconds = max(drawn.timeline.makespan for _, drawn in panels)
    rows = min(MAX_ROWS, panels[0][1].timeline.pipeline)
    panel = HEADING + rows * (ROW + GAP)
    height = 34 + 2 * panel + 54
    name = html.escape(title, quote=True)
    parts = [f'<rect class="page" width="{WIDTH}" height="{height}"/><text class="ink" x="{LEFT}" y="22">{name}</text>']
    for i, (kind, drawn) in enumerate(panels):
        parts.append(_panel(kind, drawn, 34 + i * panel, rows, seconds))
    if len(panels) == 1:
        text = "skip: no sample of this mini-batch has signal: a ghost step runs the optimizer alone"
        parts.append(f'<text class="soft" x="{LEFT}" y="{34 + panel + 24}">{text}</text>')
    parts.append(_axis(34 + 2 * panel + 4, seconds))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{name}"><title>{name}</title>'
        f"<style>{CSS}</style>{''.join(parts)}</svg>\n"
    )


def _x(seconds: float | np.ndarray, whole: float) -> float | np.ndarray:
    return LEFT + seconds / whole * (RIGHT - LEFT)


def _panel(kind: str, drawn: Drawn, top: int, rows: int, seconds: float) -> str:
    timeline, count = drawn.timeline, drawn.dead.shape[0]
    words = f"{kind}: {count} micro-batches on replica {drawn.rank}, {short(timeline.makespan)} s, "
    words += f"bubble {100 * timeline.bubble_share.mean():.0f} %"
    shown = np.unique(np.linspace(0, timeline.pipeline - 1, rows).astype(int))
    parts = [f'<text class="ink" x="{LEFT}" y="{top + 26}">{words}</text>']
    for line, rank in enumerate(shown.tolist()):
        y = top + HEADING + line * (ROW + GAP)
        parts.append(f'<text class="soft" x="{LEFT - 8}" y="{y + 15}" text-anchor="end">stage {rank}</text>')
        parts.append(f'<rect class="row" x="{LEFT}" y="{y}" width="{RIGHT - LEFT}" height="{ROW}"/>')
        parts.append(_boxes(drawn, rank, y, seconds, MAX_BOXES // (2 * len(shown))))
    end, foot = float(_x(timeline.makespan, seconds)), top + HEADING + len(shown) * (ROW + GAP)
    if timeline.makespan < seconds * 0.999:
        high, wide = foot - top - HEADING, RIGHT - end
        parts.append(f'<rect class="saved" x="{end:.1f}" y="{top + HEADING - 4}" width="{wide:.1f}" height="{high}"/>')
        parts.append(f'<path class="limit" d="M{end:.1f} {top + HEADING - 8}V{foot}"/>')
        saved = f"{short(seconds - timeline.makespan)} s less"
        anchor, x = ("start", end + 6) if end < RIGHT - 90 else ("end", end - 6)
        parts.append(
            f'<text class="ink" x="{x:.1f}" y="{top + 26}" text-anchor="{anchor}">{saved}</text>'
            if end > LEFT + 420
            else ""
        )
    return "".join(parts)


def _boxes(drawn: Drawn, rank: int, y: int, seconds: float, limit: int) -> str:
    """Return SVG boxes for the forward and backward passes on one pipeline rank.

    The lower, grey part of a box is the share of tokens without signal, which the skip would drop.

    y: the top of the boxes in pixels.
    seconds: the seconds that the whole width stands for.
    limit: the most micro-batches to draw.
    """
    timeline, parts = drawn.timeline, []
    for css, starts, ends in (
        ("forward", timeline.forward_start, timeline.forward_end),
        ("backward", timeline.backward_start, timeline.backward_end),
    ):
        for stage in range(rank, starts.shape[0], timeline.pipeline):
            for m in range(min(len(drawn.dead), limit)):  # later micro-batches pad a what-if plan and take no time
                left, right = float(_x(starts[stage, m], seconds)), float(_x(ends[stage, m], seconds))
                wide = max(right - left - 0.6, 0.3)
                kind = "filler" if drawn.filler[m] else css
                parts.append(f'<rect class="{kind}" x="{left:.2f}" y="{y}" width="{wide:.2f}" height="{ROW}"/>')
                dead = ROW * float(drawn.dead[m])
                if dead > 0.2:
                    parts.append(
                        f'<rect class="dead" x="{left:.2f}" y="{y + ROW - dead:.1f}" width="{wide:.2f}" '
                        f'height="{dead:.1f}"/>'
                    )
    return "".join(parts)


def _axis(y: int, seconds: float) -> str:
    ticks = [t for t in ticks_between(0.0, seconds, 8) if t <= seconds * 1.0001]
    parts = [f'<path class="edge" d="M{LEFT} {y}H{RIGHT}"/>']
    for tick in ticks:
        x = float(_x(tick, seconds))
        parts.append(f'<path class="edge" d="M{x:.1f} {y}v4"/>')
        parts.append(f'<text class="soft" x="{x:.1f}" y="{y + 17}" text-anchor="middle">{short(tick)} s</text>')
    x = LEFT
    for css, words in (
        ("forward", "forward"),
        ("backward", "backward"),
        ("dead", "tokens without signal"),
        ("filler", "filler"),
    ):
        parts.append(f'<rect class="{css}" x="{x}" y="{y + 30}" width="11" height="11"/>')
        parts.append(f'<text class="soft" x="{x + 16}" y="{y + 40}">{words}</text>')
        x += 40 + 7 * len(words)
    return "".join(parts)


def ticks_between(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """Return evenly spaced round numbers that cover [low, high], about ``count`` of them.

    Their distance is 1, 2 or 5 times a power of ten.
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return tuple(float(f"{i * size:.12g}") for i in range(first, last + 1))
