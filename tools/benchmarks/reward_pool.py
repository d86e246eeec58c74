"""Measures reward workers under faults: samples that raise, hang or kill their process among thousands that do not.

    python tools/benchmarks/reward_pool.py --samples 10000 --workers 4 --deadline 1

Every answer is compared with the value computed here, at its index, and every error with the fault that its sample was
    told to make: the tool ends with status 1 and names the samples if an innocent one carries an error, a guilty one
    carries none, or a value is not its own.

A hanging sample holds a worker until the deadline, and once more alone if its group has other samples. Nothing is
    faster than the deadlines alone, one per hanging sample over the workers: that is the ideal. The table shows beside
    it the deadlines that were waited for. A hanging sample's own seconds run from its first call to the kill that ends
    its last one (both by the wall clock).

With --data FOLDER, GSM8K's (test.jsonl), math_verify then judges right and wrong answers with 0 and with --workers
workers, in turn, on samples that neither has seen; the medians of --repeats turns count.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from reward_functions import value_of  # noqa: E402

from megatron_rl.reward.function import Outcome  # noqa: E402
from megatron_rl.types import Prompt, Rollout  # noqa: E402

FUNCTION = "reward_functions:misbehave"
POOL_LOG = "megatron_rl.reward.pool"  # logs every worker that is killed, with its process number
# The words in the error of a sample, by the fault that it was told to make; an answer has no error.
SAID = {"raise": "RuntimeError: no reward for", "hang": "reward.deadline_s", "kill": "it killed its worker twice"}
SHOWN = 5  # faults named, of each run


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="example: python tools/benchmarks/reward_pool.py --samples 10000 --workers 4 --deadline 1 "
        "--data gsm8k --json runs/reward.json",
    )
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--group-size", type=int, default=8, help="samples of a prompt, which go to a worker together")
    parser.add_argument("--workers", type=int, default=4, help="reward.num_workers")
    parser.add_argument("--deadline", type=float, default=1.0, help="reward.deadline_s")
    parser.add_argument("--raising", type=float, default=0.01, help="share of samples whose function raises")
    parser.add_argument("--hanging", type=float, default=0.01, help="share of samples whose function never returns")
    parser.add_argument(
        "--killing", type=float, default=0.01, help="share of samples that kill the process that scores them"
    )
    parser.add_argument(
        "--data", type=pathlib.Path, help="a folder with GSM8K's test.jsonl: math_verify with and without workers"
    )
    parser.add_argument("--math-samples", type=int, default=4000, help="samples that math_verify judges in each turn")
    parser.add_argument("--repeats", type=int, default=3, help="turns of math_verify, after one to warm up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, help="also write what is printed there")
    given = parser.parse_args(arguments)
    for name in ("samples", "group_size", "workers", "math_samples", "repeats"):
        if vars(given)[name] < 1:
            parser.error(f"--{name.replace('_', '-')} {vars(given)[name]} must be at least 1")
    if given.deadline <= 0:
        parser.error(f"--deadline {given.deadline} must be above 0 seconds")
    shares = (given.raising, given.hanging, given.killing)
    if min(shares) < 0 or sum(shares) > 1:
        parser.error(
            f"--raising, --hanging and --killing are {shares}; each must be at least 0 and all together at most 1"
        )
    if given.data and not (given.data / "test.jsonl").is_file():
        parser.error(f"--data {given.data} has no test.jsonl; give the folder of GSM8K's files, or leave --data out")
    return given


# ---- faults ---------------------------------------------------------------------------------------------------------


def draw_kinds(given: argparse.Namespace) -> list[str]:
    """Draw each sample's kind, answer, raise, hang or kill, in the given shares, in random order."""
    counts = {"raise": given.raising, "hang": given.hanging, "kill": given.killing}
    guilty = [kind for kind, share in counts.items() for _ in range(round(share * given.samples))][: given.samples]
    kinds = np.array(guilty + ["answer"] * (given.samples - len(guilty)))
    return np.random.default_rng(given.seed).permutation(kinds).tolist()


def make_rollouts(kinds: Sequence[str], group_size: int, journal: str) -> list[Rollout]:
    rollouts = []
    for number, kind in enumerate(kinds):
        group, index = divmod(number, group_size)
        if index == 0:
            columns = {"answer": f"gold {group}", "journal": journal}
            prompt = Prompt(prompt_id=f"{group}@0", text=f"prompt {group}", token_ids=(1,), columns=columns)
        rollouts.append(
            Rollout(
                prompt=prompt,
                sample_index=index,
                response_ids=(number, number % 7),
                logprobs=(0.0, 0.0),
                text=f"{kind} {number}",
                finish_reason="stop",
                weight_versions=((0, 2),),
            )
        )
    return rollouts


