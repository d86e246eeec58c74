"""The GSM8K example as a user starts it, made tiny by overrides: prepare.py, then torchrun with gsm8k.yaml."""

import json
import pathlib
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.config import load_config
from megatron_rl.observability.metrics import read_metrics
from tests.patience import patient
from tests.runs.command import ROOT, said_by
from tests.workers.environment import TORCHRUN, worker_environment

pytestmark = [pytest.mark.process, pytest.mark.distributed, pytest.mark.long(seconds=30)]

CONFIG = ROOT / "examples" / "gsm8k" / "gsm8k.yaml"
TIMEOUT_S = patient(600)  # some 20 s on two free cores; the rest is for a loaded machine
PROMPTS, SAMPLES = 8, 8  # an optimizer step for each prompt's group
WARMUP_STEPS, ROLLOUTS, STEPS_PER_ROLLOUT = 30, 2, PROMPTS

# Semantics §9, as far as a synchronous run without KL, entropy, replay or reroll on a CPU has them.
EVERY_ROW = {
    *("step", "step_kind", "phase", "weight_version", "train/grad_norm", "train/lr", "train/loss", "time/step_s"),
    "skip/ghost_steps",
}
EVERY_RL_ROW = EVERY_ROW | {
    *("rollout", "skip/zero_advantage_ratio", "skip/samples_dropped", "skip/tokens_dropped", "skip/silent_ranks"),
    *("skip/microbatches_dropped", "skip/tokens_executed", "skip/tokens_dense", "tokens/shared", "time/update_s"),
    "perf/dense_equivalent_tokens_per_second",
}
FIRST_OF_ROLLOUT = EVERY_RL_ROW | {
    *("reward/mean", "reward/math_verify", "time/rollout_s", "time/reward_s", "time/logprob_s", "time/weight_sync_s"),
}


def problem(number: int, solution: str) -> dict:
    """Return a row in GSM8K's own columns, a calculator call included."""
    question = f"Ann has {number} pens and gives some away. How many?"
    return {"question": question, "answer": f"<<{number}-1={number}>>{solution}"}


# Answers that no question tells apart: half of a group's samples are right, so it has signal. One of 20 digits, a token
# each, does not fit in the response, so its group never has any: a ghost step.
COINS = [problem(i, f"#### {i % 2 + 1}") for i in range(7)]
IMPOSSIBLE = problem(7, "#### 12345678901234567890")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("gsm8k")
    for name, rows in (("train", [*COINS, IMPOSSIBLE]), ("test", COINS[:3])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs = folder / "inputs"
    sizes = "--hidden 64 --layers 2 --heads 2 --kv-heads 2 --intermediate 128 --max-position 256 --vocab-size 300"
    prepare = ["examples/gsm8k/prepare.py", "--gsm8k", str(folder), "--out", str(inputs), *sizes.split()]
    said_by([sys.executable, *prepare], ROOT, TIMEOUT_S)
    overrides = {
        "model.hf_path": inputs / "model", "data.train": inputs / "train.jsonl", "eval.path": inputs / "test.jsonl",
        "data.max_prompt_tokens": 96, "rollout.max_response_tokens": 16, "rollout.samples_per_prompt": SAMPLES,
        "sft.steps": WARMUP_STEPS, "sft.samples_per_step": 8, "sft.lr": 3e-3, "train.num_rollouts": ROLLOUTS,
        "train.prompts_per_rollout": PROMPTS, "train.samples_per_mini_batch": SAMPLES, "metrics.progress": "false",
    }
    given = ["--config", str(CONFIG), "--run-dir", str(folder / "run"), *(f"{k}={v}" for k, v in overrides.items())]
    torchrun = [sys.executable, "-m", *TORCHRUN, "2", "-m", "megatron_rl.train", *given]
    said_by(torchrun, ROOT, TIMEOUT_S, HF_HUB_OFFLINE="1", **worker_environment())
    return folder / "run"


@pytest.fixture(scope="module")
def rows(run_dir) -> list[dict]:
    return read_metrics(run_dir / "metrics.jsonl")


def test_rows_have_their_phase_kind_and_keys(rows):
    warmup, rl = rows[:WARMUP_STEPS], rows[WARMUP_STEPS:]
    assert [row["step"] for row in rows] == list(range(1, WARMUP_STEPS + ROLLOUTS * STEPS_PER_ROLLOUT + 1))
    assert {row["phase"] for row in warmup} == {"warmup"} and {row["phase"] for row in rl} == {"rl"}
    assert {row["step_kind"] for row in warmup} == {"REAL"} and warmup[-1]["train/loss"] < warmup[0]["train/loss"] / 2
    for place, row in enumerate(rl):
        expected = EVERY_RL_ROW if place % STEPS_PER_ROLLOUT else FIRST_OF_ROLLOUT
        assert expected <= row.keys(), f"row {row['step']} lacks {sorted(expected - row.keys())}"
    assert all(row.keys() >= EVERY_ROW for row in warmup)
    evaluated = [row for row in rows if "eval/test/mean@1" in row]
    assert [row["step"] for row in evaluated] == [WARMUP_STEPS, len(rows)]
    assert all(row["eval/test/mean@1"] * 3 == pytest.approx(round(row["eval/test/mean@1"] * 3)) for row in evaluated)


def test_real_steps_have_a_gradient_and_ghosts_ran_nothing(rows):
    rl = rows[WARMUP_STEPS:]
    real = [row for row in rl if row["step_kind"] == "REAL"]
    assert real and {row["step_kind"] for row in rl} == {"REAL", "GHOST"}
    for row in rl:
        ran = row["skip/tokens_executed"] + row["tokens/shared"]  # a group's prompt runs once
        assert ran + row["skip/tokens_dropped"] == row["skip/tokens_dense"] > 0
        assert (row["train/grad_norm"] > 0) == (row["skip/tokens_executed"] > 0) == (row["step_kind"] == "REAL")
    assert rl[-1]["skip/ghost_steps"] == len(rl) - len(real) >= ROLLOUTS  # the impossible problem, once an epoch
    # Engine and trainer compute one float32 model by other kernels; 1e-4 is a hundred roundings of a log-prob near 3.
    assert all(row["train/logprob_gap_max"] < 1e-4 for row in rl if "train/logprob_gap_max" in row)


def test_run_folder_is_whole(run_dir, rows):
    assert load_config(run_dir / "config.yaml").sft.steps == WARMUP_STEPS
    report = (run_dir / "report.html").read_text()
    assert '"total_steps":' in report and len(report) > 30_000
    exported = run_dir / "checkpoints" / f"step_{len(rows)}" / "hf"
    model, loading = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    start = load_file(run_dir.parent / "inputs" / "model" / "model.safetensors")
    weights, loaded = load_file(exported / "model.safetensors"), model.state_dict()
    assert weights.keys() == start.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, loaded[name]) and weight.isfinite().all()
        assert not torch.equal(weight, start[name]), f"{name} is as it was before the training"
    assert AutoTokenizer.from_pretrained(exported).eos_token_id is not None
