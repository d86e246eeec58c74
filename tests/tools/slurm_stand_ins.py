"""Submits an sbatch template without SLURM: stand-ins for srun, scontrol and curl write down how they are called."""

import os
import pathlib
import subprocess

from tests.patience import HANG_S, patient
from tests.tools import ROOT

SLURM = ROOT / "examples" / "slurm"
BOUND_S = patient(HANG_S)

# Prints its arguments; a step of the trainer ends with TRAINER_CODE, after a checkpoint where TRAINER_SAVES names one;
# a step of vLLM runs on.
SRUN = """#!/usr/bin/env bash
echo "srun $*" >>"$CALLS"
[[ "$*" == *serve_vllm* ]] && exec sleep 600
if [ -n "${TRAINER_SAVES:-}" ]; then
  mkdir -p "$RUN_DIR/checkpoints"
  echo "$TRAINER_SAVES" >"$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt"
fi
exit "${TRAINER_CODE:-0}"
"""
SCONTROL = """#!/usr/bin/env bash
[ "$1 $2" = "show hostnames" ] && printf '%s\\n' $SLURM_JOB_NODELIST && exit
echo "scontrol $*" >>"$CALLS"
"""
# The step of vLLM is started beside the script: its server answers once it is there.
CURL = """#!/usr/bin/env bash
until grep -q serve_vllm "$CALLS"; do sleep 0.05; done
echo "curl ${*: -1}" >>"$CALLS"
"""


def write_program(folder: pathlib.Path, name: str, text: str) -> None:
    """Write an executable file into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def prepare(tmp_path: pathlib.Path, nodes: str, variables: dict[str, str], **programs: str) -> dict[str, str]:
    """Write the stand-ins, and ``programs`` by their names; return the environment of a batch script, as slurmd's."""
    for name, text in ({"srun": SRUN, "scontrol": SCONTROL, "curl": CURL} | programs).items():
        write_program(tmp_path / "bin", name, text)
    (tmp_path / "bin" / "activate").touch()
    calls = tmp_path / "calls"
    calls.write_text("")
    job = dict(SUBMIT_DIR=str(ROOT), JOB_ID="7", JOB_NAME="mine", JOB_NODELIST=nodes, CPUS_PER_TASK="4")
    job["GPUS_ON_NODE"] = "8"
    environment = {f"SLURM_{name}": value for name, value in job.items()}
    environment |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "CALLS": str(calls), "HOME": str(tmp_path / "home")}
    return environment | {"VENV": str(tmp_path), "RUN_DIR": str(tmp_path / "run"), **variables}


def submit(tmp_path: pathlib.Path, template: str | pathlib.Path, *arguments: str, nodes: str = "a1 a2",
           **variables: str) -> tuple[int, list[str], str]:
    """Run the template as slurmd would, with stand-ins; return its exit code, the stand-ins' calls, and its output."""
    environment = prepare(tmp_path, nodes, variables)
    command = ["bash", str(SLURM / template), *arguments]
    given = dict(capture_output=True, text=True, timeout=BOUND_S, check=False)
    done = subprocess.run(command, env=environment, cwd=tmp_path, **given)
    return done.returncode, (tmp_path / "calls").read_text().splitlines(), done.stdout + done.stderr
