"""Check that a requeued job goes on and ends with the uninterrupted run's weights.

It runs on a real two-node SLURM of this machine, with the template.

    make test-slurm        or        python -m tests.slurm.check [--keep FOLDER] [--only NAME ...]

Exit code: 0 passed, 1 failed, 77 SKIPPED (not root, no SLURM to be had): a skip is not a pass. make itself answers 2
for both of the latter and prints "Error 1" or "Error 77".

The quickstart's model and settings, cut short, PP=2 with a stage on each node; examples/slurm/multi_node.sbatch as it
stands, but for its GPUs and cores. Three jobs, and three equalities:

  uninterrupted   runs to its end
  requeued        `scontrol requeue` in mid-run, as an administrator or a preemption does it
  signalled       SIGUSR1 to the batch script, as --signal=B:USR1@300 does it before the time limit; the template
                  requeues itself

Each of the latter counts one restart, goes on from a checkpoint that it had saved, and exports bitwise the weights of
the first. Before them, the owner of another cluster is killed (SIGKILL) with a job running: nothing of it may go on.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

from tests.patience import patient
from tests.slurm.cluster import END_S, HOSTS, Cluster, ClusterError, install

ROOT = pathlib.Path(__file__).parents[2]
SKIPPED = 77
PREPARE_S, JOB_S = patient(120.0), patient(300.0)
STEPS, SAVE_EVERY = 40, 6
SETTINGS = ("--config", "examples/quickstart/quickstart.yaml", f"train.num_rollouts={STEPS}",
            "train.prompts_per_rollout=16", "train.samples_per_mini_batch=64", "sft.steps=20",
            "metrics.progress=false")
INTERRUPT = {"requeued": ("scontrol", "requeue"), "signalled": ("scancel", "--signal=USR1", "--batch")}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


class CheckFailed(AssertionError):
    """Something did not hold; the message says what, with both values, and carries the job's log."""


