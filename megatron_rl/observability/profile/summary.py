"""The summary of a profiler's trace: time by range and by operation, idle shares, and waits for the device.

The events are those of torch.profiler's Chrome trace (2.13): ``cpu_op`` and ``user_annotation`` of
the host's threads, ``kernel``, ``gpu_memcpy`` and ``gpu_memset`` of a GPU. Times in the events are
microseconds, here seconds.

1. A range's own time is its time less the time of the ranges directly within it on the same thread.
   The own times of a thread add up to the time of its outermost ranges. The same holds for
   operations.
2. An idle share is 1 − (the union of the busy intervals within the window) / (the window).
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

RANGE, OPERATION = "user_annotation", "cpu_op"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
COLLECTIVE = re.compile(r"gloo:|nccl")  # ranges of torch's process groups, and NCCL's kernels
# Calls that make the host wait for a GPU: calls of the driver, and operations that make such calls.
WAITS = frozenset({
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    *("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"),
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::_unique2"),
})  # fmt: skip
PASSES = ("forward", "loss", "backward")
NUMBER = re.compile(r" (mb|step)=\d+.*")
US = 1e-6

Interval = tuple[float, float]
"""The (start, end) of an event, in the trace's microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Holds the times of all ranges, or of all operations, of one name.

    count: how many there are.
    total_s: their seconds.
    own_s: their seconds without the ranges or operations within them on the same thread.
    peak_bytes: the most bytes allocated at once within one of them, without those allocated before
        the recording; None if no allocation was recorded.
    """

    count: int
    total_s: float
    own_s: float
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Holds the figures of a trace. The window is the time from the recording's start to its end.

    window_s: the seconds of the window.
    num_events: the number of events in the trace.
    main_idle_share: the share of the window in which the main thread ran no operation of torch.
    device_idle_share: the share of the window in which no kernel or copy ran on the GPU; None
        without a GPU.
    collectives_s: the seconds of the window in which a collective was running.
    passes_s: the seconds that the main thread spent in the pipeline schedule.
    in_passes_s: of these, the seconds in forward passes, losses and backward passes. The rest is
        bubbles, communication and the schedule itself.
    waits: {pass: {call's name: how often, per micro-batch, such a call waited for the device}}.
    ranges, collectives, operations: {name: times}; numbers of micro-batches and steps are removed
        from the names.
    kernels: the same for a GPU's kernels and copies, collectives included.

    Example: one ``forward mb=0`` of 3 s within ``passes that train`` of 4 s: ``passes_s=4``,
    ``in_passes_s=3``, ``ranges["passes that train"].own_s=1``.
    """

    window_s: float
    num_events: int
    main_idle_share: float
    device_idle_share: float | None
    collectives_s: float
    passes_s: float
    in_passes_s: float
    waits: dict[str, dict[str, float]]
    ranges: dict[str, Timed]
    collectives: dict[str, Timed]
    operations: dict[str, Timed]
    kernels: dict[str, Timed]

    def to_json(self, rank: int, first_step: int, last_step: int) -> str:
        """Return the summary as JSON text, with the rank and the recorded steps."""
        head = {"rank": rank, "first_step": first_step, "last_step": last_step}
        return json.dumps(head | dataclasses.asdict(self), indent=1)


def group_of(name: str) -> str:
    """Return a range's name without its numbers: ``forward mb=3 stage=1 chunk=0`` becomes ``forward``."""
    return NUMBER.sub("", name)


