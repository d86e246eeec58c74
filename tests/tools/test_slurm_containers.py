"""The SLURM templates in a container; stand-ins for srun and apptainer note their arguments and run the command.

No test machine has pyxis; docs/container.md says what a real apptainer ran.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess

import pytest

from tests.patience import HANG_S, patient, until
from tests.tools import ROOT
from tests.tools.slurm_stand_ins import SLURM, prepare

pytestmark = pytest.mark.process

BOUND_S = patient(HANG_S)
PARTS = "megatron_rl/commands/templates/slurm"
# As pyxis: runs the command where the image's own variables have won over the host's.
SRUN = """#!/usr/bin/env bash
printf '%s\\0' "$@" >>"$CALLS"
[[ "$*" == *serve_vllm* ]] && exec sleep 600
while [[ "$1" == --* ]]; do shift; done
export NCCL_SOCKET_IFNAME=image SLURM_NODEID=0 SLURM_STEP_NUM_NODES=1 SLURMD_NODENAME=a1
exec "$@"
"""
APPTAINER = """#!/usr/bin/env bash
while [ "$1" != "$IMAGE" ]; do shift; done
exec "${@:2}"
"""
# A rank that notes its network card, and after SIGUSR1 leaves with 75 and a checkpoint; torchrun's answer to that is 1.
TORCHRUN = """#!/usr/bin/env python3
import os, subprocess, sys
rank = '''
import os, pathlib, signal, sys
run = pathlib.Path(sys.argv[1])
def leave(*_):
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("12")
    os._exit(75)
signal.signal(signal.SIGUSR1, leave)
(run / "seen").write_text(os.environ["NCCL_SOCKET_IFNAME"])
while True:
    signal.pause()
'''
run = sys.argv[sys.argv.index("--run-dir") + 1]
sys.exit(subprocess.run([sys.executable, "-c", rank, run]).returncode and 1)
"""
ENDS = "#!/usr/bin/env bash\nexit 0\n"


def start(
    tmp_path: pathlib.Path, template: str, *arguments: str, torchrun: str = ENDS, **variables: str
) -> subprocess.Popen:
    variables = {"NCCL_SOCKET_IFNAME": "ib0", **variables}
    environment = prepare(tmp_path, "a1", variables, srun=SRUN, apptainer=APPTAINER, torchrun=torchrun)
    command = ["bash", str(SLURM / template), *arguments]
    given = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, env=environment, cwd=tmp_path, **given)


def called(tmp_path: pathlib.Path, *arguments: str, **variables: str) -> tuple[int, list[str], str]:
    """Return the job's exit code, srun's arguments one by one, and what the job said."""
    job = start(tmp_path, "single_node.sbatch", *arguments, **variables)
    said, _ = job.communicate(timeout=BOUND_S)
    return job.returncode, (tmp_path / "calls").read_text().split("\0")[:-1], said


def option(words: list[str], name: str) -> list[str]:
    """Return the values of an option, written as ``--name=value`` or ``--name value``."""
    joined = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    return joined or [words[place + 1] for place, word in enumerate(words) if word == name]


def places(mounts: list[str]) -> list[str]:
    """Return the sources of mounts that keep their path."""
    return [mount.partition(":")[0] for mount in mounts if mount.partition(":")[0] == mount.partition(":")[2]]


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_what_the_job_names_is_mounted_and_names_with_spaces_stay_whole(tmp_path: pathlib.Path, runtime: str) -> None:
    submitted, data, cache = tmp_path / "a folder", tmp_path / "my data", tmp_path / "home/.cache/huggingface"
    model = tmp_path / "hub" / "models--a--b"
    snapshot = model / "snapshots" / "c0ffee"  # whose files are links to blobs/
    image = "/my images/a b.sif"
    for folder in (submitted, data, snapshot, tmp_path / "far runs"):
        folder.mkdir(parents=True)
    (data / "train.jsonl").touch()
    (submitted / "megatron_rl").symlink_to(ROOT / "megatron_rl")  # as a tree on another disk
    (submitted / "runs").symlink_to(tmp_path / "far runs")
    given = {"SLURM_SUBMIT_DIR": str(submitted), "RUN_DIR": "runs/one", "CONTAINER": runtime, "IMAGE": image}
    given |= {"MOUNTS": "/my scratch:/scratch dir:ro,/lib", "CONTAINER_OPTIONS": "--one --two=3"}
    arguments = (
        f"data.train={data}/train.jsonl",
        f"model.hf_path={snapshot}",
        "eval.path=/not/there",
        "shell=/bin/bash",
    )
    code, words, said = called(tmp_path, *arguments, **given)
    assert code == 0, said
    if runtime == "pyxis":
        assert option(words, "--container-image") == [image] and "--no-container-mount-home" in words
        assert option(words, "--container-workdir") == [str(submitted)]
        (joined,) = option(words, "--container-mounts")
        mounts = joined.split(",")
        command = words[words.index("--two=3") + 1 :]
    else:
        assert words[(start := words.index("apptainer")) : start + 3] == ["apptainer", "exec", "--nv"]
        assert option(words, "--pwd") == [str(submitted)]
        mounts = option(words, "--bind")
        command = words[words.index(image) + 1 :]
        assert command == words[-len(command) :] and words.index("--one") < words.index(image)
    wanted = [submitted, "/lib", ROOT / PARTS, tmp_path / "far runs" / "one", cache, data / "train.jsonl", model]
    assert places(mounts) == [str(path) for path in wanted]
    assert [mount for mount in mounts if not places([mount])] == ["/my scratch:/scratch dir:ro"]
    assert command[0] == "env" and "NCCL_SOCKET_IFNAME=ib0" in command and f"HF_HOME={cache}" in command
    task = command.index("bash")
    assert command[task : task + 3] == ["bash", f"{submitted}/{PARTS}/task.sh", ""]
    assert command[-len(arguments) :] == list(arguments)
    assert f"in {image} by {runtime}, with {mounts[0]}" in said


def test_no_key_reaches_a_command_line(tmp_path: pathlib.Path) -> None:
    given = {"HF_TOKEN": "hf_secret", "WANDB_API_KEY": "secret", "NCCL_IB_HCA": "=mlx5_0,mlx5_3"}
    given |= {"GLOO_SOCKET_IFNAME": "ib0", "HF_HUB_OFFLINE": "1"}
    _, words, _ = called(tmp_path, CONTAINER="pyxis", IMAGE="i", **given)
    assert not [word for word in words if "secret" in word]
    assert {"NCCL_IB_HCA==mlx5_0,mlx5_3", "GLOO_SOCKET_IFNAME=ib0", "HF_HUB_OFFLINE=1"} <= set(words)


def test_a_container_without_image_or_with_a_folder_that_no_mount_can_name_is_refused(tmp_path: pathlib.Path) -> None:
    for runtime in ("pyxis", "apptainer"):
        code, words, said = called(tmp_path, CONTAINER=runtime)
        assert code != 0 and not words and f"CONTAINER={runtime} needs IMAGE" in said
    folder = tmp_path / "a,b"
    folder.mkdir()
    (folder / "megatron_rl").symlink_to(ROOT / "megatron_rl")
    code, words, said = called(tmp_path, CONTAINER="pyxis", IMAGE="i", SLURM_SUBMIT_DIR=str(folder))
    assert code == 2 and not words and "has a comma or a colon" in said


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_a_signal_reaches_the_ranks_in_the_container_and_75_comes_back(tmp_path: pathlib.Path, runtime: str) -> None:
    job = start(tmp_path, "single_node.sbatch", torchrun=TORCHRUN, CONTAINER=runtime, IMAGE="my image", PROCESSES="1")
    seen = tmp_path / "run" / "seen"
    assert until(lambda: seen.exists() and seen.read_text() == "ib0")  # the host's, not the image's
    os.kill(job.pid, signal.SIGUSR1)
    said, _ = job.communicate(timeout=BOUND_S)
    assert job.returncode == 75 and "scontrol requeue 7" in (tmp_path / "calls").read_text(), said
    assert "to go on from checkpoint 12" in said


def test_servers_in_a_container_see_the_model(tmp_path: pathlib.Path) -> None:
    model = tmp_path / "my model"
    model.mkdir()
    variables = {"MODEL": str(model), "CONTAINER": "pyxis", "IMAGE": "i", "SLURM_JOB_NODELIST": "a1 a2"}
    job = start(tmp_path, "trainer_and_vllm.sbatch", **variables)
    said, _ = job.communicate(timeout=BOUND_S)
    words = (tmp_path / "calls").read_text().split("\0")
    both = [word for word in words if word.startswith("--container-mounts=")]
    assert len(both) == 2 and all(f"{model}:{model}" in word for word in both), said
