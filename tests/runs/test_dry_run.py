"""Checks ``--dry-run``: it ends with 0 where the job would start and fit, else with 2 and the way out."""

import importlib.util
import json
import os
import pathlib
import shutil

import pytest
import torch

from megatron_rl import cli, train
from megatron_rl.distributed.run_lock import RunLock
from megatron_rl.simulator import __main__ as simulate_cluster
from tests.pairwise import quick
from tests.reference import tiny_config
from tests.runs.command import arguments, ended

GIVEN = ("parallel.pipeline=2", "plan.max_tokens_per_microbatch=256", "data.max_prompt_tokens=16",
         "rollout.max_response_tokens=16", "reward.functions=[arithmetic]", "metrics.progress=false")
SEPARATE = ("advantage.estimator=gae", "critic.placement=separate")
ON_ENGINES = ("rollout.engine=vllm", "model.dtype=bfloat16")
TOO_LARGE = {"policy": (["--gpu-memory-gib=0.02"], "parallel.tensor=2"),
             "separate critic": ([*SEPARATE, "critic.ranks=2", "--gpu-memory-gib=0.0325"], "critic.parallel.tensor=2")}
ONCE = ("checkpoint.save_every_rollouts=1", "train.num_rollouts=1", "optimizer.schedule=constant")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(train, "train", lambda config: pytest.fail("a dry run must not train"))


def dry_run(folder: pathlib.Path, *given: str) -> int:
    inputs = (f"model.hf_path={folder / 'model'}", f"data.train={folder / 'train.jsonl'}")
    return train.main([*inputs, *GIVEN, "--dry-run", *given])


def test_a_job_that_would_start_ends_with_0_and_joins_nothing(arithmetic, capsys, monkeypatch) -> None:
    assert dry_run(arithmetic, "--nodes", "1", "sft.steps=2", f"eval.path={arithmetic / 'test.jsonl'}") == 0
    said = capsys.readouterr()
    assert "PP 2, DP 4" in said.out and not torch.distributed.is_initialized()
    assert "prompts of 4.0 tokens (data.train)" in said.out and "GPU: training 0.00" in said.out
    monkeypatch.setenv("WORLD_SIZE", "12")
    assert dry_run(arithmetic, "data.solution_key=none") == 0  # which RL alone does not read
    assert "PP 2, DP 6" in capsys.readouterr().out
    assert dry_run(arithmetic, *SEPARATE, "critic.ranks=4") == 0  # every sample trains, and four ranks hold no policy
    said = capsys.readouterr()
    assert "PP 2, DP 4" in said.out and "critic: its memory is in" in said.err
    assert "the critic, on ranks of its own" in said.out.replace("\n", " ")
    assert dry_run(arithmetic, "--nodes", "1", "rollout.engine=vllm", "--gpus-per-node=2") == 0
    assert "40.0 of them the engine's" in capsys.readouterr().out