def faults_in(rollouts: Sequence[Rollout], kinds: Sequence[str], outcomes: Sequence[Outcome]) -> list[str]:
    """Return the faults in the outcomes.

    It is empty if every value is its sample's own and exactly the guilty samples carry their own error.
    """
    faults = []
    for rollout, kind, outcome in zip(rollouts, kinds, outcomes, strict=True):
        if kind == "answer":
            wanted = value_of(rollout.prompt.text, rollout.text, rollout.response_ids, rollout.prompt.columns["answer"])
            if outcome.error is not None:
                faults.append(f"{rollout.sample_id} is innocent and carries the error {outcome.error[-300:]!r}")
            elif outcome.value != wanted:
                faults.append(f"{rollout.sample_id} has the value {outcome.value} and {wanted} is its own")
        elif outcome.error is None or SAID[kind] not in outcome.error:
            faults.append(
                f"{rollout.sample_id} was told to {kind} and has the value {outcome.value} and the error "
                f"{outcome.error!r:.300}"
            )
        elif outcome.value is not None:
            faults.append(f"{rollout.sample_id} was told to {kind} and has the value {outcome.value} beside its error")
    return faults


class Kills(logging.Handler):
    """Records (process number, wall clock) of every worker that the pool reports, in place of its warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.args and isinstance(record.args[0], int):
            self.seen.append((record.args[0], record.created))


def hang_seconds(journal: str, kills: Sequence[tuple[int, float]]) -> list[float]:
    """Return the seconds of each sample that hung, from its first call to the kill that ended its last.

    journal: lines of process number, sample, wall clock.
    kills: the same without the sample. A call ends at the first kill of its process that comes after it.

    Example: calls ``7 3 10.0`` and ``8 3 11.2``, kills ``(7, 11.0), (8, 12.2)`` → 2.2 s for sample 3.
    """
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for line in journal.splitlines():
        pid, sample, began = line.split()
        ended = min(
            (killed_at for process, killed_at in kills if process == int(pid) and killed_at >= float(began)),
            default=float("nan"),
        )
        first.setdefault(sample, float(began))
        last[sample] = ended
    return [last[sample] - first[sample] for sample in first]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Holds the result of one run.

    table: name → figure, as printed.
    faults: a text for each fault.
    """

    table: Mapping[str, float | int]
    faults: Sequence[str]


def measure_faults(given: argparse.Namespace) -> Measured:
    from megatron_rl.reward.pool import Pool

    # Score all samples in a pool whose log tells of the killed workers.
    kinds = draw_kinds(given)
    handler, logger = Kills(), logging.getLogger(POOL_LOG)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with tempfile.TemporaryDirectory() as folder:
            journal = pathlib.Path(folder) / "hangs"
            journal.touch()
            rollouts = make_rollouts(kinds, given.group_size, str(journal))
            began = time.perf_counter()
            pool = Pool([FUNCTION], given.workers, given.deadline)
            start_s = time.perf_counter() - began
            try:
                began = time.perf_counter()
                work = pool.score(rollouts)
                seconds = time.perf_counter() - began
            finally:
                pool.close()
            calls = journal.read_text()
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    # Compare every outcome with the fault that its sample was told to make.
    hangs, hanging = hang_seconds(calls, handler.seen), kinds.count("hang")
    faults = faults_in(rollouts, kinds, work.outcomes[0])
    faults += [
        f"{len(samples)} samples failed together and none alone: {error[-300:]}"
        for samples, error in work.unexplained(0)
    ]
    table = {
        "samples": given.samples,
        "workers": given.workers,
        "seconds": seconds,
        "samples/s": given.samples / seconds,
        "ideal seconds (hanging x deadline / workers)": hanging * given.deadline / given.workers,
        "deadlines waited for / workers, seconds": len(calls.splitlines()) * given.deadline / given.workers,
        "raising": kinds.count("raise"),
        "hanging": hanging,
        "killing": kinds.count("kill"),
        "wrong answers": len(faults),
        "workers started": pool.num_started,
        "seconds to start all the workers once": start_s,
        "median seconds of a hanging sample": statistics.median(hangs) if hangs else 0.0,
        "worst seconds of a hanging sample": max(hangs, default=0.0),
    }
    return Measured(table=table, faults=faults)


