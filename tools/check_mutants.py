"""Plants one-line faults, one at a time, in a copy of this tree, and checks that the tests find each of them.

    python tools/check_mutants.py                                  # all of them, one row each
    python tools/check_mutants.py --only gspo-single-token --whole # one; all of `make test` too if its own tests pass

A fault that no test sees is a survivor. The faults stand in mutants/*.py, each with the tests that should fail. Those
tests must pass without a fault first, or a broken test would count as a kill. Nothing in this tree is changed.

Exit codes: 0 all killed; 1 a fault survived, its tests did not end in a failure (they were not found, or ran too long),
or the tree lacks its line; 2 nothing can be judged, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from mutants.boundary import BOUNDARY
from mutants.doors import DOORS
from mutants.newer_models import NEWER_MODELS
from mutants.newer_numbers import NEWER_NUMBERS
from mutants.newer_rollouts import NEWER_ROLLOUTS
from mutants.numbers import NUMBERS
from mutants.plans import PLANS
from mutants.ranks import RANKS
from mutants.rollouts import ROLLOUTS
from mutants.table import Mutant, read

ROOT = pathlib.Path(__file__).resolve().parents[1]
MUTANTS = (*NUMBERS, *PLANS, *RANKS, *ROLLOUTS, *NEWER_NUMBERS, *NEWER_ROLLOUTS, *NEWER_MODELS, *BOUNDARY, *DOORS)
MARKS = "not long and not vllm"  # those of `make test`
KILLED, SURVIVED, UNCLEAR = "KILLED", "SURVIVED", "UNCLEAR"
WHOLE_TIMEOUT_S = 3600.0
EXIT_SURVIVED, EXIT_UNUSABLE = 1, 2


class Unusable(RuntimeError):
    """Says why no mutant can be judged here."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Holds the end of one pytest run.

    code: pytest's exit code, None if it ran too long.
    failed: node ids of the tests that failed.
    tail: the last lines of the output.
    """

    code: int | None
    failed: tuple[str, ...]
    seconds: float
    tail: str


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/check_mutants.py --only gspo-single-token plan-cap-one-too-large",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="these mutants alone (default: all; --list names them)"
    )
    parser.add_argument("--list", action="store_true", help="name the mutants and run nothing")
    parser.add_argument(
        "--whole", action="store_true", help="run the whole of `make test` where a mutant's own tests pass"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds that a mutant's tests may take (default 300)"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write every row there")
    parser.add_argument("--markdown", type=pathlib.Path, metavar="FILE", help="also write the table there")
    return parser.parse_args(arguments)


def chosen(mutants: Sequence[Mutant], only: Sequence[str] | None) -> list[Mutant]:
    known = {mutant.name: mutant for mutant in mutants}
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise Unusable(f"--only {' '.join(unknown)} names no mutant; --list names them all")
    return [known[name] for name in only] if only else list(mutants)


def copy_tree(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Copy the tracked files from the working tree, with their uncommitted changes."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unusable(f"git ls-files fails here, and the copy is made of what it lists: {done.stderr.strip()}")
    for name in filter(None, done.stdout.split("\0")):
        if (root / name).is_file():  # one that was removed and not committed is still listed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)


@contextlib.contextmanager
def planted(folder: pathlib.Path, mutant: Mutant) -> Iterator[None]:
    """Plant the fault in the copy while the block runs."""
    path, text = folder / mutant.file, read(folder, mutant)
    path.write_text(mutant.planted(text), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def run_tests(folder: pathlib.Path, tests: Sequence[str], timeout_s: float, *, stop_at_first: bool = True) -> Outcome:
    command = [
        sys.executable,
        "-m",
        "pytest",
        *tests,
        "-q",
        "-rfE",
        "--tb=no",
        "-m",
        MARKS,
        "-p",
        "no:cacheprovider",
        "--rootdir=.",
    ]
    command += ["-x"] if stop_at_first else []
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "200",
    }
    # Bytecode is cached by a file's size and the second of its change: the last fault's bytecode could run for a new
    # fault of the same length.
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
        output.seek(0)
        text = output.read()
    failed = re.findall(r"^FAILED (.+?)(?: - .*)?$", text, flags=re.MULTILINE)
    return Outcome(
        code=code,
        failed=tuple(failed),
        seconds=time.monotonic() - started,
        tail="\n".join(text.strip().splitlines()[-15:]),
    )


def end(process: subprocess.Popen, grace_s: float = 30.0) -> None:
    """Interrupt pytest first, so that its fixtures end the workers that they started."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    if process.poll() is None:
        process.kill()
        process.wait()