def summarize(events: Iterable[dict], window: str, main: int) -> Summary:
    """Return the summary of a trace's events.

    window: the name of the range around the whole recording, on the main thread.
    main: the operating system's id of the main thread.

    Raises ValueError if the trace has no range of that name.
    """
    events = list(events)
    # Sort the events by kind, and find the window.
    by_kind: dict[str, list[dict]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and "dur" in event:
            by_kind[event.get("cat", "")].append(event)
    annotated, operations = by_kind[RANGE], by_kind[OPERATION]
    ranges = [event for event in annotated if not COLLECTIVE.match(event["name"])]
    whole = next((_interval(event) for event in ranges if event["name"] == window), None)
    if whole is None:
        raise ValueError(f"the trace has no range {window!r} around it")
    # The events of each figure.
    on_main = [event for event in operations if event["tid"] == main]
    device = [event for kind in ON_DEVICE for event in by_kind[kind]]
    collectives = [event for event in (*annotated, *device) if COLLECTIVE.match(event["name"])]
    peaks = _peaks(events)
    passes = [event for event in ranges if event["tid"] == main and group_of(event["name"]).split()[-1] in PASSES]
    schedules = [event for event in ranges if event["tid"] == main and "passes that" in event["name"]]
    return Summary(
        window_s=(whole[1] - whole[0]) * US,
        num_events=len(events),
        main_idle_share=_idle_share(on_main, whole),
        device_idle_share=_idle_share(device, whole) if device else None,
        collectives_s=_busy_us(collectives, whole) * US,
        passes_s=_busy_us(schedules, whole) * US,
        in_passes_s=_busy_us(passes, whole) * US,
        waits=_waits(passes, [*operations, *by_kind["cuda_runtime"], *by_kind["cuda_driver"]], ranges),
        ranges=_timed(ranges, peaks),
        collectives=_timed(collectives, None),
        operations=_timed(operations, None),
        kernels=_timed(device, None),
    )


def _interval(event: dict) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _idle_share(events: Sequence[dict], window: Interval) -> float:
    return 1.0 - _busy_us(events, window) / max(window[1] - window[0], 1e-9)


def _busy_us(events: Sequence[dict], window: Interval) -> float:
    """Return the microseconds of the window in which at least one of the events runs."""
    busy, reached = 0.0, window[0]
    for start, end in sorted(map(_interval, events)):
        start, end = max(start, reached), min(end, window[1])
        if end > start:
            busy, reached = busy + end - start, end
    return busy


def _timed(events: Sequence[dict], peaks: _Peaks | None) -> dict[str, Timed]:
    """Return {name: Timed} (counts and seconds) of the events, the largest own time first.

    peaks: the allocated bytes over time; None if no allocation was recorded.
    """
    count, total, own, peak = Counter(), Counter(), Counter(), {}
    by_thread: dict[tuple, list[dict]] = defaultdict(list)
    for event in events:
        by_thread[event["pid"], event["tid"]].append(event)
    for members in by_thread.values():
        open_ones: list[tuple[float, str]] = []  # (end, name) of the events around the next event
        for event in sorted(members, key=lambda event: (event["ts"], -event["dur"])):
            name, (start, end) = group_of(event["name"]), _interval(event)
            while open_ones and open_ones[-1][0] <= start:
                open_ones.pop()
            if open_ones:
                own[open_ones[-1][1]] -= event["dur"]
            open_ones.append((end, name))
            count[name] += 1
            total[name] += event["dur"]
            own[name] += event["dur"]
            if peaks is not None:
                peak[name] = max(peak.get(name, 0), peaks.within(start, end))
    return {
        name: Timed(count=count[name], total_s=total[name] * US, own_s=own[name] * US, peak_bytes=peak.get(name))
        for name in sorted(count, key=lambda name: -own[name])
    }


class _Peaks:
    """Holds the number of allocated bytes at each moment at which it changed."""

    def __init__(self, changes: list[tuple[float, int]]) -> None:
        self._moments, self._bytes = [moment for moment, _ in changes], [total for _, total in changes]

    def within(self, start: float, end: float) -> int:
        """Return the most bytes allocated at once from ``start`` to ``end``, both in the trace's microseconds."""
        first, behind = bisect.bisect_left(self._moments, start), bisect.bisect_right(self._moments, end)
        return max(self._bytes[max(first - 1, 0) : behind], default=0)


def _peaks(events: Sequence[dict]) -> _Peaks | None:
    changes = [
        (event["ts"], event["args"]["Total Allocated"])
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
    ]
    return _Peaks(sorted(changes)) if changes else None


def _waits(passes: Sequence[dict], calls: Sequence[dict], ranges: Sequence[dict]) -> dict[str, dict[str, float]]:
    """Return {pass: {call's name: count per micro-batch}} of the calls in a pass that made the CPU wait for the device.

    Calls count on threads that run passes, and on threads without any range, such as autograd's,
    which may run a backward pass. On other threads, such as the packing thread, they do not count.
    """
    elsewhere = {event["tid"] for event in ranges} - {event["tid"] for event in passes}
    waiting = sorted((x["ts"], x["name"]) for x in calls if x["name"] in WAITS and x["tid"] not in elsewhere)
    moments = [moment for moment, _ in waiting]
    found: dict[str, Counter[str]] = defaultdict(Counter)
    number = Counter(group_of(event["name"]) for event in passes)
    for event in passes:
        start, end = _interval(event)
        first, behind = bisect.bisect_left(moments, start), bisect.bisect_right(moments, end)
        found[group_of(event["name"])].update(name for _, name in waiting[first:behind])
    return {
        name: {call: times / count for call, times in sorted(found[name].items())} for name, count in number.items()
    }
