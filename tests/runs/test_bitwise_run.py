"""Runs under rollout.bitwise: engine and trainer give every token the same log-prob, bit by bit, in every step."""

import re
from unittest import mock

import pytest
import torch

from megatron_rl import train
from megatron_rl.cli import EXIT_CONFIG, EXIT_FAILED
from tests.pairwise import quick
from tests.reference import tiny_config
from tests.runs.command import KL, PPO, arguments, command_line, rows_of

GIVEN = ("rollout.bitwise=true", "train.num_rollouts=3", "optimizer.lr=1e-2", "optimizer.schedule=constant",
         "metrics.log_completions=0")
CASES = {"float32": (1, ()), "bfloat16": (1, ("model.dtype=bfloat16",)), "ranks": (2, ()),
         "tensor": (2, ("parallel.tensor=2", "model.dtype=bfloat16")), "stages": (2, ("parallel.pipeline=2",)),
         "epochs": (1, ("train.epochs_per_rollout=2", "skip.mode=off")), "kl": (1, (*KL, "reference.kl_in=reward")),
         "critic": (1, PPO),
         "parts": (1, ("rollout.producer.min_groups=3", "plan.share_prompts=false", "correction.mode=token_truncate")),
         "turns": (1, ("environment.name=calculator", "reward.functions=[environment]"))}


@pytest.mark.parametrize("case", quick(CASES, "tensor", "epochs", "parts"))
def test_every_step_has_a_gap_of_zero_and_the_first_a_ratio_of_one(made, case) -> None:
    world, given = CASES[case]
    rows = [row for row in rows_of(made(world, *GIVEN, *given)) if row["phase"] == "rl"]
    assert len(rows) >= 3 and {row["rollout"] for row in rows} == {1, 2, 3}
    assert [row["train/logprob_gap_max"] for row in rows] == [0.0] * len(rows)
    firsts = [row for i, row in enumerate(rows) if not i or row["rollout"] != rows[i - 1]["rollout"]]
    assert [row["train/ratio"] for row in firsts if row["step_kind"] == "REAL"], "no first step was trained"
    assert all(row["train/ratio"] == 1.0 for row in firsts if row["step_kind"] == "REAL")
    moved = [row["train/ratio"] for row in rows if row not in firsts and row["step_kind"] == "REAL"]
    assert all(ratio != 1.0 for ratio in moved), "the later steps' weights are others"


def one_bit_off(rank: int, world: int, given: list[str]) -> tuple[int, str]:
    """Run the command line with an engine that reports one token's log-prob a bit too high."""
    from megatron_rl.rollout.engines import bitwise as bitwise_engine

    true = bitwise_engine.rank_logprob
    calls = 0

    def moved(*arguments, **named):
        nonlocal calls
        logprobs = true(*arguments, **named)
        calls += 1
        if calls == 2:
            logprobs[3] = torch.nextafter(logprobs[3], torch.zeros(()))
        return logprobs

    with mock.patch.object(bitwise_engine, "rank_logprob", moved):
        return command_line(rank, world, given)


def test_one_bit_in_one_log_prob_ends_the_run(made, tmp_path) -> None:
    (said,) = made.into(tmp_path, 1, *GIVEN, run=one_bit_off, code=EXIT_FAILED)
    assert re.search(r"rollout\.bitwise=true: sample \S+#\d, position 1 of its response.*\(1 such of", said), said
    assert not (tmp_path / "metrics.jsonl").exists() or not rows_of(tmp_path)


def test_a_dry_run_refuses_a_mixture(arithmetic, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    tiny_config("mixtral", vocab_size=17).save_pretrained(tmp_path / "mixture")
    given = [f"model.hf_path={tmp_path / 'mixture'}", f"model.tokenizer_path={arithmetic / 'model'}"]
    assert train.main([*arguments(arithmetic, tmp_path / "run", *GIVEN, *given), "--dry-run"]) == EXIT_CONFIG
    assert "rollout.bitwise=true is for dense models, and this one mixes 4 experts" in capsys.readouterr().err
