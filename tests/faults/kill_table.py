"""The kills of the study, their outcomes and the table of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.faults.phased_rank import STAGES

WORLD = 2  # ranks of a run


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A kill of the study.

    seconds: since the run began. ranks: whose process gets SIGKILL.
    """

    seconds: float
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one kill.

    phase, ahead, writing: what the killed rank noted last (the lowest, where all were); ahead: a thread was generating.
    resumed: the checkpoint that the second start found. codes: the exit codes of the killed run. differs: what is not
    as in the uninterrupted run.
    """

    kill: Kill
    phase: str
    ahead: bool
    writing: bool
    resumed: int | None
    codes: tuple[int, ...]
    differs: tuple[str, ...]


def row_of(number: int, outcome: Outcome) -> str:
    killed = "all" if len(outcome.kill.ranks) == WORLD else f"rank {outcome.kill.ranks[0]}"
    resumed = "from the start" if outcome.resumed is None else f"rollout {outcome.resumed}"
    codes = ", ".join(str(code) for code in outcome.codes)
    result = f"DIFFERS: {', '.join(outcome.differs)}" if outcome.differs else "the same bits"
    ahead, written = ("yes" if noted else "" for noted in (outcome.ahead, outcome.writing))
    return (
        f"| {number} | {outcome.kill.seconds:.2f} | {killed} | {outcome.phase} | {ahead} | {written} | {codes} | "
        f"{resumed} | {result} |"
    )


def table(seconds: float, outcomes: Sequence[Outcome]) -> str:
    """Return a table of kills by phase, then of every kill."""
    phases = Counter(outcome.phase for outcome in outcomes)
    ahead, writing = sum(outcome.ahead for outcome in outcomes), sum(outcome.writing for outcome in outcomes)
    same = sum(not outcome.differs for outcome in outcomes)
    columns = [
        *STAGES,
        "other",
        "(any of them, a thread generating)",
        "(any of them, a checkpoint's files being written)",
    ]
    lines = [
        f"{len(outcomes)} kills, uniform over the {seconds:.1f} s of the run; **{same} of {len(outcomes)}** ended "
        "with the same bits.",
        "",
        "| " + " | ".join(columns) + " |",
        "|---" * len(columns) + "|",
        "| " + " | ".join(str(phases[name]) for name in (*STAGES, "other")) + f" | {ahead} | {writing} |",
        "",
        "| # | at s | killed | phase | generating | files being written | exit codes | went on from | end |",
        "|---" * 9 + "|",
    ]
    return "\n".join([*lines, *(row_of(number, x) for number, x in enumerate(outcomes, start=1))]) + "\n"