def require_sound(folder: pathlib.Path, mutants: Sequence[Mutant], timeout_s: float) -> float:
    """Run every named test once, without a fault; return the seconds.

    Raises Unusable if one does not pass, or is not run.
    """
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    if absent := sorted(set(tests) - of_make_test(folder, tests)):
        raise Unusable(f"`make test` runs none of {', '.join(absent)}; name tests that it runs, without `long`")
    outcome = run_tests(folder, tests, timeout_s * len(tests), stop_at_first=False)
    if outcome.code != 0:
        raise Unusable(f"the tests named do not all pass without a fault ({describe(outcome)}):\n{outcome.tail}")
    return outcome.seconds


def of_make_test(folder: pathlib.Path, tests: Sequence[str]) -> set[str]:
    """Return those of the named tests, each with its parameters or without, of which `make test` runs a case."""
    files = sorted({test.partition("::")[0] for test in tests})
    command = [
        sys.executable,
        "-m",
        "pytest",
        *files,
        "--collect-only",
        "-q",
        "-m",
        MARKS,
        "-p",
        "no:cacheprovider",
        "--rootdir=.",
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    cases = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not cases:
        raise Unusable(f"the tests named cannot be collected: {(done.stdout + done.stderr)[-2000:]}")
    return {test for test in tests if any(case == test or case.startswith((f"{test}[", f"{test}::")) for case in cases)}


def describe(outcome: Outcome) -> str:
    return f"no end in {outcome.seconds:.0f} s" if outcome.code is None else f"pytest's exit code {outcome.code}"


def judge(outcome: Outcome, *, whole: bool = False) -> dict:
    """Count only the failure of a test as a kill.

    An error of collection, of a fixture or of the command line says nothing about the fault.
    """
    if outcome.code == 1 and outcome.failed:
        return {"status": KILLED, "by": outcome.failed[0], "whole": whole}
    if outcome.code == 0:
        return {"status": SURVIVED, "by": "", "whole": whole}
    return {"status": UNCLEAR, "by": describe(outcome), "whole": whole, "tail": outcome.tail}


def check(mutant: Mutant, folder: pathlib.Path, given: argparse.Namespace) -> dict:
    (number,) = mutant.places(read(folder, mutant))
    with planted(folder, mutant):
        outcome = run_tests(folder, mutant.tests, given.timeout)
        judged, seconds = judge(outcome), outcome.seconds
        if judged["status"] == SURVIVED and given.whole:
            outcome = run_tests(folder, ["tests"], WHOLE_TIMEOUT_S)
            judged, seconds = judge(outcome, whole=True), seconds + outcome.seconds
    return {
        **dataclasses.asdict(mutant),
        "area": mutant.area,
        "line_number": number,
        "seconds": round(seconds, 1),
        **judged,
    }


def row_text(row: dict) -> str:
    ends = {
        KILLED: f"by {row['by']}{' (of the whole suite)' if row['whole'] else ''}",
        SURVIVED: "",
        UNCLEAR: row["by"],
    }
    return (
        f"{row['name']:<34} {row['file']}:{row['line_number']:<5} {row['status']} {ends[row['status']]} in "
        f"{row['seconds']:.0f} s"
    )


def machine() -> str:
    """Describe the machine without its name; no GPU is visible to the tests."""
    return f"{os.cpu_count()}-core {platform.machine().replace('_', '-')} host, no GPU, {datetime.date.today()}"


def command_line(given: argparse.Namespace) -> str:
    """Return the command as typed, with the tree's own page as the target of --markdown."""
    words = [
        "python tools/check_mutants.py",
        *(["--only", *given.only] if given.only else []),
        *(["--whole"] if given.whole else []),
    ]
    words += [f"--timeout {given.timeout:g}"] if given.timeout != 300 else []
    return " ".join([*words, "--markdown docs/evidence/mutants.md"])


def markdown(rows: Sequence[dict], seconds: float, given: argparse.Namespace) -> str:
    killed = sum(row["status"] == KILLED for row in rows)
    lines = [
        "# Planted faults",
        "",
        f"**{killed} of {len(rows)} killed**, in {seconds / 60:.0f} minutes: `{command_line(given)}`, {machine()}.",
        "",
        "Each row is one line of the package as a tired engineer might have written it: nothing crashes at the start, "
        "and what comes out is wrong. The tests of `make test` must see it. `tools/check_mutants.py` works in a "
        "copy of the tree, in which the tests named have passed first. It plants one fault at a time. Only the "
        "failure of a test counts as a kill. The lines themselves are in `tools/mutants/*.py`. It is no part of CI.",
        "",
        "| name | file | fault | killed by |",
        "|---|---|---|---|",
    ]
    for row in rows:
        # Without its parameters: if a test's cases come from a set, another of them comes first in each run.
        test = row["by"].removeprefix("tests/").partition("[")[0]
        by = f"`{test}`" if row["status"] == KILLED else f"**{row['status'].lower()}** {row['by']}".strip()
        cells = (f"`{row['name']}`", f"`{row['file'].removeprefix('megatron_rl/')}`", row["fault"], by)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def run_all(mutants: Sequence[Mutant], root: pathlib.Path, given: argparse.Namespace) -> list[dict]:
    """Judge each mutant in one copy, in order; raises Unusable, or LookupError for a line that the tree lacks."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="check_mutants.") as work:
        folder = pathlib.Path(work).resolve()
        copy_tree(root, folder)
        for mutant in mutants:
            mutant.planted(read(folder, mutant))  # before any test runs
        sound_s = require_sound(folder, mutants, given.timeout)
        print(f"without a fault the tests named pass, in {sound_s:.0f} s", flush=True)
        for mutant in mutants:
            rows.append(check(mutant, folder, given))
            print(row_text(rows[-1]), flush=True)
            if rows[-1]["status"] == UNCLEAR:
                print(rows[-1]["tail"], file=sys.stderr, flush=True)
    return rows


def main(
    arguments: Sequence[str] | None = None, *, mutants: Sequence[Mutant] = MUTANTS, root: pathlib.Path = ROOT
) -> int:
    given = parse(arguments)
    started = time.monotonic()
    try:
        mutants = chosen(mutants, given.only)
        if given.list:
            print("\n".join(f"{mutant.name:<34} {mutant.file:<36} {mutant.fault}" for mutant in mutants))
            return 0
        rows = run_all(mutants, root, given)
    except Unusable as error:
        print(f"check_mutants: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except LookupError as error:
        print(f"check_mutants: {error}", file=sys.stderr)
        return EXIT_SURVIVED
    seconds = time.monotonic() - started
    killed = sum(row["status"] == KILLED for row in rows)
    print(f"{killed} of {len(rows)} killed; {machine()}; {seconds:.0f} s")
    if given.json:
        given.json.write_text(
            json.dumps({"machine": machine(), "seconds": round(seconds, 1), "mutants": rows}, indent=1) + "\n"
        )
    if given.markdown:
        given.markdown.write_text(markdown(rows, seconds, given))
    return 0 if killed == len(rows) else EXIT_SURVIVED


if __name__ == "__main__":
    sys.exit(main())
