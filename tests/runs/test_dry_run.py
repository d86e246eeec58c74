"""Checks ``--dry-run``: it ends with 0 where the job would start and fit, else with 2 and the way out."""

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl import cli, train
from megatron_rl.commands import command
from megatron_rl.config import Config
from megatron_rl.distributed.run_lock import RunLock
from megatron_rl.simulator import __main__ as simulate_cluster
from megatron_rl.trainer.build import build_run
from megatron_rl.trainer.supervised import start_supervised_optimizer
from tests.pairwise import quick
from tests.reference import tiny_config
from tests.runs.command import ROOT, arguments, ended, write_teacher

GIVEN = ("parallel.pipeline=2", "plan.max_tokens_per_microbatch=256", "data.max_prompt_tokens=16",
         "rollout.max_response_tokens=16", "reward.functions=[arithmetic]", "metrics.progress=false")
SEPARATE = ("advantage.estimator=gae", "critic.placement=separate")
ON_ENGINES = ("rollout.engine=vllm", "model.dtype=bfloat16")
SERVED = "rollout.servers=[http://a:1]"
SHORT_ENGINE = ("model.dtype=bfloat16", "rollout.gpu_memory_utilization=0.05", "--gpu-memory-gib=0.003")
# name → (family, settings, a setting that one way out names, the least number of ways out)
TOO_LARGE = {"policy": ("qwen3", [SERVED, "--gpu-memory-gib=0.02"], "parallel.tensor=2", 4),
             "separate critic": ("qwen3", [SERVED, *SEPARATE, "critic.ranks=2", "--gpu-memory-gib=0.0325"],
                                 "critic.parallel.tensor=2", 4),
             "experts": ("qwen3_moe", [SERVED, ON_ENGINES[1], "--gpu-memory-gib=0.012"], "parallel.expert=4", 4),
             "trainer and engine, by no one setting": ("qwen3_moe", SHORT_ENGINE, "parallel.pipeline=4", 3)}
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
    assert dry_run(arithmetic) == 0
    assert "PP 2, DP 6" in capsys.readouterr().out
    assert dry_run(arithmetic, *SEPARATE, "critic.ranks=4") == 0  # every sample trains, and four ranks hold no policy
    said = capsys.readouterr()
    assert "PP 2, DP 4" in said.out and "critic: its memory is in" in said.err
    assert "the critic, on ranks of its own" in said.out.replace("\n", " ")
    assert dry_run(arithmetic, "--nodes", "1", "rollout.engine=vllm", "--gpus-per-node=2") == 0
    assert "40.0 of them the engine's" in capsys.readouterr().out


