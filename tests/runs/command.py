"""Runs by their command line: arguments, runs that several tests read, what a run leaves, and how two are compared."""

import contextlib
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from unittest import mock

import psutil
import torch
from safetensors.torch import load_file

from tests.patience import patient

ROOT = pathlib.Path(__file__).parents[2]
DEADLINE_S = patient(60)
START, TARGET, HORIZON = 0.05, 1e-4, 200
KL = (f"loss.kl_coefficient={START}", "skip.mode=approximate", "optimizer.lr=1e-3",
      "reference.refresh_every_rollouts=2")
ADAPTIVE = (*KL, "reference.controller=adaptive", f"reference.kl_target={TARGET}", f"reference.kl_horizon={HORIZON}")
WARM = ("sft.steps=2", "sft.samples_per_step=8")
SHARDED_KL = ("optimizer.distributed=true", "loss.kl_coefficient=0.01", "skip.mode=approximate", *WARM)
SAVED = ("optimizer.schedule=constant", "checkpoint.save_every_rollouts=1", "checkpoint.keep_last=null")
PPO = ("advantage.estimator=gae", "advantage.lam=0.95", "critic.lr=1e-3", "rollout.samples_per_prompt=2",
       "train.samples_per_mini_batch=8", "reward.functions=[tests.reward_functions:graded]",
       "optimizer.schedule=constant", "train.epochs_per_rollout=2")


def command_line(rank: int, world: int, arguments: list[str]) -> tuple[int, str]:
    """Run ``python -m megatron_rl.train`` within a pool worker and return its exit code and what it said."""
    from megatron_rl.train import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = main(arguments)
    return code, said.getvalue()


def told_to_leave(rank: int, world: int, given: list[str], after_step: int, number: int = signal.SIGTERM,
                  told: Sequence[int] = (1,)) -> tuple[int, str]:
    """Run the command line; the ranks ``told`` get signal ``number`` when the row of ``after_step`` is written."""
    from megatron_rl.observability.metrics import MetricsWriter

    write = MetricsWriter.write

    def write_and_signal(self, row, *rest):
        written = write(self, row, *rest)
        if rank in told and row["step"] == after_step:
            signal.raise_signal(number)
        return written

    with mock.patch.object(MetricsWriter, "write", write_and_signal):
        return command_line(rank, world, given)


def arguments(folder: pathlib.Path, run_dir: pathlib.Path, *overrides: str) -> list[str]:
    return [*("--config", str(ROOT / "examples" / "quickstart" / "quickstart.yaml"), "--run-dir", str(run_dir)),
            *(f"model.hf_path={folder / 'model'}", f"data.train={folder / 'train.jsonl'}", "parallel.pipeline=1"),
            *(f"run.deadline_s={DEADLINE_S:g}", "sft.steps=0", "train.num_rollouts=2", "train.prompts_per_rollout=8"),
            *("train.samples_per_mini_batch=16", "rollout.samples_per_prompt=4"),
            "reward.functions=[tests.reward_functions:parity]", *overrides]


def ended(pool, world: int, *given: object, run: Callable = command_line, code: int = 0) -> list[str]:
    """Run the command line on ``world`` ranks, each of which must end with ``code``; return what each said."""
    results = pool.run(world, run, *given, timeout_s=240)
    assert [found for found, *_ in results] == [code] * world, results
    return [said for _, said, *_ in results]


def copied_until(whole: pathlib.Path, part: pathlib.Path, iteration: int) -> pathlib.Path:
    """Copy a run's folder as a kill after its checkpoint ``iteration`` would have left it; return the copy."""
    shutil.copytree(whole, part)
    for path in [*part.rglob("iter_*"), *part.glob("checkpoints/step_*")]:
        if path.name.startswith("step_") or int(path.name.removeprefix("iter_")) > iteration:
            shutil.rmtree(path)
    return part


class Made:
    """Makes whole runs by their overrides; what this session has made already it gives again. Nobody writes to them."""

    def __init__(self, pool, inputs: pathlib.Path, new_folder: Callable[[str], pathlib.Path]) -> None:
        self.pool, self.inputs, self._new_folder = pool, inputs, new_folder
        self._made: dict[tuple, pathlib.Path] = {}

    def __call__(self, world: int, *overrides: str, run: Callable = command_line) -> pathlib.Path:
        """Return the folder of the run of these overrides on ``world`` ranks."""
        key = (world, overrides, run)
        if key not in self._made:
            folder = self._new_folder("made") / "run"
            self.into(folder, world, *overrides, run=run)
            self._made[key] = folder
        return self._made[key]

    def into(self, folder: pathlib.Path, world: int, *overrides: str, more: Sequence = (), **ends) -> list[str]:
        """Run in ``folder``, as ``ended`` does; return what each rank said."""
        return ended(self.pool, world, arguments(self.inputs, folder, *overrides), *more, **ends)

    def again(self, whole: pathlib.Path, iteration: int, *more: str, world: int | None = None) -> pathlib.Path:
        """Go on from a copy of a made run as it was after its checkpoint ``iteration``; world: None for its own."""
        ((its_world, overrides, run),) = [key for key, folder in self._made.items() if folder == whole]
        part = copied_until(whole, self._new_folder("again") / "run", iteration)
        said = self.into(part, world or its_world, *overrides, *more, run=run)
        assert f"iter_{iteration:07d}" in said[0] and "damaged" not in said[0], said[0]  # none before it was taken
        return part

    def refused(self, words: Sequence[str], *overrides: str, world: int = 1, code: int = 2) -> pathlib.Path:
        """Check that every rank ends with ``code`` and all words, and without a traceback; return the run's folder."""
        folder = self._new_folder("refused") / "run"
        for said in self.into(folder, world, *overrides, code=code):
            assert all(word in said for word in words) and "Traceback" not in said, said
        return folder


