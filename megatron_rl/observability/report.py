"""The report of a run: one HTML file that holds the page of ``megatron-rl watch`` and the run's data.

It needs no network. Write it with ``python -m megatron_rl.observability.report RUN_DIR``.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import json
import math
import pathlib
import re
import sys
import time
from collections.abc import Sequence

from megatron_rl.distributed.atomic_file import replace_text
from megatron_rl.errors import ConfigError
from megatron_rl.json_text import read_bytes
from megatron_rl.observability.completions import FILE_NAME, Completion, plain, read_completions, to_row
from megatron_rl.observability.metrics import Row, read_metrics
from megatron_rl.observability.run_status import RunState, read_status
from megatron_rl.observability.summary import SUPERVISED, TITLES

PAGE = pathlib.Path(__file__).resolve().parent / "page"
PHASES = {"titles": TITLES, "supervised": sorted(SUPERVISED)}  # in the form that the page reads
SHOWN = 8  # completions of one rollout or evaluation in a report
_STYLE = re.compile(r'<link rel="stylesheet" href="([a-z]+\.css)">')
_SCRIPTS = re.compile(r'(?:<script src="[a-z]+\.js"></script>\n)+')


def completion_of_page(completion: Completion) -> dict[str, object]:
    """Return a completion as a JSON-able dict for the page; numbers that JSON cannot hold are None."""
    rewards = {name: plain(value) for name, value in completion.rewards.items()}
    numbers = {"reward": plain(completion.reward), "advantage": plain(completion.advantage)}
    return to_row(completion) | numbers | {"rewards": rewards}


def _first_and_last(path: pathlib.Path) -> list[dict[str, object]]:
    """Return completions as dicts: for each source, at most SHOWN of its first step and as many of its last.

    A source is training or an evaluation. The field ``recorded`` is added: the number of
    completions recorded at that step. The file is read once, and completions of other steps are not
    kept in memory.
    """
    batches_of: dict[str, list[list[Completion]]] = {}
    for completion in read_completions(path) if path.exists() else ():
        batches = batches_of.setdefault(completion.source, [])
        if batches and batches[-1][0].step == completion.step:
            batches[-1].append(completion)
        else:
            batches_of[completion.source] = [*batches[:1], [completion]]
    return [
        completion_of_page(completion) | {"recorded": len(batch)}
        for batches in batches_of.values()
        for batch in batches
        for completion in batch[:SHOWN]
    ]


def _cell(value: object) -> object:
    """Return a metrics row's value for the page: floats are rounded to six digits; NaN or infinity becomes a text."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def packed_rows(rows: Sequence[Row]) -> str:
    """Return the rows of metrics as base64 text: gzipped JSON with one list for each metric; "" without rows.

    10,000 steps take about 1 MB in this form. No step is left out, since the page sums over all of
    them.

    Example: rows ``{"step": 1}`` and ``{"step": 2, "a/b": 0.5}`` are the columns ``[1, 2]`` and
    ``[null, 0.5]``.
    """
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [[_cell(row.get(name)) for row in rows] for name in names]
    text = json.dumps({"names": names, "columns": columns}, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("ascii"), mtime=0)).decode("ascii")


def _state(folder: pathlib.Path) -> dict[str, object]:
    """Return the run's state for the page, read from its status.json.

    If status.json does not say that the run has ended, the state is called "written", and its time is
    the report's.
    """
    try:
        status = read_status(folder)
    except ConfigError as error:
        return {"name": "written", "total_steps": None, "at": time.time(), "fault": str(error)}
    if status is None or status.state is RunState.RUNNING:
        total = None if status is None else status.total_steps
        return {"name": "written", "total_steps": total, "at": time.time(), "fault": None}
    return {"name": status.state.value, "total_steps": status.total_steps, "at": status.at, "fault": None}


def _page(report: dict[str, object]) -> str:
    """Return the HTML page with its styles, its scripts and ``report`` inside.

    Its content security policy lets it run or load nothing else.
    """
    html = (PAGE / "watch.html").read_text(encoding="utf-8")

    def read(name: str) -> str:
        return (PAGE / name).read_text(encoding="utf-8")

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    style = read(_STYLE.search(html)[1])
    tags = _SCRIPTS.search(html)[0]
    script = "".join(map(read, re.findall(r'src="([a-z]+\.js)"', tags)))
    policy = f"default-src 'none'; script-src {hashed(script)}; style-src {hashed(style)}; base-uri 'none'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    # No text of the run can end the element that holds it: "<" is escaped.
    data = json.dumps(report, separators=(",", ":"), allow_nan=False).replace("<", r"\u003c")
    inlined = f'<script type="application/json" id="report">{data}</script>\n<script>{script}</script>\n'
    return _SCRIPTS.sub(lambda _: inlined, _STYLE.sub(lambda _: head, html))


def write_report(metrics_path: str | pathlib.Path, config_yaml: str, out_path: str | pathlib.Path) -> None:
    """Write a run's report as one HTML file to ``out_path``.

    The page's title is the name of the folder that holds ``metrics_path``. Completions and the
    run's status are read from that folder, if they are there.

    config_yaml: the text of the run's configuration, which the page shows.

    Raises FileNotFoundError if there are no metrics, ValueError ``<file>:<line>: ...`` for a
    malformed line.
    """
    folder = pathlib.Path(metrics_path).parent
    rows = packed_rows(read_metrics(metrics_path))
    name, state = folder.resolve().name, _state(folder)
    facts = {"name": name, "state": state, "phases": PHASES, "config": config_yaml, "rollouts": []}
    page = _page({"facts": facts, "completions": _first_and_last(folder / FILE_NAME), "rows": rows})
    replace_text(pathlib.Path(out_path), page)  # a browser that reloads during a run never sees half a page


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