@pytest.mark.parametrize(("given", "message"), [
    (["parallel.pipeline=3"], "world size 8 is no multiple of"),
    (["--gpus-per-node=12", "parallel.pipeline=3"], "are 3 stages and"),
    ([*SEPARATE, "critic.ranks=8"], "critic.ranks=8 leaves the policy none of the 8 ranks"),
    ([*SEPARATE, "critic.ranks=4", "critic.parallel={tensor: 3}"], "world size 4 is no multiple of"),
    (["loss.kl_coefficient=0.1"], "skip.mode=exact"),
    (["plan.max_token=3"], "the nearest known key is plan.max_tokens_per_microbatch"),
    (["--lengths", "uniform:3"], "is not of the form lognormal:MEAN,SIGMA"),
    (["megatron.transformer.num_layers=3"], "is refused"), (["megatron.optimizer.lr=3"], "is refused"),
    (["rollout.max_response_tokens=5000"], "5000"), (["data.train=none.jsonl"], "none.jsonl"),
    (["data.prompt_key=question"], "has no column 'question'"),
    (["data.max_prompt_tokens=2"], "at most 2 are allowed"), (["eval.path=none.jsonl"], "eval.path='none.jsonl'"),
    (["sft.steps=2", "sft.eval_path=none.jsonl"], "sft.eval_path='none.jsonl'"),
    (["reward.functions=[no_such:score]"], "no_such"),
    (["reward.functions=[no_such:score]", "reward.num_workers=2"], "no_such"),
    (["environment.name=no_such:Game"], "no_such"), (["model.tokenizer_path=/nowhere"], "/nowhere"),
    ([*ON_ENGINES, "rollout.producer.mode=prefetch"], "the engines share its GPUs"),
    ([*ON_ENGINES, "rollout.num_engines=9"], "need 9 ranks and there are 8"),
    ([*ON_ENGINES, "rollout.tensor_parallel=16"], "rollout.tensor_parallel=16"),
    (["profile.steps=[1,2]", "profile.ranks=[0,8]"], "profile.ranks=[0, 8] names rank 8, and the policy has 8 ranks"),
    ([*SEPARATE, "critic.ranks=4", "profile.steps=[1,2]", "profile.ranks=[4]"], "the policy has 4 ranks"),
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


def test_the_number_of_gpus_is_assumed_and_vllm_asked_for(arithmetic, capsys, monkeypatch) -> None:
    assert dry_run(arithmetic) == 0 and "8 GPUs on 1 node are assumed" in capsys.readouterr().err
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
    family, extra, named, least = TOO_LARGE[case]
    tiny_config(family, layers=8).save_pretrained(tmp_path / "model")
    written = tmp_path / "figures.json"
    given = [
        "--nodes=1", *extra, f"--json={written}", f"model.hf_path={tmp_path / 'model'}", "data.max_prompt_tokens=64",
        "rollout.max_response_tokens=64", "rollout.engine=vllm",
        "plan.max_tokens_per_microbatch=512", "reward.functions=[arithmetic]",
    ]
    assert simulate_cluster.main(given) == cli.EXIT_CONFIG
    said = capsys.readouterr().err
    _, _, listed = said.partition("It would fit with: ")
    ways_out = [each.rsplit(" (", 1)[0].split() for each in listed.rsplit(" (docs", 1)[0].split(" | ")]
    assert len(ways_out) >= least and any(named in settings for settings in ways_out), said
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


# A dry run and a start of one process have the same verdict, on rows of a user's own columns.
RECIPES, EXAMPLES = ROOT / "examples" / "recipes", ROOT / "examples"
OWN_KEYS = ("data.prompt_key=question", "data.solution_key=reply", "preference.chosen_key=good",
            "preference.rejected_key=bad")
SMALL = ("data.answer_key=label", "data.max_prompt_tokens=16", "rollout.max_response_tokens=6",
         "rollout.samples_per_prompt=2", "train.prompts_per_rollout=4")
ALONE = ("parallel.tensor=1", "parallel.expert=1", "parallel.pipeline=1", "parallel.sequence_parallel=false",
         "data.system_prompt=''", "data.template='{prompt}'", "rollout.engine=transformers",
         "eval.path={rows}/all.jsonl", "sft.samples_per_step=8")
PARITY_OF = "reward.functions=[tests.reward_functions:parity]"
RL = (*SMALL, "data.train={rows}/rl.jsonl", PARITY_OF)
SFT = ("data.train={rows}/sft.jsonl", "train.num_rollouts=0", "sft.steps=2", "sft.samples_per_step=8")
DPO = (*SFT, "data.train={rows}/pairs.jsonl", "preference.loss=dpo", "skip.mode=approximate")
# name → (settings, the words of both refusals; "": both start)
QUICK_PAIRS = {
    "RL without a column of solutions": (RL, ""),
    "SFT of a model whose context is below the rollout's lengths": (SFT, ""),
    "DPO": (DPO, ""),
    "a supervised start without a column of solutions": ((*RL, "sft.steps=2"), "has no column 'reply'"),
    "a response beyond the cap": ((*SFT, "plan.max_tokens_per_microbatch=4", "plan.on_long_sample=fail"),
                                  "more than plan.max_tokens_per_microbatch=4"),
    "files that lack a tensor": ((*RL, "model.hf_path={rows}/no_mlp"), "holds no tensor named"),
    "a field that Megatron-Core refuses": ((*RL, "megatron.transformer.recompute_granularity=full"),
                                           "recompute_method must be"),
}
LONG_PAIRS = {
    "a reward model": ((*DPO, "preference.loss=bradley_terry"), ""),
    "adapters on pairs": ((*DPO, "lora.rank=4", "lora.alpha=8"), ""),
    "epochs of SFT": ((*SFT, "sft.steps=0", "sft.epochs=2", "sft.eval_share=0.1"), ""),
    "SFT with the engine's rewards": ((*SFT, *SMALL, "eval.path={rows}/rl.jsonl", PARITY_OF,
                                       "data.train={rows}/all.jsonl"), ""),
    "responses beyond the context": ((*SFT, "data.train={rows}/beyond.jsonl"), "the model's context 64"),
    "responses beyond the context, dropped": ((*SFT, "data.train={rows}/beyond.jsonl", "data.on_long_prompt=drop"), ""),
    "an unknown column of pairs": ((*DPO, "preference.rejected_key=worse"), "has no column 'worse'"),
    "PPO": ((*RL, "advantage.estimator=gae"), ""),
    "PPO of a critic whose files lack a tensor": ((*RL, "advantage.estimator=gae", "critic.hf_path={rows}/no_mlp"),
                                                  "holds no tensor named"),
    "a teacher whose files lack a tensor": ((*RL, "advantage.estimator=distillation", "teacher.hf_path={rows}/no_mlp"),
                                            "holds no tensor named"),
    "a KL under the exact skip": ((*RL, "loss.kl_coefficient=0.1"), "skip.mode=exact"),
    "experts of a dense model": ((*RL, "rollout.routing_replay=rollout"), "replays the experts of a mixture"),
    "a kernel that is not here": ((*RL, "model.logprob_kernel=triton"), "which is not installed"),
    "a chat template that is not there": ((*RL, "data.template=chat"), "the tokenizer has no chat template"),
    "an environment": ((*RL, "environment.name=calculator", "reward.functions=[environment]"), ""),
}


def begin(config: Config) -> bool:
    """Build the run's parts as ``train`` does, take the first supervised step and the first rollout's, and end."""
    with build_run(config) as run:
        if run.start is not None:
            start_supervised_optimizer(run.backend, run.start.settings, run.start.optimizer)
            if run.start.keeps_reference:
                run.backend.keep_reference()
            run.start.task.step()
        if config.train.num_rollouts != 0 and config.rollout.endpoint.agent is None:
            run.begin_rl()
            train.train_on_rollout(run, 0)
    return True


def begun(rank: int, world: int, given: list[str]) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = cli.main(begin, given)
    return code, said.getvalue()


@pytest.fixture(scope="module")
def own_rows(arithmetic, tmp_path_factory) -> pathlib.Path:
    """Files of rows with a user's own columns: for RL, SFT and pairs alone, and with all of them."""
    folder = tmp_path_factory.mktemp("own")
    rows = [json.loads(line) for line in (arithmetic / "train.jsonl").read_text().splitlines()]
    columns = {"rl": ("label",), "sft": ("reply",), "pairs": ("good", "bad"), "all": ("label", "reply", "good", "bad")}
    for name, kept in columns.items():
        with (folder / f"{name}.jsonl").open("w") as file:
            for row in rows:
                whole = dict(label=row["answer"], reply=row["answer"], good=row["answer"], bad=row["answer"] + "1")
                file.write(json.dumps({"question": row["prompt"]} | {name: whole[name] for name in kept}) + "\n")
    lengths = [9] * 20 + [80]
    lines = [json.dumps({"question": "1+1=", "reply": "1" * length}) for length in lengths]
    (folder / "beyond.jsonl").write_text("\n".join(lines))
    shutil.copytree(arithmetic / "model", folder / "no_mlp")
    tensors = load_file(folder / "no_mlp" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name}
    save_file(kept, folder / "no_mlp" / "model.safetensors", metadata={"format": "pt"})
    return folder


def same_verdict(pool, arithmetic, rows, run_dir, capsys, settings, words: str = "") -> None:
    own = [setting.format(rows=rows, prompt="{prompt}") for setting in (*OWN_KEYS, *settings)]
    given = [f"model.hf_path={arithmetic / 'model'}", f"run.dir={run_dir}", "metrics.progress=false", *own]
    code, forecast = said_by_dry_run(given, capsys)
    ((started, said),) = pool.run(1, begun, given, timeout_s=120)
    assert code == started == (cli.EXIT_CONFIG if words else 0), (forecast, said)
    assert not words or (forecast == refusal(said) and words in forecast), (forecast, said)


@pytest.mark.parametrize("case", quick(QUICK_PAIRS | LONG_PAIRS, *QUICK_PAIRS))
def test_a_dry_run_says_what_the_start_says(pool, arithmetic, own_rows, tmp_path, capsys, case) -> None:
    settings, words = (QUICK_PAIRS | LONG_PAIRS)[case]
    same_verdict(pool, arithmetic, own_rows, tmp_path, capsys, settings, words)


OF_METHOD = {"distillation": ("teacher.hf_path={rows}/../teacher",), "dapo": ("reward.overlong_buffer_tokens=2",),
             "ppo": ("critic.parallel.tensor=1",)}
OF_PAIRS = ("data.train={rows}/pairs.jsonl", "sft.warmup_steps=0", "sft.samples_per_step=8")
CONFIGS = sorted(path.relative_to(EXAMPLES) for path in EXAMPLES.glob("*/*.yaml") if path.parent.name != "tinker")


@pytest.mark.long(seconds=60)
@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_a_dry_run_accepts_each_example_as_the_start_does(pool, arithmetic, own_rows, tmp_path, capsys, path) -> None:
    text = (EXAMPLES / path).read_text()
    if path.parent.name != "recipes":
        settings = (*SMALL, "data.train={rows}/all.jsonl", *ALONE)
    elif "preference:" in text:
        settings = OF_PAIRS
    else:
        settings = ("data.train={rows}/sft.jsonl",) if path.stem == "sft" else (*SMALL, "data.train={rows}/rl.jsonl")
    if path.stem == "distillation":
        write_teacher(arithmetic / "model", own_rows.parent / "teacher")
    given = ("--config", str(EXAMPLES / path), *settings, *OF_METHOD.get(path.stem, ()))
    same_verdict(pool, arithmetic, own_rows, tmp_path / "run", capsys, given)


def test_a_new_run_s_own_command_is_a_dry_run_that_accepts(pool, arithmetic, tmp_path, capsys, monkeypatch) -> None:
    """The line that `new` prints ends with 0 as it stands, on own prompts too, and says what it assumed."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(arithmetic / "model", "model")
    pathlib.Path("own.jsonl").write_text("".join(f'{{"prompt": "{a}+1=", "answer": "1"}}\n' for a in range(9)))
    short = ["data.max_prompt_tokens=16", "rollout.max_response_tokens=6"]
    for folder, more in (("mine", []), ("other", ["--prompts", "own.jsonl"])):
        assert command.main(["new", folder, "--model", "model", *more]) == 0
        printed = capsys.readouterr().out.partition("next: megatron-rl train ")[2].splitlines()[0].split()
        assert printed[-1] == "--dry-run"
        assert train.main([*printed, *short]) == 0
        assert "8 GPUs on 1 node are assumed, as by --nodes 1 --gpus-per-node 8" in capsys.readouterr().err
        ((code, said),) = pool.run(1, begun_in, str(tmp_path), [*printed[:-1], *short, "train.prompts_per_rollout=4"])
        assert code == 0, said


def begun_in(rank: int, world: int, folder: str, given: list[str]) -> tuple[int, str]:
    with contextlib.chdir(folder):
        return begun(rank, world, given)
