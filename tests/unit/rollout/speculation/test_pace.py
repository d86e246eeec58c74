"""The number of drafted tokens, by passes whose seconds and accepted drafts are given."""

from __future__ import annotations

import logging

import pytest

from megatron_rl.rollout.speculation.pace import RETRY, TRIALS, WIDTHS, MeasuredPace


def passes(
    pace: MeasuredPace, count: int, *, rows: int, seconds_a_token: float, accepted: int, most: int = 8
) -> list[int]:
    """Make passes in which ``accepted`` tokens of each draft hold. A pass takes 1 s and a time for each drafted one."""
    asked = []
    for _ in range(count):
        asked.append(pace.width(rows))
        drafted = min(asked[-1], most)
        pace.note(asked[-1], 1 + seconds_a_token * drafted, [(drafted, min(drafted, accepted))] * rows)
    return asked


@pytest.mark.parametrize(
    "seconds_a_token, accepted, width",
    [(0.01, 8, 8), (0.01, 2, 2), (0.2, 2, 2), (0.7, 8, 8), (1.1, 8, 0), (0.5, 1, 1), (0.01, 0, 0)],
)
def test_the_width_of_the_most_tokens_a_second_is_taken(seconds_a_token, accepted, width):
    """A pass of w drafted tokens gives 1 + min(w, accepted) tokens in 1 + w × seconds_a_token."""
    pace = MeasuredPace()
    asked = passes(pace, 400, rows=4, seconds_a_token=seconds_a_token, accepted=accepted)
    assert asked[: 2 * TRIALS] == sorted(TRIALS * WIDTHS[:2])
    assert (8 in asked[:50]) == (seconds_a_token * accepted not in (0.0, 0.5))  # else it cannot pay, and is not tried
    assert asked[200:].count(width) >= 150  # but for trials of others


def test_drafts_that_do_not_pay_are_off_with_one_line_until_they_do(caplog):
    caplog.set_level(logging.INFO)
    pace = MeasuredPace()
    passes(pace, 1000, rows=4, seconds_a_token=0.5, accepted=0)
    assert [record.getMessage()[:38] for record in caplog.records] == ["rollout.speculation: no more drafts fo"]
    assert "of 4 to 7 samples: a pass takes 1 s without and 1.5 s with" in caplog.text
    asked = passes(pace, 1000, rows=4, seconds_a_token=0.5, accepted=0)
    assert sum(width > 0 for width in asked) <= 1000 // RETRY + 1
    asked = passes(pace, 3000, rows=4, seconds_a_token=0.1, accepted=8)
    assert len(caplog.records) == 2 and "drafts again for batches of 4 to 7 samples" in caplog.text
    assert asked[-100:].count(8) >= 90


def test_passes_without_a_match_do_not_count_as_trials():
    pace = MeasuredPace()
    passes(pace, 200, rows=2, seconds_a_token=0.1, accepted=8, most=0)
    assert pace.width(2) > 0
    assert passes(pace, 50, rows=2, seconds_a_token=0.1, accepted=8)[-20:].count(8) >= 18
