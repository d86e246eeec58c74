"""Whole runs with rollout.engine=vllm, a real engine on the CPU: the same numbers as the trainer's own engine's."""

import pathlib

import pytest

from tests.pairwise import quick
from tests.runs.command import rows_of, run_example
from tests.vllm.served import GAP
from tests.workers.inputs import prepare_family

pytestmark = pytest.mark.vllm


def check_rows(run_dir: pathlib.Path, engines: int) -> None:
    rows = rows_of(run_dir)
    first = [row for row in rows if "train/logprob_gap_max" in row]
    assert len(first) == max(row["rollout"] for row in rows) >= 2
    assert max(row["train/logprob_gap_max"] for row in first) < GAP
    assert len(list((run_dir / "engines").glob("*.log"))) == engines
    # every rollout but the first came from weights that the one before it had moved
    versions = [row["rollout/weight_version_min"] for row in first]
    assert versions == sorted(set(versions))
    assert all(min(row["perf/weight_sync_bytes"], row["perf/rollout_tokens_per_second"]) > 0 for row in first)


ONE, ADAPTERS = "rollout.num_engines=1", ("lora.rank=4", "optimizer.lr=5e-3")
LAYOUTS = {
    "PP2, one engine": (1, "parallel.pipeline=2", ONE),
    "TP2, by broadcast": (1, "parallel.tensor=2", ONE, "weight_sync.channel=broadcast"),
    "DP2, two engines, buckets of 10 kB": (2, "weight_sync.bucket_mb=0.01"),
    "TP2, merged adapters": (1, "parallel.tensor=2", ONE, *ADAPTERS),
    "DP2, adapters alone": (2, *ADAPTERS, "weight_sync.adapters=alone"),
    "a mixture, EP2": (1, "parallel.expert=2", ONE),  # experts of 48, which vLLM pads to 64 on a CPU
}


@pytest.mark.parametrize("layout", quick(LAYOUTS, "TP2, by broadcast"))
def test_log_probs_equal_the_trainers_after_every_sync(run, request, tmp_path, layout):
    engines, *given = LAYOUTS[layout]
    run(*given, world=2, folder=request.getfixturevalue("mixture" if "mixture" in layout else "arithmetic"))
    check_rows(tmp_path, engines)


@pytest.mark.long
@pytest.mark.parametrize("family", ["phi3", "olmo2"])
def test_a_family_of_other_tensors(run, arithmetic, tmp_path, family):
    folder = prepare_family(arithmetic, tmp_path / "inputs", family)
    run("parallel.tensor=2", ONE, world=2, folder=folder, out=tmp_path / "run")
    check_rows(tmp_path / "run", 1)


@pytest.mark.long
def test_weights_that_did_not_move_are_not_sent(run, tmp_path):
    ((said,),) = run("reward.functions=[tests.reward_functions:constant]", "skip.ghost=freeze")
    rows = rows_of(tmp_path)
    assert [row["weight_version"] for row in rows] == [0] * len(rows)
    assert sum("perf/weight_sync_bytes" in row for row in rows) == 1 and "weights sent 1 times" in said


@pytest.mark.long
def test_a_gap_above_the_threshold_stops_the_run_with_its_name(run):
    ((said,),) = run("rollout.max_logprob_gap=1e-12", ends_with=1)
    assert "rollout.max_logprob_gap=1e-12" in said and "nats per token" in said, said


@pytest.mark.long(seconds=150)
def test_the_quickstart_learns(tmp_path):
    """The quickstart learns with rollouts by vLLM, for 60 of 200 rollouts, as in tests/runs/test_quickstart.py."""
    rows = run_example("quickstart", tmp_path, "rollout.engine=vllm", ONE, "train.num_rollouts=60", timeout_s=900)
    reward = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert len(reward) == 60 and sum(reward[:10]) / 10 < 0.6 and sum(reward[-10:]) / 10 > 0.65
    assert max(row.get("train/logprob_gap_max", 0.0) for row in rows) < GAP
