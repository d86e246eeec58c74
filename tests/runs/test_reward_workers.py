"""A run whose rewards come from workers equals the run whose ranks score themselves."""

from __future__ import annotations

import os
import pathlib

import torch

from tests.runs.command import arguments, command_line, rows_of, weights_of

FUNCTIONS = (
    "reward.functions=[tests.reward_functions:parity,math_verify]",
    "reward.weights=[1.0,0.5]",
    "reward.on_error=zero",
)


def run_and_count(rank: int, world: int, given: list[str]) -> tuple[int, str, int]:
    """Return the command line's exit code and words, and how many reward workers of this rank it left."""
    code, said = command_line(rank, world, given)
    left = 0
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        left += b"megatron_rl.reward.worker" in words and str(os.getpid()).encode() in words
    return code, said, left


def test_a_run_with_workers_equals_one_without(pool, arithmetic, tmp_path):
    """A DP2 run with reward workers equals one without, to the bit, and leaves no worker.

    Compared are the rewards of every rollout and the last weights.
    """
    rewards, weights = [], []
    for num_workers in (0, 2):
        run_dir = tmp_path / str(num_workers)
        given = arguments(arithmetic, run_dir, *FUNCTIONS, f"reward.num_workers={num_workers}")
        results = pool.run(2, run_and_count, given, timeout_s=120)
        assert [(code, left) for code, _, left in results] == [(0, 0)] * 2, results
        rewards.append(
            [{key: value for key, value in row.items() if key.startswith("reward/")} for row in rows_of(run_dir)]
        )
        weights.append(weights_of(run_dir))
    assert rewards[0] == rewards[1] and "reward/math_verify" in rewards[0][0]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
