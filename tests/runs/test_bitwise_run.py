"""Runs under rollout.bitwise: engine and trainer give every token the same log-prob, bit by bit, in every step."""

from __future__ import annotations

import pytest

from tests.runs.command import arguments, command_line, rows_of

GIVEN = (
    "rollout.bitwise=true",
    "train.num_rollouts=3",
    "train.samples_per_mini_batch=16",
    "optimizer.lr=1e-2",
    "optimizer.schedule=constant",
    "metrics.log_completions=0",
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_step_has_a_gap_of_zero(pool, arithmetic, tmp_path, dtype) -> None:
    line = arguments(arithmetic, tmp_path, *GIVEN, f"model.dtype={dtype}")
    ((code, said),) = pool.run(1, command_line, line, timeout_s=120)
    assert code == 0, said
    rows = rows_of(tmp_path)
    print([(r["step_kind"], r.get("train/logprob_gap_max"), r.get("train/ratio")) for r in rows])
    assert [row["train/logprob_gap_max"] for row in rows if "train/logprob_gap_max" in row] == [0.0] * 3
