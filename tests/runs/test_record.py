"""The records that a run leaves for a simulation agree with its metrics, and the command lines read them."""

import json
import pathlib

import numpy as np
import pytest

from megatron_rl import train
from megatron_rl.algorithm.signal import signal_rule
from megatron_rl.config import load_config
from megatron_rl.simulator import __main__ as simulate_cluster
from megatron_rl.simulator.workload import read_trace
from tests.pairwise import quick
from tests.runs.command import WARM, rows_of

GDPO = ("advantage.estimator=gdpo", "reward.functions=[tests.reward_functions:parity,arithmetic]")
RECORDED = {"PP2 after a warm-up": (2, ("parallel.pipeline=2", *WARM)),
            "one process, twice": (1, ()),
            "DP2, two functions": (2, (*GDPO, "reward.weights=[1.0,0.5]"))}


@pytest.mark.parametrize("name", quick(RECORDED, "one process, twice", "DP2, two functions"))
def test_a_runs_files_say_what_its_metrics_say(made, tmp_path, capsys, name):
    """They are the same to the last digit; a second run in the folder starts both files anew."""
    (world, extra), run_dir = RECORDED[name], tmp_path / "run"
    for _ in range(1 if extra else 2):
        made.into(run_dir, world, *extra)
    assert (run_dir / "trace.jsonl.1").exists() == (run_dir / "coefficients.json.1").exists() == (not extra)
    rows, config = [row for row in rows_of(run_dir) if row["phase"] == "rl"], load_config(run_dir / "config.yaml")
    workloads = read_trace(run_dir)
    assert len(workloads) == config.train.num_rollouts == 2
    for rollout, workload in enumerate(workloads, start=1):
        own = [row for row in rows if row["rollout"] == rollout]
        assert workload.lengths.sum() == sum(row["skip/tokens_dense"] for row in own)
        epsilon = signal_rule(config).advantage_epsilon
        dead = ~workload.signal(config.advantage, config.reward, epsilon=epsilon)
        size = config.train.samples_per_mini_batch
        shares = [dead[i : i + size].mean() for i in range(0, len(dead), size)]
        assert shares == [row["skip/zero_advantage_ratio"] for row in own]
        assert workload.response_tokens.mean() == own[0]["rollout/response_tokens_mean"]
        assert workload.rewards.mean() == own[0]["reward/mean"] and 0 < dead.sum() < len(dead)
    check_coefficients(run_dir, rows, world, config)
    check_command_lines(run_dir, world, workloads, capsys)


def check_coefficients(run_dir: pathlib.Path, rows: list[dict], world: int, config) -> None:
    content, last = json.loads((run_dir / "coefficients.json").read_text()), rows[-1]
    slowest = max(content["stages"], key=lambda stage: stage["token"])
    assert all(last[f"cost/{name}_s"] == value for name, value in slowest.items())
    assert len(content["stages"]) == config.parallel.pipeline and content["virtual"] == 1
    assert 0 < content["forward_share"] < 1 and 0 < content["optimizer_s"] < sum(row["time/update_s"] for row in rows)
    assert f"{world} process(es)" in content["measured_on"] and not list(run_dir.glob("*.tmp"))


def check_command_lines(run_dir: pathlib.Path, world: int, workloads, capsys) -> None:
    """Check that the tool takes the configuration from the run too, and that a dry run has its own."""
    written = run_dir / "figures.json"
    alone = ["--from-run", str(run_dir), "--nodes", "1", "--gpus-per-node", str(world), "--json", str(written)]
    assert simulate_cluster.main([*alone, "plan.share_prompts=false"]) == 0
    content = json.loads(written.read_text())
    assert content["workload"] == f"recorded: 2 rollout(s) of {len(workloads[0].rewards)} samples, from run"
    assert content["costs"].startswith("coefficients of coefficients.json: ")
    assert content["dense"]["tokens"] in [w.lengths.sum() for w in workloads]
    measured = json.loads((run_dir / "coefficients.json").read_text())
    assert content["dense"]["optimizer_s"] == pytest.approx(2 * measured["optimizer_s"])
    assert content["gain_predicted"] > 0.9 and np.isfinite(content["dense"]["update_s"])
    assert train.main(["--config", str(run_dir / "config.yaml"), "--dry-run", *alone]) == 0
    assert "coefficients of coefficients.json" in capsys.readouterr().out
    assert simulate_cluster.main([*alone, "--trace", str(run_dir)]) == simulate_cluster.EXIT_CONFIG
    assert "stands for --trace and --coefficients, and --trace is given too" in capsys.readouterr().err
    assert simulate_cluster.main([*alone[:3], "8", "parallel.tensor=2"]) == simulate_cluster.EXIT_CONFIG
    assert "was fitted with tensor=1 where this configuration has 2" in capsys.readouterr().err
