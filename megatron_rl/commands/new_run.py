"""Writes the folder of a new run: `megatron-rl new my_run`."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Sequence

from megatron_rl.errors import ConfigError

TEMPLATES = pathlib.Path(__file__).resolve().parent / "templates"
# Stands in quotes in YAML, Python, bash and SLURM's header without being escaped.
SAFE = re.compile(r"[\w./+-]+")


def new_command(arguments: Sequence[str]) -> int:
    """Write a run's folder by the command line, say what to do next, and return 0.

    Raises ConfigError for a folder that is there already, or a path that the files could not name.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-rl new", description="Write a folder with a configuration, a reward function, prompts and a job."
    )
    parser.add_argument("folder", help="to make; its last part is the run's name")
    parser.add_argument("--model", default="", metavar="PATH", help="Hugging Face folder to train; default: left open")
    parser.add_argument("--prompts", metavar="FILE", help="your own prompts (JSONL, CSV, Parquet); default: 100 sums")
    options = parser.parse_args(arguments)
    try:
        write_run(options.folder, model=options.model, prompts=options.prompts, environment=_environment())
    except OSError as error:
        raise ConfigError(
            f"{options.folder} cannot be made: {error.strerror} ({error.filename}); name a folder on a disk that you "
            "may write to"
        ) from error
    missing = "" if options.model else " model.hf_path=/path/to/a/hugging-face/model"
    print(
        f"{options.folder}: run.yaml, reward.py, job.sbatch{'' if options.prompts else ', prompts.jsonl'}\n"
        f"next: megatron-rl train --config {options.folder}/run.yaml --dry-run{missing}"
    )
    return 0


def write_run(folder: str, *, model: str, prompts: str | None, environment: str) -> None:
    """Write ``run.yaml``, ``reward.py``, ``job.sbatch``, SLURM's parts and, without ``prompts``, ``prompts.jsonl``.

    folder: to make, as the files will name it: relative to the folder in which the run is started,
        or absolute.
    model: Hugging Face folder; "" leaves it open. environment: the virtual environment that the job
        activates.
    """
    folder = folder.rstrip("/")
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
    values = {
        "folder": folder,
        "name": target.name,
        "model": model or '""',
        "prompts": prompts or f"{folder}/prompts.jsonl",
        "environment": environment,
    }
    for name in ("run.yaml", "job.sbatch"):
        text = (TEMPLATES / name).read_text(encoding="utf-8")
        (target / name).write_text(text.format(**values), encoding="utf-8")
    shutil.copyfile(TEMPLATES / "reward.py", target / "reward.py")
    shutil.copytree(TEMPLATES / "slurm", target / "slurm")
    if prompts is None:
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (target / "prompts.jsonl").write_text(lines, encoding="utf-8")


def _environment() -> str:
    """Return the virtual environment of this process; ".venv" where it has none."""
    return sys.prefix if sys.prefix != sys.base_prefix else os.environ.get("VIRTUAL_ENV", ".venv")