@pytest.mark.parametrize(("given", "message"), [
    (["parallel.pipeline=3"], "world size 8 is no multiple of"),
    (["--gpus-per-node=12", "parallel.pipeline=3"], "does not divide num_hidden_layers=2"),
    ([*SEPARATE, "critic.ranks=8"], "critic.ranks=8 of 8 ranks leave the policy none"),
    ([*SEPARATE, "critic.ranks=4", "critic.parallel={tensor: 3}"], "world size 4 is no multiple of"),
    (["loss.kl_coefficient=0.1"], "skip.mode=exact"),
    (["plan.max_token=3"], "the nearest known key is plan.max_tokens_per_microbatch"),
    (["--lengths", "uniform:3"], "is not of the form lognormal:MEAN,SIGMA"),
    (["megatron.transformer.num_layers=3"], "is refused"), (["megatron.optimizer.lr=3"], "is refused"),
    (["rollout.max_response_tokens=5000"], "5000"), (["data.train=none.jsonl"], "none.jsonl"),
    (["data.prompt_key=question"], "has no column 'question'"),
    (["data.max_prompt_tokens=2"], "at most 2 are allowed"), (["eval.path=none.jsonl"], "eval.path='none.jsonl'"),
    (["sft.steps=2", "data.solution_key=steps"], "has no column 'steps'"),
    (["sft.steps=2", "sft.eval_path=none.jsonl"], "sft.eval_path='none.jsonl'"),
    (["reward.functions=[no_such:score]"], "no_such"),
    (["reward.functions=[no_such:score]", "reward.num_workers=2"], "no_such"),
    (["environment.name=no_such:Game"], "no_such"), (["model.tokenizer_path=/nowhere"], "/nowhere"),
    ([*ON_ENGINES, "rollout.producer.mode=prefetch"], "the engines share its GPUs"),
    ([*ON_ENGINES, "rollout.num_engines=9"], "need 9 ranks and there are 8"),
    ([*ON_ENGINES, "rollout.tensor_parallel=16"], "rollout.tensor_parallel=16"),
    (["--gpu-memory-gib=0.0005"], "the job does not fit: training needs 0.00"),
])
def test_a_job_that_cannot_start_ends_with_2_and_training_s_words(arithmetic, given, message, capsys) -> None:
    given = given if given[0].startswith("--gpus-per-node") else ["--nodes", "1", *given]
    assert dry_run(arithmetic, *given) == cli.EXIT_CONFIG and message in capsys.readouterr().err


def test_rows_without_a_column_that_reward_workers_need_are_refused_alike(arithmetic, tmp_path, capsys) -> None:
    (tmp_path / "own.py").write_text("def score(prompts, completions, completion_ids, level, **columns): pass\n")
    said = []
    for workers in (0, 4):
        given = (f"reward.functions={tmp_path}/own.py:score", f"reward.num_workers={workers}")
        assert dry_run(arithmetic, "--nodes=1", *given) == cli.EXIT_CONFIG
        said.append([line for line in capsys.readouterr().err.splitlines() if "has no column 'level'" in line])
    assert said[0] == said[1] and len(said[0]) == 1


def test_the_number_of_gpus_and_vllm_are_asked_for(arithmetic, capsys, monkeypatch) -> None:
    assert dry_run(arithmetic) == cli.EXIT_CONFIG and "add --nodes N" in capsys.readouterr().err
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "vllm" else find(name, *of))
    assert dry_run(arithmetic, "--gpus-per-node=2", *ON_ENGINES) == cli.EXIT_CONFIG
    assert "pip install 'megatron_rl[vllm]'" in capsys.readouterr().err
    assert dry_run(arithmetic, "--nodes=1", *ON_ENGINES) == 0  # another machine's environment is not seen from here
    assert "note: rollout.engine=vllm" in capsys.readouterr().err


