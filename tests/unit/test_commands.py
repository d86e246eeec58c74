"""`megatron-rl`: the process that each word becomes, and the sentences for words that cannot be followed."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

from megatron_rl.commands import command, launch
from megatron_rl.commands.new_run import write_run
from megatron_rl.config import load_config
from megatron_rl.errors import ConfigError

ROOT = pathlib.Path(__file__).parents[2]
TORCHRUN = [*launch.TORCHRUN, "--nproc-per-node"]


class Became(Exception):
    """Stands for the process that this one would have been replaced by."""


@pytest.fixture(autouse=True)
def _no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launch.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def become(path: str, words: list[str]) -> None:
        assert path == words[0]
        raise Became(words)

    monkeypatch.setattr(launch.os, "execv", become)


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        (["train", "--config", "a.yaml"], [sys.executable, "-m", "megatron_rl.train", "--config", "a.yaml"]),
        (["train", "--nproc", "2", "x.y=1"], [*TORCHRUN, "2", "-m", "megatron_rl.train", "x.y=1"]),
        (["serve", "x.y=1", "--nproc=4"], [*TORCHRUN, "4", "-m", "megatron_rl.serve", "x.y=1"]),
        (["convert", "inspect", "m"], [sys.executable, str(ROOT / "tools/convert_checkpoint.py"), "inspect", "m"]),
        (["verify", "--nproc", "2"], [*TORCHRUN, "2", str(ROOT / "tools/verify_topology.py")]),
        (["simulate", "--nodes", "4"], [sys.executable, str(ROOT / "tools/simulate_cluster.py"), "--nodes", "4"]),
        (["doctor"], [sys.executable, "-m", "megatron_rl.doctor"]),
    ],
)
def test_a_word_becomes_its_program(words: list[str], becomes: list[str]) -> None:
    with pytest.raises(Became) as became:
        command.main(words)
    assert became.value.args == (becomes,)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["trian"],
            "'trian' is no command; those are train, serve, watch, convert, verify, simulate, doctor, new, translate",
        ),
        (["train", "--nproc"], "--nproc needs a number of processes"),
        (["train", "--nproc", "0"], "--nproc '0' is no number of processes"),
        (["train", "--nproc=two"], "--nproc 'two' is no number of processes"),
        (["train", "--nproc", "2", "--nproc", "3"], "--nproc stands twice: 2 and '3'"),
        (["doctor", "--nproc", "2"], "megatron-rl doctor runs as one process; leave --nproc 2 out"),
    ],
)
def test_a_mistake_ends_in_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words) == command.EXIT_CONFIG
    error = capsys.readouterr().err
    assert error.startswith("megatron_rl: ") and said in error and error.count("\n") == 1, error


def test_processes_are_refused_within_a_world(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    assert command.main(["train", "--nproc", "2"]) == command.EXIT_CONFIG
    assert "within a rank of another launcher (RANK=3 in the environment)" in capsys.readouterr().err


def test_help_names_every_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in [*command.VERBS, *command.HERE])
    assert command.main([]) == command.EXIT_CONFIG


def test_a_new_run_is_read_as_it_says(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["new", "runs/mine", "--model", "/models/a"]) == 0
    config = load_config("runs/mine/run.yaml", [])
    assert (config.run.name, config.run.dir, config.model.hf_path) == ("mine", "runs/mine/run", "/models/a")
    assert config.reward.functions == ("runs/mine/reward.py:score",) and config.data.template == "{prompt}"
    (prompts,) = config.data.train
    rows = [json.loads(line) for line in pathlib.Path(prompts).read_text().splitlines()]
    assert len(rows) == 100 and all(eval(row["prompt"][:-1]) == int(row["answer"]) for row in rows)


def test_a_new_run_with_prompts_of_the_users(tmp_path: pathlib.Path) -> None:
    write_run(f"{tmp_path}/mine", model="", prompts="my.jsonl", environment="/venv")
    config = load_config(f"{tmp_path}/mine/run.yaml", [])
    assert (config.model.hf_path, config.data.train) == ("", ("my.jsonl",))
    assert not (tmp_path / "mine" / "prompts.jsonl").exists()


@pytest.mark.parametrize(
    ("folder", "model", "said"),
    [
        ("there", "", "is there already; name a folder that is not"),
        ("my run", "", "has characters that YAML, bash and SLURM would read otherwise"),
        ("mine", "a:b", "--model 'a:b' has characters"),
        ("/", "", "the folder has no name"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused(
    folder: str, model: str, said: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match=said):
        write_run(folder, model=model, prompts=None, environment="/venv")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
