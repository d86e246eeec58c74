"""The command line answers what new users typed with one sentence and exit code 2, before anything is imported."""

from __future__ import annotations

import threading

import pytest

from megatron_rl import cli
from megatron_rl.distributed import time_limit
from tests.patience import HANG_S, patient


def never(config: object) -> bool:
    raise AssertionError("the run began")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train.steps=3"], "as in train.num_rollouts=3"),
        (["+train.steps=3"], "as in train.num_rollouts=3"),
        (["train.steps=3"], "config key train.steps (value 3) is called train.num_rollouts now; rename it"),
        (["--run-dri", "x"], "'--run-dri' is no option; those are -h, --help, --config, --run-dir"),
        (["train.num_rollouts", "=", "3"], "is not of the form section.key=value, without spaces around the ="),
        (["--config", "no.yaml"], "no.yaml cannot be read: No such file or directory (working directory "),
        (["optimizer.lr=nan"], "optimizer.lr=nan must be at least 0 and at most 10"),
        ([], "model.hf_path='' names no model"),
    ],
)
def test_a_mistake_ends_in_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(never, arguments) == cli.EXIT_CONFIG
    said = capsys.readouterr().err
    assert said.startswith("megatron_rl: ") and words in said and said.count("\n") == 1, said


ENDED = threading.Event()


def hanging_estimator(rewards: object) -> list[float]:
    assert ENDED.wait(patient(HANG_S))
    return [0.0] * len(rewards.totals)


def test_a_users_function_that_hangs_in_its_check_ends_the_process(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(time_limit.os, "_exit", lambda code: ENDED.set())
    cli.main(never, [f"advantage.estimator={__name__}:hanging_estimator", "run.deadline_s=1"])
    said = capfd.readouterr().err
    assert "rank 0 has been in the check of the configuration for longer than run.deadline_s=1 s" in said
    assert "hanging_estimator" in said
