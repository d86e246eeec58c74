"""Keeps one record per step in a folder, and copies what is worth having whole into one place.

A record names its machine, commit, command and date. A passed one of the same three is not measured again.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import tarfile
from collections.abc import Mapping, Sequence

from gpu_report_steps.parts import STEPS
from gpu_report_steps.report import markdown

ORDER = {step.name: i for i, step in enumerate(STEPS)}
UNKNOWN = "unknown"
KEYS = ("name", "commit", "date", "part", "machine", "command", "seconds", "outcome", "reason", "found")


def commit_of(tree: pathlib.Path) -> str:
    """Return the tree's commit: by git, with "+" where files differ from it, or as packing wrote it into COMMIT."""
    if (tree / ".git").exists():
        say = ["git", "-C", str(tree), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
        done = subprocess.run(say, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    if (tree / "COMMIT").exists():
        return (tree / "COMMIT").read_text().strip()
    return UNKNOWN


def load(out: pathlib.Path) -> list[dict]:
    """Return the records of the folder in the steps' order; those of steps that are no more come last."""
    found = [json.loads(path.read_text()) for path in sorted((out / "records").glob("*.json"))]
    return sorted(found, key=lambda x: ORDER.get(x["name"], len(ORDER)))


def measured(record: Mapping) -> bool:
    return record["outcome"] != "not run"


def keep(record: dict, out: pathlib.Path) -> None:
    """Write the record, unless it says that nothing was run where an earlier one says what was found."""
    path = path_of(record["name"], out)
    if not measured(record) and path.exists() and measured(json.loads(path.read_text())):
        return
    replace(path, json.dumps(record, indent=1) + "\n")


def take_in(earlier: pathlib.Path, out: pathlib.Path) -> int:
    """Put the records of an earlier report.json into the folder where they are newer; return how many."""
    count = 0
    for record in json.loads(earlier.read_text()):
        if lacking := [x for x in KEYS if x not in record]:
            raise SystemExit(f"gpu_report.py: {earlier} is no report.json of this tool: a record has no {lacking[0]!r}")
        path = path_of(record["name"], out)
        there = json.loads(path.read_text()) if path.exists() else None
        if there is None or (measured(record), record["date"]) > (measured(there), there["date"]):
            replace(path, json.dumps(record, indent=1) + "\n")
            count += 1
    return count


def passed_before(records: Sequence[Mapping], name: str, machine: Mapping, commit: str, command: str) -> bool:
    """Return whether this step has passed on such a machine, from this commit and by this command."""
    if commit == UNKNOWN or commit.endswith("+"):
        return False
    wanted = (name, "passed", machine["device"], commit, command)
    return any((x["name"], x["outcome"], x["machine"]["device"], x["commit"], x["command"]) == wanted for x in records)


def path_of(name: str, out: pathlib.Path) -> pathlib.Path:
    return out / "records" / f"{''.join(x if x.isalnum() else '_' for x in name)}.json"


def replace(path: pathlib.Path, text: str) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def write_report(out: pathlib.Path, copy_to: pathlib.Path | None) -> list[dict]:
    """Write report.json and report.md of all records; copy them and every log into one flat folder."""
    records = load(out)
    texts = {"report.json": json.dumps(records, indent=1) + "\n", "report.md": markdown(records)}
    for folder in (out, *([copy_to] if copy_to else [])):
        for name, text in texts.items():
            replace(folder / name, text)
    if copy_to:
        pack_logs(out, copy_to / "logs.tar.gz")
    return records


def pack_logs(out: pathlib.Path, target: pathlib.Path) -> None:
    part = target.with_name(target.name + ".part")
    with tarfile.open(part, "w:gz", compresslevel=1) as archive:
        for pattern, suffix in (("*/log.txt", "log"), ("*/found.json", "json")):
            for path in sorted((out / "steps").glob(pattern)):
                archive.add(path, f"{path.parent.name}.{suffix}")
    os.replace(part, target)
