"""Whole runs through the command line with rollout.engine=vllm, a real engine on the CPU.

It gives the same numbers as the trainer's own engine.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.runs.command import ROOT, arguments, command_line, rows_of
from tests.vllm.served import GAP, VLLM
from tests.workers.inputs import prepare_family

pytestmark = pytest.mark.vllm


def check_rows(run_dir: pathlib.Path, engines: int) -> None:
    rows = rows_of(run_dir)
    first = [row for row in rows if "train/logprob_gap_max" in row]
    assert len(first) == max(row["rollout"] for row in rows) >= 2
    assert all(row["train/logprob_gap_max"] < GAP for row in first), [row["train/logprob_gap_max"] for row in first]
    assert len(list((run_dir / "engines").glob("*.log"))) == engines
    # every rollout but the first came from weights that the one before it had moved
    versions = [row["rollout/weight_version_min"] for row in first]
    assert versions == sorted(set(versions)) and all(
        row["perf/weight_sync_bytes"] > 0 and row["perf/rollout_tokens_per_second"] > 0 for row in first
    )


@pytest.mark.parametrize(
    "layout, engines",
    [
        (("parallel.pipeline=2", "rollout.num_engines=1"), 1),
        (("parallel.tensor=2", "rollout.num_engines=1", "weight_sync.channel=broadcast"), 1),
        (("parallel.pipeline=1", "weight_sync.bucket_mb=0.01"), 2),
        (("parallel.tensor=2", "rollout.num_engines=1", "lora.rank=4", "optimizer.lr=5e-3"), 1),
        (
            ("parallel.pipeline=1", "lora.rank=4", "optimizer.lr=5e-3", "weight_sync.adapters=alone"),
            2,
        ),
    ],
    ids=[
        "PP2, one engine",
        "TP2, by broadcast",
        "DP2, two engines, buckets of 10 kB",
        "TP2, merged adapters",
        "DP2, adapters alone",
    ],
)
def test_log_probs_equal_the_trainers_after_every_sync(pool, arithmetic, tmp_path, layout, engines):
    results = pool.run(2, command_line, arguments(arithmetic, tmp_path, *VLLM, *layout), timeout_s=180)
    assert [code for code, _ in results] == [0, 0], results
    check_rows(tmp_path, engines)


def test_a_mixture_under_expert_parallelism(pool, mixture, tmp_path):
    """A mixture runs under expert parallelism, with experts of 48, which vLLM pads to 64 on a CPU."""
    given = arguments(mixture, tmp_path, *VLLM, "parallel.expert=2", "rollout.num_engines=1")
    results = pool.run(2, command_line, given, timeout_s=180)
    assert [code for code, _ in results] == [0, 0], results
    check_rows(tmp_path, 1)


@pytest.mark.parametrize("family", ["phi3", "olmo2"])
def test_a_family_of_other_tensors(pool, arithmetic, tmp_path, family):
    folder = prepare_family(arithmetic, tmp_path / "inputs", family)
    given = arguments(folder, tmp_path / "run", *VLLM, "parallel.tensor=2", "rollout.num_engines=1")
    results = pool.run(2, command_line, given, timeout_s=180)
    assert [code for code, _ in results] == [0, 0], results
    check_rows(tmp_path / "run", 1)


def test_weights_that_did_not_move_are_not_sent(pool, arithmetic, tmp_path):
    extra = ["reward.functions=[tests.reward_functions:constant]", "skip.ghost=freeze"]
    ((code, said),) = pool.run(1, command_line, arguments(arithmetic, tmp_path, *VLLM, *extra), timeout_s=180)
    assert code == 0, said
    rows = rows_of(tmp_path)
    assert [row["weight_version"] for row in rows] == [0] * len(rows)
    assert sum("perf/weight_sync_bytes" in row for row in rows) == 1 and "weights sent 1 times" in said


def test_a_gap_above_the_threshold_stops_the_run_with_its_name(pool, arithmetic, tmp_path):
    """A gap above the threshold stops the run with its name.

    The trainer is at another temperature than the engine would be: the guard sees every sample of it.
    """
    extra = ["rollout.max_logprob_gap=1e-12"]
    ((code, said),) = pool.run(1, command_line, arguments(arithmetic, tmp_path, *VLLM, *extra), timeout_s=180)
    assert code == 1 and "rollout.max_logprob_gap=1e-12" in said and "nats per token" in said, said


@pytest.mark.long(seconds=150)
def test_the_quickstart_learns(tmp_path):
    """The quickstart learns with rollouts by vLLM, for 60 of 200 rollouts, as in tests/runs/test_quickstart.py."""
    environment = os.environ | {
        "RUN_DIR": str(tmp_path),
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "examples/quickstart/run.sh", "rollout.engine=vllm", "rollout.num_engines=1", "train.num_rollouts=60"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    reward = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert len(reward) == 60 and sum(reward[:10]) / 10 < 0.6 and sum(reward[-10:]) / 10 > 0.65
    assert max(row.get("train/logprob_gap_max", 0.0) for row in rows) < GAP
