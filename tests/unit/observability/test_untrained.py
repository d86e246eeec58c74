"""observability/untrained.py: a run that trains nothing says so, in the log and in the final table."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from megatron_rl.observability.progress_bar import ProgressBar
from megatron_rl.observability.untrained import TrainingWatch, untrained

# Steps by their first letters: Real, Ghost, Held, Zero gradient, Not finite.
KINDS = {"R": ("REAL", 0.5), "G": ("GHOST", 0.0), "H": ("HELD", 0.0), "Z": ("REAL", 0.0), "N": ("REAL", float("nan"))}


def rows_of(steps: str) -> list[dict[str, object]]:
    row = {"phase": "rl"}
    return [row | {"step": i, "step_kind": KINDS[x][0], "train/grad_norm": KINDS[x][1]} for i, x in enumerate(steps)]


# In a row at the end; named where there are three, or where they are all of a run.
IN_A_ROW = {"": 0, "RRR": 0, "GGGR": 0, "RGG": 2, "RGZN": 3, "RGHGHG": 3, "GG": 2, "HH": 0, "HHG": 1}


@pytest.mark.parametrize("steps", IN_A_ROW)
def test_steps_that_trained_nothing_equal_a_count_by_hand(steps: str) -> None:
    counts = untrained(rows_of(steps))
    assert counts.in_a_row == IN_A_ROW[steps] and not counts.is_worth_saying(None)
    assert counts.is_worth_saying(3) == (steps in ("RGZN", "RGHGHG", "GG", "HHG"))


def warnings_of(steps: str, warning_steps: int | None, caplog: pytest.LogCaptureFixture) -> list[str]:
    watch = TrainingWatch(warning_steps)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for row in rows_of(steps):
            watch.observe(row)
        watch.end()
    return [record.getMessage() for record in caplog.records]


def test_the_log_warns_at_the_setting_and_at_every_doubling(caplog: pytest.LogCaptureFixture) -> None:
    said = warnings_of("R" + "G" * 3 + "N" * 10, 3, caplog)
    assert len(said) == 3
    for warning, count in zip(said, (3, 6, 12), strict=True):
        assert warning.startswith(f"WARNING: the last {count} optimizer steps trained nothing (3 ghosts")
        assert "skip/zero_advantage_ratio" in warning and "docs/skip.md" in warning
    assert "3 with a gradient that is not finite" in said[1]


def test_a_step_that_trains_starts_the_count_anew(caplog: pytest.LogCaptureFixture) -> None:
    assert len(warnings_of("GGG" + "R" + "GG" + "R" + "GGG", 3, caplog)) == 2
    assert warnings_of("GGRGGRGG", 3, caplog) == []
    assert warnings_of("G" * 100, None, caplog) == []


def test_a_run_shorter_than_the_setting_that_trained_nothing_warns_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = warnings_of("GGZ", 20, caplog)
    assert said.startswith("WARNING: all 3 optimizer steps trained nothing (2 ghosts, 1 with a gradient of zero)")
    assert len(warnings_of("GGG", 3, caplog)) == 1  # not once more at the end


def test_a_run_that_goes_on_counts_the_steps_before(caplog: pytest.LogCaptureFixture) -> None:
    """After a resumption the last steps are counted over both parts, and no part is taken for a whole run."""
    watch = TrainingWatch(3)
    with caplog.at_level(logging.WARNING):
        watch.resume(rows_of("R" * 50 + "GG"))
        watch.end()
        assert not caplog.records
        watch.observe(rows_of("G")[0])
    assert caplog.records[0].getMessage().startswith("WARNING: the last 3 optimizer steps trained nothing (3 ghosts)")


def test_the_final_table_names_the_steps() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=120, color_system=None)
    with ProgressBar(30, True, console=console, untrained_warning_steps=3) as progress:
        progress.finish(rows_of("RGGGG"), None)
    (line,) = [line for line in out.getvalue().splitlines() if "WARNING" in line]
    assert "the last 4 optimizer steps trained nothing (4 ghosts)" in line