def test_a_folder_without_weights_cannot_start(arithmetic, tmp_path, capsys) -> None:
    shutil.copytree(arithmetic / "model", tmp_path, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    assert dry_run(arithmetic, "--nodes=1", f"model.hf_path={tmp_path}") == cli.EXIT_CONFIG
    assert "safetensors" in capsys.readouterr().err
    assert dry_run(arithmetic, "--nodes=1", f"model.hf_path={tmp_path}", "model.init=random") == 0


@pytest.mark.parametrize("case", quick(TOO_LARGE, "policy"))
def test_each_way_out_that_is_named_fits(tmp_path, capsys, case) -> None:
    """A job too large for its GPUs names settings; with each of them alone the same forecast fits."""
    extra, named = TOO_LARGE[case]
    tiny_config("qwen3", layers=8).save_pretrained(tmp_path / "model")
    written = tmp_path / "figures.json"
    given = [
        "--nodes=1", *extra, f"--json={written}", f"model.hf_path={tmp_path / 'model'}", "data.max_prompt_tokens=64",
        "rollout.max_response_tokens=64", "rollout.servers=[http://a:1]", "rollout.engine=vllm",
        "plan.max_tokens_per_microbatch=512", "reward.functions=[arithmetic]",
    ]
    assert simulate_cluster.main(given) == cli.EXIT_CONFIG
    said = capsys.readouterr().err
    _, _, listed = said.partition("It would fit with: ")
    ways_out = [each.rsplit(" (", 1)[0].split() for each in listed.rsplit(" (docs", 1)[0].split(" | ")]
    assert len(ways_out) >= 4 and any(named in settings for settings in ways_out), said
    for settings in ways_out:
        assert simulate_cluster.main([*given, *settings]) == 0, settings
        assert json.loads(written.read_text())["shortfalls"] == []


# What it says of the run's folder is what the start says, and it writes nothing there.
def contents(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Return each path below a folder with its size and its last change, the folder's own included."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")]}


def refusal(said: str) -> str:
    return said.rpartition("megatron_rl: ")[2].strip()


def said_by_dry_run(given: list[str], capsys) -> tuple[int, str]:
    """Return the exit code of a dry run on one GPU, and what megatron_rl says last."""
    return train.main([*given, "--dry-run", "--gpus-per-node=1"]), refusal(capsys.readouterr().err)


def refused(given: list[str], capsys, *words: str) -> None:
    code, said = said_by_dry_run(given, capsys)
    assert code == cli.EXIT_CONFIG and all(word in said for word in words), said


@pytest.mark.long(seconds=40)
def test_a_finished_folder_is_refused_as_the_start_refuses_it(pool, arithmetic, tmp_path, capsys) -> None:
    run_dir = tmp_path / "run"
    ended(pool, 1, arguments(arithmetic, run_dir, *ONCE))
    for changes in (["optimizer.lr=0.5"], ["run.seed=5"]):
        given = arguments(arithmetic, run_dir, *ONCE, *changes)
        (said,) = ended(pool, 1, given, code=cli.EXIT_CONFIG)
        before = contents(run_dir)
        assert said_by_dry_run(given, capsys) == (cli.EXIT_CONFIG, refusal(said)) and contents(run_dir) == before
    for unchanged in (["metrics.progress=false"], ["train.num_rollouts=2"], ["checkpoint.resume=never"]):
        given = arguments(arithmetic, run_dir, *ONCE, *unchanged)
        assert said_by_dry_run(given, capsys)[0] == 0
    # a model of another shape, and a damaged checkpoint
    other = shutil.copytree(arithmetic / "model", tmp_path / "model")
    tiny_config("qwen3").save_pretrained(other)
    given = arguments(arithmetic, run_dir, *ONCE, f"model.hf_path={other}", "model.init=random")
    refused(given, capsys, "is of another model")
    for state in run_dir.glob("checkpoints/iter_*/state.json"):
        state.write_text(state.read_text()[:-9])
    refused(arguments(arithmetic, run_dir, *ONCE), capsys, "checkpoints in", "are damaged")


def test_a_folder_that_is_locked_or_cannot_be_made_is_refused_and_not_made(arithmetic, tmp_path, capsys, monkeypatch):
    new = tmp_path / "new" / "run"
    assert said_by_dry_run(arguments(arithmetic, new), capsys)[0] == 0 and not new.parent.exists()
    (tmp_path / "file").write_text("")
    wrong = {"file": "is a file, not a folder", "file/below": "Not a directory", "a" * 300: "File name too long"}
    for name, words in wrong.items():
        refused(arguments(arithmetic, tmp_path / name), capsys, words)
    lock = RunLock(tmp_path)
    lock.acquire()
    before = contents(tmp_path)
    refused(arguments(arithmetic, tmp_path), capsys, f"is in use by another run (process {os.getpid()} on")
    assert contents(tmp_path).keys() == before.keys()
    lock.release()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root, as whom tests may run, is refused nothing
    for path, words in [(tmp_path, "cannot be written: no permission"), (new, "cannot be made: Permission denied")]:
        refused(arguments(arithmetic, path), capsys, words)
