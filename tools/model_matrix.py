"""Makes the table of families in docs/models.md: runs each family's proofs and says of each whether it passed.

    python tools/model_matrix.py --page docs/models.md          # make models

The rows are the families of the register, the columns those of model_proofs/columns.py. A cell counts the cases of the
column's tests that name the family; one that could not run, or has no case, says so and is never counted as passed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import pathlib
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from acceptance import FAILED, NOT_RUN, PASSED, machine  # noqa: E402

from megatron_rl.weights import families as families_room  # noqa: E402
from megatron_rl.weights.families.register import FAMILIES  # noqa: E402
from tools.model_proofs.columns import COLUMNS  # noqa: E402

BEGIN, END = "<!-- made by `make models`: begin -->", "<!-- made by `make models`: end -->"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/model_matrix.py --page docs/models.md --vllm-python .venv-vllm/bin/python",
    )
    parser.add_argument("--page", type=pathlib.Path, metavar="PATH", help="write the table there, between its markers")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only columns whose title contains it; others' cases are --json's"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="write the outcome of each case there")
    parser.add_argument(
        "--vllm-python", type=pathlib.Path, metavar="PATH", help="the python of an environment with vLLM"
    )
    parser.add_argument("--long", action="store_true", help="run the long cases too; vLLM's run always")
    parser.add_argument("--list", action="store_true", help="count the cases of each cell, run none, and stop")
    parser.add_argument(
        "--junit",
        type=pathlib.Path,
        nargs="+",
        metavar="PATH",
        help="run none: take the outcomes of earlier runs (pytest's --junitxml=PATH -o junit_family=xunit1)",
    )
    parser.add_argument("--note", default="", metavar="TEXT", help="added to the table's line of machine and date")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, metavar="S", help="seconds that pytest may take (default 3600)"
    )
    given = parser.parse_args(arguments)
    if not any(given.only in column.title for column in COLUMNS):
        parser.error(f"--only {given.only!r} is in no column's title; they are {[x.title for x in COLUMNS]}")
    if given.page and not given.list and BEGIN not in given.page.read_text(encoding="utf-8"):
        parser.error(f"--page {given.page} has no line '{BEGIN}', which the table follows")
    return given


def run(python: str, tests: list[str], given: argparse.Namespace, *, long: bool) -> tuple[dict[str, dict], str]:
    """Run pytest on the tests; return the cases by node id, and the reason where it did not end by itself.

    long: whether long cases run too.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = pathlib.Path(folder) / "found.json"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.model_proofs.outcomes"]
        command += ["--proofs", str(found), *(["--proofs-long"] if long else [])]
        command += ["--collect-only", "-q"] if given.list or given.junit else []
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
        output = subprocess.DEVNULL if given.list or given.junit else None
        process = subprocess.Popen([*command, *tests], cwd=ROOT, env=environment, stdout=output, start_new_session=True)
        try:
            code = process.wait(given.timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if code is None:
            return {}, f"pytest did not end in {given.timeout:g} s and was killed"
        if not found.exists():
            return {}, f"pytest ended with {code}"
        return json.loads(found.read_text()), ""


def outcomes_of(path: pathlib.Path) -> dict[str, tuple[str, str]]:
    """Return outcome and reason of each case of a report in JUnit's form (pytest's family xunit1), by node id."""
    found = {}
    for case in xml.etree.ElementTree.parse(path).iter("testcase"):
        outcome, reason = PASSED, ""
        for kind, name in (("failure", FAILED), ("error", FAILED), ("skipped", "skipped")):
            if (element := case.find(kind)) is not None:
                outcome, reason = name, element.get("message", "").split("\n")[0]
        found[f"{case.get('file')}::{case.get('name')}"] = outcome, reason
    return found


def take_outcomes(cases: dict[str, dict], reports: list[pathlib.Path]) -> None:
    """Give the collected cases the outcomes of earlier runs; one that no report names stays to run."""
    for path in reports:
        for name, (outcome, reason) in outcomes_of(path).items():
            if name in cases:
                cases[name] |= dict(outcome=outcome, reason=reason)


def continues(given: argparse.Namespace) -> bool:
    """Tell whether the columns that are not asked for come from an earlier call's --json."""
    return bool(given.only and given.json and given.json.exists())


def run_all(given: argparse.Namespace) -> tuple[dict[str, dict], dict[str, str]]:
    """Run the proofs of every column; return the cases, and the reason of each column that was not run."""
    cases, reasons = {}, {}
    if continues(given):
        kept = json.loads(given.json.read_text())
        cases, reasons = kept["cases"], kept["not_run"]
    for vllm in (False, True):
        columns = [x for x in COLUMNS if x.vllm is vllm and given.only in x.title]
        python = given.vllm_python if vllm and not (given.list or given.junit) else sys.executable
        why = "" if python else "no --vllm-python"
        if columns and python:
            tests = [test for column in columns for test in column.tests]
            found, why = run(str(python), tests, given, long=vllm or given.long)
            cases |= found
        reasons |= {column.title: why for column in columns}
    take_outcomes(cases, given.junit or [])
    return cases, {title: why for title, why in reasons.items() if why}


def cell(family: str, title: str, cases: dict[str, dict], reasons: dict[str, str]) -> str:
    """Return a cell's words."""
    own = [x for x in cases.values() if x["column"] == title and family in x["families"]]
    counts = {kind: sum(x["outcome"] == kind for x in own) for kind in (PASSED, FAILED, "skipped", "long", "collected")}
    ran = counts[PASSED] + counts[FAILED]
    if title in reasons:
        return f"{NOT_RUN}: {reasons[title]}"
    waiting = f"; {counts['collected']} to run" if counts["collected"] else ""
    if counts[FAILED]:
        return f"{FAILED}: {counts[FAILED]} of {ran}{waiting}"
    if counts[PASSED]:
        return f"{PASSED} ({counts[PASSED]}){waiting}"
    if counts["skipped"]:
        return f"{NOT_RUN}: " + next(x["reason"] for x in own if x["outcome"] == "skipped")
    if waiting:
        return NOT_RUN + waiting.replace(";", ":")
    return f"{NOT_RUN}: {counts['long']} long" if counts["long"] else f"{NOT_RUN}: no case"


def models_of(family: str) -> str:
    """Return the first line of the module that describes a family, which says its models and what its layers have."""
    for found in pkgutil.iter_modules(families_room.__path__):
        module = importlib.import_module(f"{families_room.__name__}.{found.name}")
        if found.name != "register" and any(x is FAMILIES[family] for x in vars(module).values()):
            return module.__doc__.split("\n")[0].rstrip(".").replace("``", "`")
    raise LookupError(f"no module of megatron_rl/weights/families holds {family}")


def table(cases: dict[str, dict], reasons: dict[str, str], host: dict, seconds: float | None, note: str) -> str:
    """Return the lines between the markers. seconds: that the proofs took; None for those of an earlier run."""
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    made = f"{datetime.date.today()}, {host['device']}, Python {host['python']}, {versions}"
    waiting = sum(x["outcome"] == "collected" for x in cases.values())
    note += f"{'; ' if note and waiting else ''}ended with {waiting} of {len(cases)} cases not run" if waiting else ""
    took = " --junit`" if seconds is None else f"`, {seconds / 60:.0f} min"
    lines = [
        f"`python tools/model_matrix.py{took}, {made}{'; ' if note else ''}{note}",
        "",
        f"| {' | '.join(['family', *(column.title for column in COLUMNS)])} |",
        f"|{'---|' * (len(COLUMNS) + 1)}",
    ]
    for family in FAMILIES:
        cells = [cell(family, column.title, cases, reasons) for column in COLUMNS]
        lines.append(f"| {' | '.join(x.replace('|', '/') for x in (models_of(family), *cells))} |")
    return "\n".join(lines)


def write(page: pathlib.Path, text: str) -> None:
    """Put the table between the page's markers."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    started = time.monotonic()
    before = (json.loads(given.json.read_text())["seconds"] or 0.0) if continues(given) else 0.0
    cases, reasons = run_all(given)
    seconds = None if given.junit else time.monotonic() - started + before
    text = table(cases, reasons, machine(), seconds, given.note)
    print(text)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"cases": cases, "not_run": reasons, "seconds": seconds}, indent=1) + "\n")
    if given.page and not given.list:
        write(given.page, text)
    failed = [name for name, x in cases.items() if x["outcome"] == FAILED]
    print("\n".join(["", *(f"failed: {name}: {cases[name]['reason']}" for name in failed)]))
    ended_early = any(why for title, why in reasons.items() if "--vllm-python" not in why)
    return 1 if failed or ended_early else 0


if __name__ == "__main__":
    sys.exit(main())