def run_example(name: str, run_dir: pathlib.Path, *overrides: str, timeout_s: float) -> list[dict]:
    """Run ``bash examples/NAME/run.sh`` as a user does and return its metrics, a row per optimizer step."""
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    said_by(["bash", f"examples/{name}/run.sh", *overrides], ROOT, timeout_s, RUN_DIR=str(run_dir), PATH=path)
    return rows_of(run_dir)


def said_by(command: Sequence[str], folder: pathlib.Path, timeout_s: float, **environment: str) -> str:
    """Run a command in ``folder``, which must end with 0; return what it said."""
    given = dict(cwd=folder, env=os.environ | environment, timeout=timeout_s, check=False)
    done = subprocess.run(command, capture_output=True, text=True, **given)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


def rows_of(run_dir: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def firsts_of(run_dir: pathlib.Path, key: str = "reward/mean") -> list[dict]:
    """Return the rows that hold ``key``: the first of each rollout, for what is measured once a rollout."""
    return [row for row in rows_of(run_dir) if key in row]


def weights_of(run_dir: pathlib.Path) -> dict[str, torch.Tensor]:
    """Return the weights that the run exported last."""
    folders = (run_dir / "checkpoints").glob("step_*/hf")
    return tensors_of(max(folders, key=lambda x: int(x.parent.name.removeprefix("step_"))))


def tensors_of(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's folder, of one file or of several, in the order of their names."""
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    return dict(sorted(((name, tensor) for file in files for name, tensor in file.items()), key=lambda x: x[0]))


def same_tensors(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(two) and all(torch.equal(one[key], two[key]) for key in one)


def apart(one: pathlib.Path, two: pathlib.Path) -> float:
    """Return how far the weights of two runs lie apart, in norms of the first's."""
    weights, others = weights_of(one), weights_of(two)
    assert set(weights) == set(others)
    both = weights, others
    first, second = (torch.cat([each[name].flatten() for name in sorted(weights)]).double() for each in both)
    return float((second - first).norm() / first.norm())


def assert_same_run(one: pathlib.Path, two: pathlib.Path, *without: str,
                    files: Sequence[str] = ("trace.jsonl", "completions.jsonl")) -> None:
    """Assert that two runs have the same weights, rows but for times and keys beginning with ``without``, and files."""
    assert same_tensors(weights_of(one), weights_of(two))
    rows, others = ([{k: v for k, v in timeless(row).items() if not k.startswith(without)} for row in rows_of(run)]
                    for run in (one, two))
    assert rows == others
    for name in files:
        texts = [(folder / name).read_text() for folder in (one, two) if (folder / name).exists()]
        assert len(texts) != 1 and texts[:1] == texts[1:], name


def reward_workers() -> list[list[str]]:
    """Return the command lines of the reward workers on this host."""
    found = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return [words for words in found if "megatron_rl.reward.worker" in words]


def without_orphans(rank: int, world: int, given: list[str]) -> tuple[int, str]:
    """Run the command line, which must leave no reward worker of this rank."""
    code, said = command_line(rank, world, given)
    assert not [words for words in reward_workers() if str(os.getpid()) in words]
    return code, said


def timeless(row: dict) -> dict:
    """Return a row without the values that a clock gave."""
    return {k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "cost/"))}


def state_of(run_dir: pathlib.Path, iteration: int) -> dict:
    return json.loads((run_dir / "checkpoints" / f"iter_{iteration:07d}" / "state.json").read_text())


def trained_prompts(run_dir: pathlib.Path) -> list[str]:
    """Return the names of the groups of every batch, in order."""
    return [name for line in (run_dir / "trace.jsonl").read_text().splitlines() for name in json.loads(line)["prompts"]]


def few_prompts(folder: pathlib.Path, out: pathlib.Path, count: int) -> str:
    """Write the first rows of the training data to ``out``; return the override that names them."""
    path = out / "few.jsonl"
    path.write_text("\n".join((folder / "train.jsonl").read_text().splitlines()[:count]) + "\n")
    return f"data.train={path}"


def write_pairs(source: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """Write the rows of ``source`` to ``path`` with the right answer as chosen, and one off by one as rejected."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    for row in rows:
        row |= {"chosen": row["answer"], "rejected": str(int(row["answer"]) + 1)}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_teacher(model: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """Write a teacher of another width and depth over the same tokenizer, with logits far from uniform; return it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(model)
    config.hidden_size, config.num_hidden_layers, config.intermediate_size = 32, 4, 48
    config.layer_types = ["full_attention"] * 4
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(9)
        teacher = AutoModelForCausalLM.from_config(config)
        for parameter in teacher.parameters():
            parameter.mul_(5.0 if parameter.dim() > 1 else 1.0)
    teacher.save_pretrained(path)
    AutoTokenizer.from_pretrained(model).save_pretrained(path)
    return path