# ---- math_verify ----------------------------------------------------------------------------------------------------


def math_rollouts(
    rows: Sequence[Mapping[str, str]], turn: int, given: argparse.Namespace
) -> tuple[list[Rollout], list[float]]:
    """Make groups of worked solutions, every second one with too many digits at its end; return them and their rewards.

    Another turn takes other rows.
    """
    rollouts, wanted = [], []
    groups = -(-given.math_samples // given.group_size)
    for group in range(turn * groups, (turn + 1) * groups):
        row = rows[group % len(rows)]
        prompt = Prompt(prompt_id=f"{group}@0", text=row["question"], token_ids=(1,), columns={"answer": row["answer"]})
        solution, mark, gold = row["answer"].rpartition("####")
        for index in range(min(given.group_size, given.math_samples - (group - turn * groups) * given.group_size)):
            number = gold.strip().replace(",", "") + "1" * (index if index % 2 else 0)
            rollouts.append(
                Rollout(
                    prompt=prompt,
                    sample_index=index,
                    response_ids=(1,),
                    logprobs=(0.0,),
                    text=f"{solution}{mark} {number}",
                    finish_reason="stop",
                    weight_versions=((0, 1),),
                )
            )
            wanted.append(float(index % 2 == 0))
    return rollouts, wanted


def measure_math(given: argparse.Namespace) -> Measured:
    from megatron_rl.config import RewardConfig
    from megatron_rl.reward import Reward

    with (given.data / "test.jsonl").open(encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream if line.strip()]
    rewards = {
        count: Reward(RewardConfig(functions=("math_verify",), num_workers=count)) for count in (0, given.workers)
    }
    # Judge in turns, so that a busy host slows both counts of workers.
    seconds: dict[int, list[float]] = {count: [] for count in rewards}
    faults = []
    try:
        for turn in range(given.repeats + 1):
            rollouts, wanted = math_rollouts(rows, turn, given)
            for count in sorted(rewards, reverse=bool(turn % 2)):
                began = time.perf_counter()
                scores = rewards[count].score(rollouts)
                seconds[count].append(time.perf_counter() - began)
                faults += [
                    f"{rollout.sample_id} of turn {turn} has {score.total} with {count} workers, not {worth}: "
                    f"{rollout.text[-60:]!r}"
                    for rollout, score, worth in zip(rollouts, scores, wanted, strict=True)
                    if score.total != worth
                ]
    finally:
        for reward in rewards.values():
            reward.close()
    alone, apart = (statistics.median(seconds[count][1:]) for count in (0, given.workers))
    table = {
        "samples": given.math_samples,
        "samples/s, 0 workers": given.math_samples / alone,
        "wrong answers": len(faults),
        f"samples/s, {given.workers} workers": given.math_samples / apart,
        "ratio": alone / apart,
    }
    return Measured(table=table, faults=faults)


# ---- printing -------------------------------------------------------------------------------------------------------


def show(title: str, measured: Measured) -> None:
    print(f"\n{title}")
    width = max(map(len, measured.table))
    for name, figure in measured.table.items():
        print(
            f"  {name:<{width}}  {figure:>10,.2f}" if isinstance(figure, float) else f"  {name:<{width}}  {figure:>7,}"
        )
    for fault in measured.faults[:SHOWN]:
        print(f"  wrong: {fault}")
    if len(measured.faults) > SHOWN:
        print(f"  and {len(measured.faults) - SHOWN} more")


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(machine)
    parts_measured = {"faults": measure_faults(given)}
    show(
        f"one call in {given.workers} workers, {given.deadline:g} s for a sample, groups of {given.group_size}",
        parts_measured["faults"],
    )
    if given.data:
        parts_measured["math_verify"] = measure_math(given)
        show("math_verify on GSM8K's answers", parts_measured["math_verify"])
    else:
        print("\nmath_verify was not measured: --data names no folder")
    if given.json:
        settings = {key: str(value) if isinstance(value, pathlib.Path) else value for key, value in vars(given).items()}
        parts = {
            name: {"table": dict(part.table), "faults": list(part.faults)} for name, part in parts_measured.items()
        }
        given.json.write_text(
            json.dumps({"machine": machine, "settings": settings, "parts": parts}, indent=1) + "\n", encoding="utf-8"
        )
        print(f"written: {given.json}")
    return 1 if any(part.faults for part in parts_measured.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
