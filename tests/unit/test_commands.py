"""The command lines: the process that each word becomes, and one sentence for what cannot be followed."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import threading

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from transformers import AutoTokenizer

from megatron_rl import __version__, cli
from megatron_rl.commands import command, launch, ranks
from megatron_rl.commands.new_run import write_run
from megatron_rl.config import load_config
from megatron_rl.distributed import time_limit
from megatron_rl.errors import ConfigError
from tests.patience import HANG_S, patient

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


def test_a_word_becomes_its_program() -> None:
    for words, becomes in (
        (["train", "--config", "a.yaml"], [sys.executable, "-m", "megatron_rl.train", "--config", "a.yaml"]),
        (["train", "--nproc", "2", "run.seed=1"], [*TORCHRUN, "2", "-m", "megatron_rl.train", "run.seed=1"]),
        (["serve", "run.seed=1", "--nproc=4"], [*TORCHRUN, "4", "-m", "megatron_rl.serve", "run.seed=1"]),
        (["convert", "inspect", "m"], [sys.executable, "-m", "megatron_rl.commands.convert", "inspect", "m"]),
        (["verify", "--nproc", "2"], [*TORCHRUN, "2", "-m", "megatron_rl.commands.verify"]),
        (["simulate", "--nodes", "4"], [sys.executable, "-m", "megatron_rl.simulator", "--nodes", "4"]),
        (["doctor"], [sys.executable, "-m", "megatron_rl.doctor"]),
    ):
        with pytest.raises(Became) as became:
            command.main(words)
        assert became.value.args == (becomes,)


def test_a_mistake_ends_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["trian"], f"'trian' is no command; those are {', '.join([*command.VERBS, *command.HERE])}"),
        (["train", "--nproc"], "--nproc needs a number of processes"),
        (["train", "--nproc", "0"], "--nproc '0' is no number of processes"),
        (["train", "--nproc=two"], "--nproc 'two' is no number of processes"),
        (["train", "--nproc", "2", "--nproc", "3"], "--nproc stands twice: 2 and '3'"),
        (["train", "--nproc", "2", "optimizer.lrr=3"], "unknown config key optimizer.lrr (value 3)"),
        (["serve", "--nproc", "2", "serve.prot=3"], "the nearest known key is serve.port"),
        (["train", "--nproc", "2", "--config", "no.yaml"], "no.yaml cannot be read"),
        (["train", "--nproc", "2", "--nodes", "2"], "--nodes 2: a job of so many GPUs is forecast by --dry-run"),
        (["new", "/proc/no/run"], "/proc/no/run cannot be made: No such file or directory (/proc/no)"),
        (["doctor", "--nproc", "2"], "megatron-rl doctor runs as one process; leave --nproc 2 out"),
    ):
        assert command.main(words) == command.EXIT_CONFIG
        error = capsys.readouterr().err
        assert error.startswith("megatron_rl: ") and said in error and error.count("\n") == 1, error


def test_help_names_every_word_and_processes_are_refused_within_a_world(capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert command.main(["train", "--nproc", "2"]) == command.EXIT_CONFIG
    assert "within a rank of another launcher (RANK=3 in the environment)" in capsys.readouterr().err
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
    # with prompts of the user's own
    write_run(f"{tmp_path}/another", model="", prompts="my.jsonl", environment="/venv")
    config = load_config(f"{tmp_path}/another/run.yaml", [])
    assert (config.model.hf_path, config.data.train) == ("", ("my.jsonl",))
    assert not (tmp_path / "another" / "prompts.jsonl").exists()


@pytest.mark.parametrize(("rows", "engine"), [(1_000_000, "transformers"), (1_000_001, "vllm")])
def test_a_new_run_of_a_model_too_large_for_the_embedded_engine_asks_for_vllm(
    tmp_path, monkeypatch, rows, engine
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    size = rows * 1000 * 2
    header = json.dumps({"w": {"dtype": "BF16", "shape": [rows, 1000], "data_offsets": [0, size]}}).encode()
    with open(model / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)  # a sparse file takes no room
    write_run(str(tmp_path / "mine"), model=str(model), prompts=None, environment="/venv")
    assert load_config(f"{tmp_path}/mine/run.yaml", []).rollout.engine == engine
    monkeypatch.chdir(model)  # the folder in which the command is called is no model that was named
    write_run(str(tmp_path / "open"), model="", prompts=None, environment="/venv")
    assert load_config(f"{tmp_path}/open/run.yaml", []).rollout.engine == "transformers"


@pytest.mark.parametrize(("model", "engine"), [
    ("/models/Qwen2.5-7B-Instruct", "vllm"), ("Qwen/Qwen3-30B-A3B", "vllm"), ("/models/Qwen3-0.6B", "transformers"),
    ("/models/llama-3.2-1b", "transformers"), ("/models/3Bears", "transformers"), ("", "transformers"),
])
def test_a_new_run_of_a_model_that_lies_elsewhere_reads_its_size_in_its_name(tmp_path, model, engine) -> None:
    write_run(str(tmp_path / "mine"), model=model, prompts=None, environment="/venv")
    assert load_config(f"{tmp_path}/mine/run.yaml", []).rollout.engine == engine


def test_a_tiny_run_brings_its_model_and_the_lines_that_start_it(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["new", "runs/mine", "--tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "runs/mine: run.yaml, reward.py, job.sbatch, slurm, prompts.jsonl, model"
    assert {*lines[0].split(": ")[1].split(", ")} == {path.name for path in pathlib.Path("runs/mine").iterdir()}
    assert lines[1:] == [
        "next: megatron-rl train --config runs/mine/run.yaml --dry-run",
        "then: megatron-rl train --nproc 2 --config runs/mine/run.yaml",
    ]
    config = load_config("runs/mine/run.yaml", [])
    assert config.model.hf_path == "runs/mine/model" and config.sft.steps == 100 and config.optimizer.lr == 3e-4
    tokenizer = AutoTokenizer.from_pretrained("runs/mine/model")
    for row in map(json.loads, pathlib.Path("runs/mine/prompts.jsonl").read_text().splitlines()):
        text = row["prompt"] + row["solution"]
        assert row["solution"] == row["answer"] and tokenizer.decode(tokenizer(text).input_ids) == text
    assert command.main(["new", "other", "--tiny", "--model", "m"]) == command.EXIT_CONFIG
    assert "--tiny brings a model and its prompts" in capsys.readouterr().err and not pathlib.Path("other").exists()


def test_the_command_says_its_release(capsys) -> None:
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"megatron-rl {__version__}\n"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, model, said in (
        ("there", "", "is there already; name a folder that is not"),
        ("my run", "", "has characters that YAML, bash and SLURM would read otherwise"),
        ("mine", "a:b", "--model 'a:b' has characters"),
        ("/", "", "the folder has no name"),
    ):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "there").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=said):
            write_run(folder, model=model, prompts=None, environment="/venv")
        assert [path.name for path in tmp_path.iterdir()] == ["there"]


# --- the ranks of --nproc


@pytest.mark.parametrize(("codes", "code", "said"), [
    ({0: 2, 1: 2}, 2, ""), ({1: 75}, 75, ""), ({0: 130}, 130, ""),
    ({1: 1, 0: -15}, 1, "rank 1 (process 101) ended with exit code 1 (its error stands above)"),
    ({0: 1, 1: -9}, 137, "rank 1 (process 101) was ended by SIGKILL, as the kernel does where"),
    ({0: 5}, 5, "rank 0 (process 100) ended with exit code 5; the others"),
])
def test_the_end_of_ranks_is_one_line_at_most(capsys, codes: dict[int, int], code: int, said: str) -> None:
    """codes: of the ranks that failed, in the order of time."""
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=found, error_file="<N/A>")
        for rank, found in codes.items()
    }
    for time, failure in enumerate(failures.values()):
        failure.timestamp = time
    assert ranks.explain(ChildFailedError("train", failures)) == code
    printed = capsys.readouterr().err
    assert printed == "" if not said else said in printed and printed.count("\n") == 1, printed


RANK = """
import os, signal, sys
from torch.distributed import TCPStore
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
store = TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False)
if store.add("started", 1) == 2:
    store.set("both", "")
