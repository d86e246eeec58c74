"""Measures the processor seconds of each test: its lane's, and those of all processes that the lane has started.

    make test PYTEST_ARGS="-p tests.costs --costs runs/costs"        # writes a file of lines for each lane
    python -m tests.costs runs/costs                                 # by room; --by file or --by test

A second of wall time on a loaded host says little; user and system seconds are nearly the same on any. What a lane
spends before its first test (imports, collection) and after its last stands under the room "(start and end)".
"""

import argparse
import atexit
import collections
import json
import os
import pathlib
from collections.abc import Iterator

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
OUTSIDE = "(start and end)"


def readings(root: int) -> dict[int, tuple[float, float]]:
    """Return the seconds of ``root`` and of each descendant, and those of the children that it has waited for."""
    stats, children = {}, collections.defaultdict(list)
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile; its parent counts it once it has waited for it
        own, waited = (sum(map(int, fields[i : i + 2])) / TICKS for i in (11, 13))
        stats[int(path.parent.name)] = own, waited
        children[int(fields[1])].append(int(path.parent.name))
    found, left = {}, [root]
    while left:
        each = left.pop()
        left += children[each]
        if each in stats:
            found[each] = stats[each]
    return found


def spent_between(before: dict[int, tuple[float, float]], after: dict[int, tuple[float, float]]) -> float:
    """Return the seconds spent between two readings.

    A process that is gone stands in its parent's second number now, with what the first reading had of it already.
    Example: a child that had 2 s ends after 3 s: 3 − 2 = 1. One that nobody waited for takes its last second with it.
    """
    own = sum(after[pid][0] - before.get(pid, (0.0, 0.0))[0] for pid in after)
    waited = sum(after[pid][1] - before.get(pid, (0.0, 0.0))[1] for pid in after)
    gone = sum(sum(before[pid]) for pid in before.keys() - after.keys())
    return own + max(0.0, waited - gone)


class Costs:
    """Writes a line for each test of this lane."""

    def __init__(self, folder: pathlib.Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"{os.getpid()}.jsonl", "w")  # noqa: SIM115
        self._last: dict[int, tuple[float, float]] = {}
        atexit.register(self._close)

    def _spent(self) -> float:
        now = readings(os.getpid())
        spent, self._last = spent_between(self._last, now), now
        return spent

    def _write(self, name: str, seconds: float) -> None:
        self._file.write(json.dumps({"test": name, "seconds": round(seconds, 3)}) + "\n")
        self._file.flush()

    def _close(self) -> None:
        self._write(OUTSIDE, self._spent())
        self._file.close()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._write(OUTSIDE, self._spent())
        result = yield
        self._write(item.nodeid, self._spent())
        return result


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=pathlib.Path, help="folder for the processor seconds of each test")


def pytest_configure(config: pytest.Config) -> None:
    lanes_elsewhere = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if (folder := config.getoption("--costs")) and not lanes_elsewhere:
        config.pluginmanager.register(Costs(folder.absolute()))


def place(test: str, by: str) -> str:
    """Return the test's name itself, its file, or its room: the folder below tests/, two of them in unit/."""
    file = test.partition("::")[0]
    if by == "test" or test == OUTSIDE:
        return test
    if by == "file":
        return file
    folders = pathlib.PurePath(file).parts[1:-1]
    return "/".join(folders[: 2 if folders[:1] == ("unit",) else 1]) or "tests"


def table(folder: pathlib.Path, by: str) -> list[tuple[str, int, float]]:
    """Return (place, tests, processor seconds) of the files in ``folder``, the costliest first."""
    counts, seconds = collections.Counter(), collections.Counter()
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            found = json.loads(line)
            name = place(found["test"], by)
            counts[name] += found["test"] != OUTSIDE
            seconds[name] += found["seconds"]
    return [(name, counts[name], cost) for name, cost in seconds.most_common()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Print processor seconds; example: python -m tests.costs runs/costs")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--by", choices=("room", "file", "test"), default="room")
    parser.add_argument("--most", type=int, default=1000, help="rows to print")
    asked = parser.parse_args()
    rows = table(asked.folder, asked.by)
    print(f"{sum(row[1] for row in rows)} tests, {sum(row[2] for row in rows) / 60:.1f} processor-minutes")
    for name, count, cost in rows[: asked.most]:
        print(f"{cost:9.1f} s {count:6d}  {name}")


if __name__ == "__main__":
    main()
