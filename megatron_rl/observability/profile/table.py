"""The table of a profile's summary, for the log."""

from __future__ import annotations

from megatron_rl.observability.profile.summary import Summary, Timed

MIB = 2**20
MOST_RANGES, MOST_OTHERS = 30, 12  # lines of a table


def table_of(summary: Summary) -> str:
    """Return the summary as lines of text: shares, times of ranges, kernels and operations, waits per micro-batch."""
    return "\n".join(
        [
            *_shares(summary),
            *_timed("range", summary.ranges, summary.window_s, most=MOST_RANGES),
            *_timed("collective", summary.collectives, summary.window_s),
            *_timed("kernel or copy", summary.kernels, summary.window_s),
            *_timed("operation", summary.operations, summary.window_s),
            *_waits(summary),
        ]
    )


def _shares(summary: Summary) -> list[str]:
    said = [f"recorded {summary.window_s:.3f} s, {summary.num_events:,} events"]
    if summary.device_idle_share is not None:
        said.append(f"device idle {_percent(summary.device_idle_share)} (no kernel or copy ran)")
    said.append(f"main thread in no operation of torch {_percent(summary.main_idle_share)}")
    share = summary.collectives_s / summary.window_s
    said.append(f"a collective under way {summary.collectives_s:.3f} s ({_percent(share)})")
    if summary.passes_s:
        outside = 1.0 - summary.in_passes_s / summary.passes_s
        said.append(f"schedule {summary.passes_s:.3f} s, outside of forward, loss and backward {_percent(outside)}")
    return said


def _timed(title: str, timed: dict[str, Timed], window_s: float, *, most: int = MOST_OTHERS) -> list[str]:
    if not timed:
        return []
    peaks = any(each.peak_bytes is not None for each in timed.values())
    lines = [f"{title:<44} {'count':>7} {'total s':>9} {'own s':>9} {'of all':>7}{'   peak MiB' * peaks}"]
    for name, each in list(timed.items())[:most]:
        shown = name if len(name) <= 44 else f"{name[:43]}…"
        line = f"{shown:<44} {each.count:>7} {each.total_s:>9.4f} {each.own_s:>9.4f} "
        line += f"{_percent(each.own_s / window_s):>7}"
        lines.append(line + (f"{each.peak_bytes / MIB:>11.1f}" if each.peak_bytes is not None else ""))
    left = len(timed) - most
    return [*lines, f"… and {left} more"] if left > 0 else lines


def _waits(summary: Summary) -> list[str]:
    lines = ["waits for the device per micro-batch (on a CPU: operations that would wait for a GPU)"]
    for name, calls in summary.waits.items():
        said = ", ".join(f"{call} {count:.2f}" for call, count in calls.items())
        lines.append(f"  {name}: {said or 'none'}")
    return lines if summary.waits else []


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
