"""The command `megatron-rl new my_run`, which writes the folder of a new run."""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Sequence

from megatron_rl.commands import kubernetes
from megatron_rl.errors import ConfigError

TEMPLATES = pathlib.Path(__file__).resolve().parent / "templates"
# Characters that need no escape within quotes in YAML, Python, bash and SLURM's header.
SAFE = re.compile(r"[\w./+-]+")
# Sizes for a first run of a real model, and for a random model that learns sums on two CPU cores.
SIZES = {
    "max_prompt_tokens": 512,
    "max_response_tokens": 256,
    "num_rollouts": 100,
    "prompts_per_rollout": 32,
    "lr": "1.0e-6",
    "warm_start": "",
}
TINY = {
    "max_prompt_tokens": 16,
    "max_response_tokens": 4,
    "num_rollouts": 30,
    "prompts_per_rollout": 32,
    "lr": "3.0e-4",
    "warm_start": """sft:                       # random weights answer nothing: supervised steps come first
  steps: 100
  samples_per_step: 64
  lr: 1.0e-3
""",
}


def new_command(arguments: Sequence[str]) -> int:
    """Write the folder of a new run, print the commands to start it, and return 0.

    arguments: the words after `megatron-rl new` in the command line.

    Raises ConfigError if the folder exists, or if a path has characters that YAML, bash or SLURM
    would misread.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-rl new", description="Write a folder with a configuration, a reward function, prompts and a job."
    )
    parser.add_argument("folder", help="to make; its last part is the run's name")
    parser.add_argument("--model", default="", metavar="PATH", help="Hugging Face folder to train; default: left open")
    parser.add_argument("--prompts", metavar="FILE", help="your own prompts (JSONL, CSV, Parquet); default: 100 sums")
    parser.add_argument(
        "--tiny", action="store_true", help="make a model of random weights too, which two CPU cores train in minutes"
    )
    kubernetes.add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.tiny and (options.model or options.prompts):
        raise ConfigError("--tiny brings a model and its prompts; leave --model and --prompts out, or --tiny")
    cluster = kubernetes.cluster_of(options)
    try:
        write_run(
            options.folder,
            model=options.model,
            prompts=options.prompts,
            environment=_environment(),
            tiny=options.tiny,
        )
        if cluster is not None:
            kubernetes.write_manifests(options, cluster)
    except OSError as error:
        raise ConfigError(
            f"{options.folder} cannot be made: {error.strerror} ({error.filename}); name a folder on a disk that you "
            "may write to"
        ) from error
    _say_what_is_next(options, on_kubernetes=cluster is not None)
    return 0


def _say_what_is_next(options: argparse.Namespace, *, on_kubernetes: bool) -> None:
    """Print which files were written and which commands start the run.

    on_kubernetes: whether Kubernetes manifests were written too.
    """
    missing = "" if options.model or options.tiny else " model.hf_path=/path/to/a/hugging-face/model"
    made = ["run.yaml", "reward.py", "job.sbatch", "slurm"]
    made += [] if options.prompts else ["prompts.jsonl"]
    made += ["model"] if options.tiny else []
    made += ["kustomization.yaml", "kubernetes"] if on_kubernetes else []
    print(f"{options.folder}: {', '.join(made)}")
    print(f"next: megatron-rl train --config {options.folder}/run.yaml --dry-run{missing}")
    if on_kubernetes:
        print(f"then: the secret that {options.folder}/kustomization.yaml names; kubectl apply -k {options.folder}")
    else:
        processes = "2" if options.tiny else "8"
        print(f"then: megatron-rl train --nproc {processes} --config {options.folder}/run.yaml{missing}")


def write_run(folder: str, *, model: str, prompts: str | None, environment: str, tiny: bool = False) -> None:
    """Write ``run.yaml``, ``reward.py``, ``job.sbatch``, SLURM's scripts and, without ``prompts``, ``prompts.jsonl``.

    folder: the folder to make, as the files will name it: absolute, or relative to the folder in
        which the run is started.
    model: a Hugging Face folder; "" leaves ``model.hf_path`` empty.
    prompts: a file of prompts; None writes 100 sums.
    environment: the virtual environment that the SLURM job activates.
    tiny: whether to also write a model of random weights into the subfolder ``model``; the settings
        are then small enough to train on a CPU.
    """
    folder = folder.rstrip("/")
    model = f"{folder}/model" if tiny else model
    # Check the names, and make the folder.
    for what, text in (("folder", folder), ("--model", model), ("--prompts", prompts or ""), ("folder", environment)):
        if text and not SAFE.fullmatch(text):
            raise ConfigError(
                f"{what} {text!r} has characters that YAML, bash and SLURM would read otherwise; letters, digits and "
                "._/+- are allowed"
            )
    target = pathlib.Path(folder)
    if not folder or not target.name:
        raise ConfigError("the folder has no name; megatron-rl new my_run makes one")
    try:
        target.mkdir(parents=True)
    except FileExistsError as error:
        raise ConfigError(f"{folder} is there already; name a folder that is not, or remove it") from error
    # Fill the templates, and copy the other files.
    values = {
        "folder": folder,
        "name": target.name,
        "model": model or '""',
        "prompts": prompts or f"{folder}/prompts.jsonl",
        "environment": environment,
        "engine": "transformers" if tiny else _engine_for(model),
        **(TINY if tiny else SIZES),
    }
    for name in ("run.yaml", "job.sbatch"):
        text = (TEMPLATES / name).read_text(encoding="utf-8")
        (target / name).write_text(text.format(**values), encoding="utf-8")
    shutil.copyfile(TEMPLATES / "reward.py", target / "reward.py")
    shutil.copytree(TEMPLATES / "slurm", target / "slurm")
    if prompts is None:
        (target / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in _sums()), encoding="utf-8")
    if tiny:
        from megatron_rl.commands.tiny_model import write_tiny_model

        write_tiny_model(target / "model")


def _engine_for(model: str) -> str:
    """Return ``vllm`` for a model of more than 1B parameters, which the embedded engine refuses, else ``transformers``.

    A local model's parameters are counted. The size of any other model is read from its name, as 7
    from Qwen2.5-7B-Instruct, so nothing is fetched.

    model: a Hugging Face folder, the name of a model on a hub, a URL, or "" for none.
    """
    if not model or not (pathlib.Path(model) / "config.json").is_file():
        billions = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)B(?![\w.])", model, re.IGNORECASE)
        return "vllm" if billions and float(billions[1]) > 1 else "transformers"
    from megatron_rl.rollout.engines.embedded import MAX_EMBEDDED_PARAMETERS
    from megatron_rl.weights.reader import HuggingFaceReader

    try:
        reader = HuggingFaceReader(model)
    except ConfigError:  # the dry run names the damaged file
        return "transformers"
    num_parameters = sum(math.prod(reader.size(name)) for name in reader.files)
    return "vllm" if num_parameters > MAX_EMBEDDED_PARAMETERS else "transformers"


def _sums() -> list[dict[str, str]]:
    """Return the 100 sums of two digits as rows {prompt, answer, solution}; supervised steps train on the solution."""
    numbers = [(a, b, str(a + b)) for a in range(10) for b in range(10)]
    return [{"prompt": f"{a}+{b}=", "answer": total, "solution": total} for a, b, total in numbers]


def _environment() -> str:
    """Return the folder of this process's virtual environment; ".venv" if it runs in none."""
    return sys.prefix if sys.prefix != sys.base_prefix else os.environ.get("VIRTUAL_ENV", ".venv")
