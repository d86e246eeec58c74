"""The command line answers what new users typed with one sentence and exit code 2, before anything is imported."""

from __future__ import annotations

import pytest

from megatron_rl import cli


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
