"""A run with a policy loss and an estimator of the user's own is the run of the built-in ones, to the bit."""

from __future__ import annotations

import torch

from tests.runs.command import arguments, command_line, rows_of, weights_of

# long enough that samples lie on both ranks, and trained twice, so that the ratio is not 1
LONG = ("parallel.context=2", "rollout.max_response_tokens=24", "train.epochs_per_rollout=2", "optimizer.lr=1e-2")


def test_own_parts_train_the_run_of_the_built_in_ones(pool, arithmetic, tmp_path):
    """GSPO and Dr. GRPO, written as a user would, over two context ranks: sums of samples are completed over both."""
    own = ["loss.policy=tests.own_parts:by_sequence", "advantage.estimator=tests.own_parts:centred"]
    built_in = ["loss.policy=gspo", "advantage.estimator=dr_grpo"]
    for name, parts in (("own", own), ("built_in", built_in)):
        given = arguments(arithmetic, tmp_path / name, *LONG, *parts)
        results = pool.run(2, command_line, given, timeout_s=120)
        assert [code for code, _ in results] == [0, 0], results
    weights = [weights_of(tmp_path / name) for name in ("own", "built_in")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    own_rows, rows = rows_of(tmp_path / "own"), rows_of(tmp_path / "built_in")
    for name in ("train/loss", "train/ratio", "train/clip_ratio", "skip/samples_dropped"):
        assert [row.get(name) for row in own_rows] == [row.get(name) for row in rows]
    assert sum(row["skip/samples_dropped"] for row in own_rows) > 0
