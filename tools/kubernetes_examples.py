"""Write examples/kubernetes as `megatron-rl new --kubernetes` writes a run, without the part for SLURM.

Examples:
  python tools/kubernetes_examples.py             # writes the four folders anew; `make docs` does this
  python tools/kubernetes_examples.py --out DIR   # writes them below another folder

Run it after a change of megatron_rl/commands/templates/; tests/unit/test_kubernetes.py compares.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import pathlib
import shutil
import sys
from collections.abc import Sequence

# The examples of this checkout, whichever one is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from megatron_rl.commands.new_run import new_command

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = {"job": "indexed-job", "pytorchjob": "pytorchjob", "trainjob": "trainjob", "vllm": "trainer-and-vllm"}
IMAGE, MODEL, PROMPTS = "registry.example/megatron_rl:0.9", "/models/Qwen2.5-7B-Instruct", "/runs/data/train.jsonl"


def write(root: pathlib.Path) -> None:
    """Write the examples below ``root``/examples/kubernetes; what is there of them is replaced."""
    root.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(root), contextlib.redirect_stdout(io.StringIO()):
        for kind, name in FOLDERS.items():
            folder = pathlib.Path("examples/kubernetes") / name
            shutil.rmtree(folder, ignore_errors=True)
            options = ["--kubernetes", kind, "--image", IMAGE, "--model", MODEL, "--prompts", PROMPTS]
            new_command([str(folder), *options])
            (folder / "job.sbatch").unlink()
            shutil.rmtree(folder / "slurm")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT, metavar="DIR", help="default: this repository")
    write(parser.parse_args(arguments).out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