class Job:
    """The template, submitted from a folder that stands for a checkout: its log and its run lie in the folder."""

    def __init__(self, cluster: Cluster, folder: pathlib.Path, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.run_dir = folder / "runs" / name
        own = {"VENV": sys.prefix, "RUN_DIR": str(self.run_dir), "SAVE_EVERY": str(SAVE_EVERY)}
        inputs = folder / "inputs"
        done = subprocess.run(
            ["sbatch", "--parsable", f"--job-name={name}", "--gpus-per-node=1", "--cpus-per-task=1", "--time=30",
             "examples/slurm/multi_node.sbatch", *SETTINGS, f"model.hf_path={inputs}/model",
             f"data.train={inputs}/train.jsonl"],
            cwd=folder, env=cluster.environment | own, capture_output=True, text=True, timeout=60, check=False,
        )
        if done.returncode:
            raise CheckFailed(f"sbatch refused the template: {done.stdout}{done.stderr}")
        self.id = done.stdout.strip()
        self.log_file = folder / f"slurm-{name}-{self.id}.out"

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else "(no log)"

    def failed(self, what: str) -> CheckFailed:
        return CheckFailed(f"{self.name}: {what}; its log:\n{self.log()[-6000:]}")

    def fields(self) -> dict[str, str]:
        return self.cluster.job(self.id)

    def checkpoint(self) -> int:
        """Return the latest checkpoint's RL step, or 0 while there is none."""
        with contextlib.suppress(FileNotFoundError, ValueError):  # not there, or just being written
            return int((self.run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
        return 0

    def steps(self) -> list[tuple[str, float]]:
        """Return each optimizer step's phase and gradient norm, as metrics.jsonl has them."""
        rows = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return [(row["phase"], row["train/grad_norm"]) for row in rows]

    def wait(self, what: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + JOB_S
        while not is_so():
            state = self.fields()["JobState"]
            if state in ENDED and not is_so():
                raise self.failed(f"waited for {what}, and the job ended as {state}")
            if time.monotonic() > deadline:
                raise self.failed(f"waited {JOB_S:g} s for {what}, the job is {state}")
            time.sleep(0.2)

    def wait_until_complete(self) -> None:
        self.wait("its end", lambda: self.fields()["JobState"] == "COMPLETED")

    def wait_until_mid_run(self) -> None:
        """Wait until some RL steps are saved, and most are still to come."""
        self.wait("a checkpoint", lambda: self.checkpoint() > 0)

    def weights(self) -> dict[str, bytes]:
        """Return the policy, exported after the last step alone, as each tensor's bytes by name."""
        from safetensors import safe_open

        found = {}
        for path in sorted(self.run_dir.glob("checkpoints/step_*/hf/*.safetensors")):
            with safe_open(path, framework="np") as file:
                found |= {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 (not a dict)
        if not found:
            raise self.failed(f"no weights in {self.run_dir}/checkpoints/step_*/hf")
        return found


def check_went_on(job: Job) -> str:
    """Check that the job was restarted once, its log holds both attempts, and the second began at a checkpoint."""
    fields = job.fields()
    if fields["Restarts"] != "1":
        raise job.failed(f"scontrol counts Restarts={fields['Restarts']}, not 1")
    began = re.findall(r"attempt (\d+): n0 n1; .* checkpoint: (\w+)", job.log())
    if [number for number, _ in began] != ["1", "2"] or began[0][1] != "none" or not began[1][1].isdigit():
        raise job.failed(f"attempts and their first checkpoints are {began}, not none and a number")
    if not 0 < int(began[1][1]) < STEPS:
        raise CheckFailed(f"{job.name}: interrupted at step {began[1][1]} of {STEPS}, which is not mid-run")
    # a run that began anew would end with the same weights
    if not re.search(rf"resumed from \S+/iter_0*{began[1][1]}: ", job.log()):
        raise job.failed(f"the trainer did not say that it resumed from checkpoint {began[1][1]}")
    return f"{_line(job)}: went on at step {began[1][1]} of {STEPS}"


def check_same_weights(found: Mapping[str, bytes], expected: Mapping[str, bytes], name: str) -> None:
    if found.keys() != expected.keys():
        raise CheckFailed(f"{name}: tensors {sorted(found.keys() ^ expected.keys())} are in one of both exports only")
    different = [tensor for tensor in expected if found[tensor] != expected[tensor]]
    if different:
        counts = f"{len(different)} of {len(expected)} tensors"
        raise CheckFailed(f"{name}: {counts} differ from the uninterrupted run's, as {different[0]}")


def prepare(folder: pathlib.Path) -> None:
    """Make the quickstart's data and model, and a folder like a checkout's, with this one's packages and examples."""
    for name in ("megatron_rl", "examples"):
        (folder / name).symlink_to(ROOT / name)
    command = ["examples/quickstart/prepare.py", "--out", str(folder / "inputs"), "--digits", "1", "--seed", "0"]
    subprocess.run([sys.executable, *command], cwd=ROOT, timeout=PREPARE_S, check=True, stdout=subprocess.DEVNULL)


OWNER = """
import pathlib, sys, time
from tests.slurm.cluster import Cluster
with Cluster(pathlib.Path(sys.argv[1])) as cluster:
    cluster.run("sbatch", "--wrap", "sleep 1000", "--output=/dev/null")
    while "R" not in cluster.run("squeue", "--noheader", "--format=%t"):
        time.sleep(0.2)
    print("up", flush=True)
    time.sleep(1000)
"""


def check_ends_with_its_owner(folder: pathlib.Path) -> None:
    """Check that a cluster whose owner is killed ends, with its job, and leaves /etc/hosts as it was."""
    folder.mkdir()
    before = HOSTS.read_text()
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE)
    if owner.stdout.readline() != b"up\n":
        raise CheckFailed(f"the cluster to be killed did not start; its owner ended with {owner.wait()}")
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + END_S
    while (left := _processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left or HOSTS.read_text() != before:
        raise CheckFailed(f"after SIGKILL to the cluster's owner these went on: {left}; {HOSTS}: {HOSTS.read_text()}")
    print("killed: the cluster, its job and its line in /etc/hosts ended with their owner", flush=True)


def _processes_in(folder: pathlib.Path) -> list[str]:
    """Return the command lines that name the folder: its keeper, its daemons and its jobs' scripts."""
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(folder) in line]


def check(folder: pathlib.Path, only: Sequence[str]) -> None:
    if "killed" in only:
        check_ends_with_its_owner(folder / "killed")
    if set(only) == {"killed"}:
        return
    prepare(folder)
    (folder / "cluster").mkdir()
    with Cluster(folder / "cluster") as cluster:
        version, nodes = (cluster.run("sinfo", *x).strip() for x in (["--version"], ["--noheader", "--format=%N"]))
        print(f"cluster: {version}, nodes {nodes}")
        whole = Job(cluster, folder, "uninterrupted")
        whole.wait_until_complete()
        expected = whole.weights()
        print(f"uninterrupted: {_line(whole)}; {len(expected)} tensors", flush=True)
        for name, command in INTERRUPT.items():
            if name not in only:
                continue
            job = Job(cluster, folder, name)
            job.wait_until_mid_run()
            cluster.run(*command, job.id)
            job.wait_until_complete()
            said = check_went_on(job)
            check_same_weights(job.weights(), expected, name)
            if job.steps() != whole.steps():
                told = "its metrics.jsonl has other optimizer steps than the uninterrupted run's"
                raise CheckFailed(f"{name}: {told}: {job.steps()}")
            print(f"{name}: {said}; {len(expected)} tensors bitwise the uninterrupted run's", flush=True)


def _line(job: Job) -> str:
    fields = job.fields()
    return f"JobId={job.id} JobState={fields['JobState']} Restarts={fields['Restarts']}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kept = "work there and leave everything; default: a temporary folder"
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help=kept)
    checks = ("killed", *INTERRUPT)
    parser.add_argument("--only", nargs="*", choices=checks, default=checks)
    options = parser.parse_args(arguments)
    if options.keep and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"--keep {options.keep} is not empty; name a new folder")
    why = f"slurmd needs root, and this is uid {os.geteuid()}" if os.geteuid() != 0 else install()
    if why:
        print(f"SKIPPED: {why}. A skip is not a pass: nothing was tested.")
        return SKIPPED
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that the folder is removed; the keeper stops the cluster
    try:
        with contextlib.ExitStack() as stack:
            folder = options.keep or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)  # a temporary one is 0700, and munged wants its socket reachable by all
            check(folder.resolve(), options.only)
    except (CheckFailed, ClusterError) as error:
        print(f"FAILED: {error}")
        return 1
    print("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
