"""Whole runs whose embedded engine drafts tokens from earlier answers."""

from __future__ import annotations

import json
import pathlib

import pytest

from megatron_rl.rollout.groups.serialization import unpack_history
from megatron_rl.rollout.speculation.history import History
from tests.runs.command import SAVED, apart, few_prompts, firsts_of, rows_of

HISTORY = "rollout.speculation=history"
ROUNDING = 1e-5  # of losses and gradients: the engine's log-probs are those of passes of other shapes


def texts_of(run_dir: pathlib.Path) -> list[dict]:
    """Return the recorded samples without what log-probs enter."""
    return [json.loads(line) for line in (run_dir / "completions.jsonl").read_text().splitlines()]


def history_of(run_dir: pathlib.Path, rollouts: int) -> History:
    history = History()
    history.load_state(unpack_history((run_dir / f"checkpoints/iter_{rollouts:07d}/rollouts_0.npz").read_bytes()))
    return history


def test_a_run_with_drafts_equals_the_run_without_and_goes_on(made, arithmetic, tmp_path):
    """The second two of four rollouts ask the prompts of the first two again."""
    given = (few_prompts(arithmetic, tmp_path, 16), *SAVED, "rollout.max_response_tokens=24", "train.num_rollouts=4")
    plain, drafts = made(1, *given), made(1, *given, HISTORY)
    resumed = made.again(drafts, 2)
    for run in (drafts, resumed):
        assert texts_of(run) == texts_of(plain)
        assert apart(plain, run) < ROUNDING
        for row, want in zip(rows_of(run), rows_of(plain), strict=True):
            for name in ("reward/mean", "rollout/tokens", "rollout/truncated_share"):  # a rollout's first row has them
                assert row.get(name) == want.get(name)
            assert row["train/loss"] == pytest.approx(want["train/loss"], abs=ROUNDING)
    firsts = firsts_of(drafts)
    assert all(0 <= row["speculation/accepted"] <= row["speculation/drafted"] for row in firsts)
    assert firsts[2]["speculation/drafted"] > 0
    for row in firsts:
        gained = 1 + row["speculation/accepted"] / row["speculation/passes"]
        assert row["speculation/tokens_per_pass"] == pytest.approx(gained)
    assert "speculation/drafted" not in firsts_of(plain)[0]
    assert len(history_of(drafts, 2)) == len(history_of(resumed, 4)) == 16
    assert history_of(drafts, 4).num_tokens == history_of(resumed, 4).num_tokens > history_of(drafts, 2).num_tokens
