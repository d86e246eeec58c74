"""The number of drafted tokens, by passes whose seconds and accepted drafts are given."""

from __future__ import annotations

import logging

import pytest

from megatron_rl.rollout.speculation.pace import AGAIN, TRIALS, WIDTHS, MeasuredPace, MeasuredSwitch


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


def batches(
    switch: MeasuredSwitch, count: int, with_drafts: float, without: float, *, known: bool = True
) -> list[bool]:
    """Decode batches of 6 samples and 60 tokens that take so many seconds for a token; return which drafted."""
    found = []
    for _ in range(count):
        found.append(switch.is_on(6, known=known))
        seconds = 60 * (with_drafts if found[-1] else without)
        switch.note(6, known=known, drafted=found[-1], seconds=seconds, tokens=60)
    return found


def test_batches_draft_while_that_takes_less_time_with_a_line_at_each_turn(caplog):
    caplog.set_level(logging.INFO)
    switch = MeasuredSwitch()
    found = batches(switch, 200, 1.2, 1.0)
    assert found[: 2 * TRIALS] == [True, False] * TRIALS and sum(found[2 * TRIALS :]) <= 200 // AGAIN
    assert [record.getMessage()[:72] for record in caplog.records] == [
        "rollout.speculation: batches of 4 to 7 samples are decoded without drafts"[:72]
    ]
    found = batches(switch, 400, 0.5, 1.0)
    assert sum(found[2 * AGAIN :]) >= 400 - 2 * AGAIN - 400 // AGAIN - 1 and len(caplog.records) == 2
    assert "decoded with drafts: a token takes 0.5 s with drafts, 1 s without" in caplog.text
    assert batches(switch, 2 * TRIALS, 9.0, 1.0, known=False) == [True, False] * TRIALS  # another kind of batch
    assert "without earlier answers are decoded without drafts" in caplog.text


def test_passes_without_a_match_do_not_count_as_trials():
    pace = MeasuredPace()
    passes(pace, 200, rows=2, seconds_a_token=0.1, accepted=8, most=0)
    assert pace.width(2) > 0
    assert passes(pace, 50, rows=2, seconds_a_token=0.1, accepted=8)[-20:].count(8) >= 18