if os.environ["RANK"] == "1" and sys.argv[1] != "waits":
    print("mine", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "killed" else sys.exit(int(sys.argv[1]))
while True:
    signal.pause()
"""


@pytest.mark.long(seconds=30)
@pytest.mark.parametrize(("does", "code", "lines"), [
    ("2", 2, ["mine"]), ("killed", 137, ["mine", "megatron_rl: rank 1"]), ("waits", 130, []),
])
def test_the_launcher_adds_no_report(tmp_path: pathlib.Path, does: str, code: int, lines: list[str]) -> None:
    """Two real ranks: one that ends, one that is killed, and both under Ctrl-C, as a terminal gives it to all."""
    (tmp_path / "rank.py").write_text(RANK)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [*TORCHRUN, "2", str(tmp_path / "rank.py"), does, str(store.port)]
    job = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT)
    if does == "waits":
        store.wait(["both"], datetime.timedelta(seconds=patient(HANG_S)))
        os.killpg(job.pid, signal.SIGINT)
    _, said = job.communicate(timeout=patient(HANG_S))
    assert job.returncode == code, said
    assert len(said.splitlines()) == len(lines) and all(map(str.startswith, said.splitlines(), lines)), said


# --- python -m megatron_rl.train


def never(config: object) -> bool:
    raise AssertionError("the run began")


def test_a_trainers_mistake_is_one_sentence(capsys, monkeypatch) -> None:
    for arguments, words in (
        (["--train.steps=3"], "as in train.num_rollouts=3"),
        (["+train.steps=3"], "as in train.num_rollouts=3"),
        (["train.steps=3"], "config key train.steps (value 3) is called train.num_rollouts now; rename it"),
        (["--run-dri", "x"], "'--run-dri' is no option; those are -h, --help, --config, --run-dir"),
        (["train.num_rollouts", "=", "3"], "is not of the form section.key=value, without spaces around the ="),
        (["--config", "no.yaml"], "no.yaml cannot be read: No such file or directory (working directory "),
        (["optimizer.lr=nan"], "optimizer.lr=nan must be at least 0 and at most 10"),
        ([], "model.hf_path='' names no model"),
        (["--nodes", "4", "--gpus-per-node", "8", "run.name=a b"], "torchrun --nnodes 4 --rdzv-backend c10d "
         "--rdzv-endpoint HOST:29400 --nproc-per-node 8 -m megatron_rl.train 'run.name=a b'"),
        (["--gpus-per-node", "2", "--run-dir", "x"], ": torchrun --standalone --local-addr 127.0.0.1 "
         "--nproc-per-node 2 -m megatron_rl.train --run-dir x"),
        (["--pass-rate", "beta:1,1"], "--pass-rate beta:1,1: arguments of a forecast, and nothing is forecast"),
    ):
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        assert cli.main(never, arguments) == cli.EXIT_CONFIG
        said = capsys.readouterr().err
        assert said.startswith("megatron_rl: ") and words in said and said.count("\n") == 1, said


ENDED = threading.Event()


def hanging_estimator(rewards: object) -> list[float]:
    assert ENDED.wait(patient(HANG_S))
    return [0.0] * len(rewards.totals)


def test_a_users_function_that_hangs_in_its_check_ends_the_process(capfd, monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(time_limit.os, "_exit", lambda code: ENDED.set())
    cli.main(never, [f"advantage.estimator={__name__}:hanging_estimator", "run.deadline_s=1"])
    said = capfd.readouterr().err
    assert "rank 0 has been in the check of the configuration for longer than run.deadline_s=1 s" in said
    assert "hanging_estimator" in said
