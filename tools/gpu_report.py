"""Runs cells and benchmarks on one GPU in parts of ten minutes, most valuable first, and writes one report of all.

    python tools/gpu_report.py --carry carried                    # where there is a network: what travels
    python tools/gpu_report.py --wheels carried --part 1          # on the machine with the GPU

Nothing is needed but Python, torch with CUDA, transformers, triton and what --carry makes. In a part, the steps that
compare numbers run side by side, then those that measure time alone. Each has a time limit of its own and a process,
which some share; one that fails, hangs or dies is recorded and the next one starts. --out gets a record per step as it
ends; what has passed on such a machine from this commit is not run again. Without a GPU, or with --cpu, steps take
small shapes.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

TOOLS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS))

from gpu_report_steps import carry, records, sites, table  # noqa: E402
from gpu_report_steps.parts import EXTRAS, PARTS, STEPS  # noqa: E402
from gpu_report_steps.report import headline  # noqa: E402
from gpu_report_steps.running import Runner, describe_machine  # noqa: E402

PART_MINUTES = 9.5  # half a minute below ten, for the start and the end of a call


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/gpu_report.py --wheels carried --part 1 --copy-to results",
    )
    parser.add_argument(
        "--part", type=int, nargs="+", choices=sorted(PARTS), default=sorted(PARTS), help="default: all"
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="SUBSTRING", help="only steps whose name contains one of these"
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="of this call (default: 9.5 for each part)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/gpu-report"), metavar="FOLDER")
    parser.add_argument(
        "--wheels", type=pathlib.Path, metavar="FOLDER", help="what --carry made: install it into --out"
    )
    parser.add_argument("--copy-to", type=pathlib.Path, metavar="FOLDER", help="report and logs, after each step")
    parser.add_argument("--again", action="store_true", help="also run what has a passed record")
    parser.add_argument(
        "--earlier", type=pathlib.Path, nargs="+", default=[], metavar="FILE", help="report.json of earlier calls"
    )
    parser.add_argument("--table", type=pathlib.Path, metavar="PAGE", help="write --out's records into it and stop")
    parser.add_argument("--cpu", action="store_true", help="small shapes on the CPU, also where there is a GPU")
    parser.add_argument("--list", action="store_true", help="name the steps, their limits and commands, and stop")
    carry.add_arguments(parser)
    given = parser.parse_args(arguments)
    given.part = sorted(set(given.part))
    if given.minutes is None:
        given.minutes = PART_MINUTES * len(given.part)
    if given.minutes <= 0:
        parser.error(f"--minutes {given.minutes:g} must be above 0")
    if given.wheels and not any((given.wheels / x).is_dir() for x in (*sites.INSTALLED, *sites.HALVES)):
        parser.error(f"--wheels {given.wheels} holds none of {', '.join(sites.INSTALLED)}; --carry makes such a folder")
    for path in given.earlier:
        if not path.is_file():
            parser.error(f"--earlier {path} is no file; name the report.json of an earlier call")
    given.steps = [x for x in STEPS if x.part in given.part and any(word in x.name for word in given.only)]
    if not given.steps:
        parser.error(f"--only {' '.join(given.only)} names no step of the parts {given.part}; --list names them all")
    carry.check(given, parser)
    return given


def show_steps(given: argparse.Namespace) -> None:
    for step in given.steps:
        how = f"beside others, {step.cores} cores" if step.cores else "alone"
        needs = f"; needs {EXTRAS[step.carried]}" if step.carried else ""
        print(f"{step.part}  {step.name:<34} {step.limit_s:4.0f} s  {how}{needs}: {step.measures}\n   {step.command}")


def say(record: dict) -> None:
    says = record["reason"] or "; ".join(headline(record["found"]))
    print(
        f"{record['outcome']:>9}  {record['part']} {record['name']:<34} {record['seconds']:6.1f} s  {says}"[:300],
        flush=True,
    )


def run_parts(given: argparse.Namespace, runner: Runner) -> set[str]:
    """Run what is due of each part, and return the names of the steps that did not pass."""
    failed: set[str] = set()

    def keep(record: dict) -> None:
        say(record)
        records.keep(record, given.out)
        records.write_report(given.out, given.copy_to)
        if record["outcome"] not in ("passed", "not run"):
            failed.add(record["name"])

    for part in given.part:
        there, due = records.load(given.out), []
        for step in (x for x in given.steps if x.part == part):
            known = records.passed_before(there, step.name, runner.machine, runner.commit, runner.typed(step))
            if known and not given.again:
                print(f"   passed  {part} {step.name:<34} before, from this commit on such a machine", flush=True)
            else:
                due.append(step)
        runner.run_part(due, keep)
    return failed


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    if given.list:
        show_steps(given)
        return 0
    if given.carry:
        return carry.make(given)
    began = time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    for path in given.earlier:
        print(f"{records.take_in(path, given.out)} records of {path} taken in")
    if given.table:
        table.write_into(given.table, records.write_report(given.out, given.copy_to))
        return 0
    if given.wheels:
        came = sites.install(given.wheels, given.out)
        print(f"installed {', '.join(came) or 'nothing new'} in {time.monotonic() - began:.1f} s", flush=True)
    commit, machine = records.commit_of(TOOLS.parent), describe_machine(given.out, cpu=given.cpu)
    print(f"{machine['device']}, commit {commit}; {len(given.steps)} steps, {given.minutes:g} minutes", flush=True)
    ends_at = began + 60 * given.minutes
    runner = Runner(out=given.out.resolve(), machine=machine, commit=commit, ends_at=ends_at, cpu=given.cpu)
    failed = run_parts(given, runner)
    records.write_report(given.out, given.copy_to)
    print(f"written: {given.out / 'report.md'}, {given.out / 'report.json'}; {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
