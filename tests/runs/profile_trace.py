"""Reads the traces of a profiled run by naive loops: ranges, what lies within them, and sums over their events."""

import gzip
import json
import pathlib
from collections import Counter, defaultdict
from dataclasses import dataclass

SLACK_US = 0.01  # a moment is a float of some 5e12 microseconds, which rounds to 1e-3
OURS = ("profiled", "rollout", "reward", "logprob", "plan", "update", "weight_sync", "generate", "score", "send",
        "checkpoint", "export", "eval", "critic", "passes", "forward", "loss", "backward", "pack", "reduction",
        "optimizer", "ghost", "held")


@dataclass(frozen=True)
class Span:
    """Holds one range of a trace, in microseconds."""

    name: str
    thread: int
    start: float
    end: float

    @property
    def kind(self) -> str:
        return self.name.split(" mb=")[0].split(" step=")[0]

    def holds(self, other: "Span") -> bool:
        return self.start - SLACK_US <= other.start and other.end <= self.end + SLACK_US

    def apart_from(self, other: "Span") -> bool:
        return other.start >= self.end - SLACK_US or self.start >= other.end - SLACK_US


class Trace:
    """Holds one trace file and its summary."""

    def __init__(self, folder: pathlib.Path, rank: int, first: int) -> None:
        name = folder / "profile" / f"rank{rank}.{first}"
        with gzip.open(f"{name}.pt.trace.json.gz", "rt", encoding="utf-8") as file:
            self.events = json.load(file)["traceEvents"]
        self.summary = json.loads(pathlib.Path(f"{name}.summary.json").read_text(encoding="utf-8"))
        self.complete = [event for event in self.events if event["ph"] == "X"]
        spans = [Span(x["name"], x["tid"], x["ts"], x["ts"] + x["dur"]) for x in self.of("user_annotation")]
        self.ranges = [span for span in spans if not span.name.startswith("gloo:")]
        self.collectives = [span for span in spans if span.name.startswith("gloo:")]
        self.threads = {x["tid"]: x["args"]["name"] for x in self.events if x["name"] == "thread_name"}
        (self.whole,) = self.named("profiled")

    def of(self, category: str) -> list[dict]:
        return [event for event in self.complete if event.get("cat") == category]

    def named(self, start: str) -> list[Span]:
        return [span for span in self.ranges if span.name.startswith(start)]

    def within(self, outer: Span, kind: str) -> list[Span]:
        return [span for span in self.ranges if span.kind == kind and outer.holds(span)]


def own_seconds(spans: list[Span]) -> Counter:
    """Return by kind the seconds of spans less those of the spans that lie directly in them, each found by search."""
    own = Counter()
    for span in spans:
        own[span.kind] += (span.end - span.start) / 1e6
        around = [x for x in spans if x is not span and x.thread == span.thread and x.holds(span)]
        if around:
            own[min(around, key=lambda x: x.end - x.start).kind] -= (span.end - span.start) / 1e6
    return own


def busy_seconds(spans: list[tuple[float, float]], whole: Span) -> float:
    """Return the seconds of the whole in which a span is open, by counting up and down over all moments."""
    changes = sorted([(max(start, whole.start), 1) for start, end in spans if end > whole.start and start < whole.end]
                     + [(min(end, whole.end), -1) for start, end in spans if end > whole.start and start < whole.end])
    busy, depth, since = 0.0, 0, 0.0
    for moment, change in changes:
        busy += (moment - since) * (depth > 0)
        depth, since = depth + change, moment
    return busy / 1e6


def outermost_seconds(events: list[dict]) -> float:
    """Return the seconds of the events that lie in no other one of their thread."""
    total, ends = 0.0, defaultdict(float)
    for event in sorted(events, key=lambda x: (x["ts"], -x["dur"])):
        if event["ts"] >= ends[event["tid"]]:
            total, ends[event["tid"]] = total + event["dur"], event["ts"] + event["dur"]
    return total / 1e6
