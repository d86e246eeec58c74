"""Check that a Job's pods survive what a cluster does to them, in two network namespaces of this machine.

    make test-kubernetes        or        python -m tests.kubernetes.check [--keep FOLDER] [--only NAME ...]

Exit code: 0 passed, 1 failed, 77 SKIPPED (not root, or no network namespaces): a skip is not a pass. make itself
answers 2 for both of the latter and prints "Error 1" or "Error 77".

The manifest is that of `megatron-rl new --kubernetes job --nodes 2 --gpus-per-node 1`, read as a kubelet reads it
(tests/kubernetes/pods.py): its command, arguments and variables, but for the folders. The quickstart's model, cut
short, PP=2 with a stage in each pod, over gloo. A pod that has failed is answered by the manifest's own
podFailurePolicy, at once and alone, as the Job's controller does it. Four jobs:

  uninterrupted   runs to its end; pod 1 starts before pod 0 has a name
  told            SIGTERM to pod 1 in mid-run: both leave with 75, neither is counted, both start again
  killed          SIGKILL to pod 1 in mid-run, which is counted; pod 0 leaves with 75 past its checkpoint
  refused         a setting that cannot work: 2, and the Job fails at once

The second and the third go on from a checkpoint, and end with the bits of the first: weights and steps.
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

from megatron_rl.commands.kubernetes import Cluster, manifests
from tests.kubernetes.manifests import action_on, read
from tests.kubernetes.pods import ROOT, Pods
from tests.patience import patient

SKIPPED = 77
PREPARE_S, JOB_S = patient(120.0), patient(400.0)
STEPS, SAVE_EVERY = 12, 3
SETTINGS = (f"train.num_rollouts={STEPS}", "train.prompts_per_rollout=16", "train.samples_per_mini_batch=64",
            "sft.steps=10", "metrics.progress=false", "parallel.pipeline=2")
JOBS = ("uninterrupted", "told", "killed", "refused")


class CheckFailed(AssertionError):
    """Something did not hold; the message says what, and carries the pods' logs."""


class Job:
    """Runs a job's pods to its end, as the controller of Kubernetes would, and counts what it counts."""

    def __init__(self, pods: Pods, name: str) -> None:
        self.pods, self.name = pods, name
        self.run_dir = pods.folder / "runs" / name
        self.run_dir.parent.mkdir(exist_ok=True)
        self.codes: list[tuple[int, int, str]] = []  # pod, exit code, what the manifest answers
        self._disturb: tuple[int, signal.Signals] | None = None

    def log_file(self, index: int) -> pathlib.Path:
        return self.pods.folder / "runs" / f"{self.name}-{index}.log"

    def logs(self) -> str:
        files = [self.log_file(index) for index in (0, 1)]
        return "\n".join(f"{path.name}:\n{path.read_text()[-4000:]}" for path in files if path.exists())

    def checkpoint(self) -> int:
        """Return the latest checkpoint's rollout, or 0 while there is none."""
        with contextlib.suppress(FileNotFoundError, ValueError):  # not there, or just being written
            return int((self.run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
        return 0

    def run(self, *settings: str, disturb: tuple[int, signal.Signals] | None = None) -> str:
        """Run the job; return Complete or Failed. ``disturb``: a pod, and the signal that it gets in mid-run."""
        self._disturb = disturb
        running = {index: self._start(index, settings) for index in (1, 0)}
        deadline = time.monotonic() + JOB_S
        while True:
            self._disturb_in_mid_run()
            for index, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[index]
                code = self.pods.exit_code(process)
                action = action_on(self.pods.job["spec"], code, disrupted=False) if code else "Succeed"
                self.codes.append((index, code, action))
                if action == "FailJob":
                    return "Failed"
                if action == "Succeed":
                    if not running:
                        return "Complete"
                    continue
                if sum(pod == index and what == "Count" for pod, _, what in self.codes) > self._limit():
                    return "Failed"
                running[index] = self._start(index, settings)
            if time.monotonic() > deadline:
                raise CheckFailed(f"{self.name}: not ended after {JOB_S:g} s; {self.codes}\n{self.logs()}")
            time.sleep(0.1)

    def _limit(self) -> int:
        return self.pods.job["spec"]["backoffLimitPerIndex"]

    def _start(self, index: int, settings: Sequence[str]) -> subprocess.Popen:
        inputs = self.pods.folder / "inputs"
        words = [*("--config", f"{ROOT}/examples/quickstart/quickstart.yaml", f"model.hf_path={inputs}/model"),
                 *(f"data.train={inputs}/train.jsonl", *SETTINGS, *settings)]  # fmt: skip
        changes = {"RUN_DIR": str(self.run_dir), "SAVE_EVERY": str(SAVE_EVERY)}
        process = self.pods.start(index, self.log_file(index), changes, words)
        if index == 1 and not self.codes:  # only now does pod 0 get a name
            self._wait("pod 1 to look for pod 0", lambda: "waits for pod 0" in self.log_file(1).read_text(), process)
        return process

    def _wait(self, what: str, is_so: Callable[[], bool], process: subprocess.Popen) -> None:
        deadline = time.monotonic() + JOB_S
        while not is_so() and process.poll() is None:
            if time.monotonic() > deadline:
                raise CheckFailed(f"{self.name}: waited {JOB_S:g} s for {what}\n{self.logs()}")
            time.sleep(0.1)

    def _disturb_in_mid_run(self) -> None:
        if self._disturb is not None and self.checkpoint() > 0:
            self.pods.signal(*self._disturb)
            self._disturb = None

    def steps(self) -> list[tuple[str, float]]:
        """Return each optimizer step's phase and gradient norm, as metrics.jsonl has them."""
        rows = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return [(row["phase"], row["train/grad_norm"]) for row in rows]

    def weights(self) -> dict[str, bytes]:
        """Return the exported policy as each tensor's bytes by name."""
        from safetensors import safe_open

        found = {}
        for path in sorted(self.run_dir.glob("checkpoints/step_*/hf/*.safetensors")):
            with safe_open(path, framework="np") as file:
                found |= {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 (not a dict)
        if not found:
            raise CheckFailed(f"{self.name}: no weights in {self.run_dir}/checkpoints/step_*/hf\n{self.logs()}")
        return found


def expect(job: Job, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise CheckFailed(f"{job.name}: {what}: {found!r}, expected {expected!r}\n{job.logs()}")


def check_went_on(job: Job, whole: Job, weights: Mapping[str, bytes]) -> str:
    """Check that the second attempt went on from a checkpoint, and that the run has the uninterrupted run's bits."""
    began = re.findall(r"resumed from \S+/iter_0*(\d+): ", job.log_file(0).read_text())
    expect(job, "attempts that resumed", len(began), 1)
    expect(job, f"resumed in mid-run, at {began[0]}", 0 < int(began[0]) < STEPS, True)
    found = job.weights()
    expect(job, "tensors that differ", [name for name in weights if found.get(name) != weights[name]], [])
    expect(job, "its steps are the uninterrupted run's", job.steps() == whole.steps(), True)
    return f"went on at {began[0]} of {STEPS}; {len(found)} tensors and {len(job.steps())} steps bitwise the same"


def check(pods: Pods, only: Sequence[str]) -> None:
    whole = Job(pods, "uninterrupted")
    weights: dict[str, bytes] = {}
    if set(only) & {"uninterrupted", "told", "killed"}:
        expect(whole, "its end", (whole.run(), {code for _, code, _ in whole.codes}), ("Complete", {0}))
        weights = whole.weights()
        print(f"uninterrupted: {len(weights)} tensors, {len(whole.steps())} steps", flush=True)
    if "told" in only:
        job = Job(pods, "told")
        expect(job, "its end", job.run(disturb=(1, signal.SIGTERM)), "Complete")
        expect(job, "exit codes", sorted(job.codes[:2]), [(0, 75, "Ignore"), (1, 75, "Ignore")])
        print(f"told: SIGTERM to pod 1: both left with 75; {check_went_on(job, whole, weights)}", flush=True)
    if "killed" in only:
        job = Job(pods, "killed")
        expect(job, "its end", job.run(disturb=(1, signal.SIGKILL)), "Complete")
        expect(job, "exit codes", sorted(job.codes[:2]), [(0, 75, "Ignore"), (1, 137, "Count")])
        said = check_went_on(job, whole, weights)
        print(f"killed: SIGKILL to pod 1: 137 is counted, pod 0 left with 75; {said}", flush=True)
    if "refused" in only:
        job = Job(pods, "refused")
        expect(job, "its end", job.run("parallel.tensor=7"), "Failed")
        # the other pod's rank may have met the loss of this one first, and left with 1
        expect(job, "exit codes", (job.codes[-1][1:], len(job.codes) <= 2), ((2, "FailJob"), True))
        print("refused: a setting that cannot work: 2, and the Job failed at once", flush=True)


def prepare(folder: pathlib.Path) -> dict:
    """Make the quickstart's data and model, and the manifest of a job of two pods; return the Job."""
    command = ["examples/quickstart/prepare.py", "--out", str(folder / "inputs"), "--digits", "1", "--seed", "0"]
    subprocess.run([sys.executable, *command], cwd=ROOT, timeout=PREPARE_S, check=True, stdout=subprocess.DEVNULL)
    cluster = Cluster(kind="job", image="registry.example/megatron_rl:0.9", nodes=2, gpus=1)
    (folder / "manifests" / "kubernetes").mkdir(parents=True)
    for name, text in manifests("pods", "pods", "model", cluster, own_prompts=True).items():
        (folder / "manifests" / name).write_text(text)
    (job,) = [each for each in read(folder / "manifests")[1] if each["kind"] == "Job"]
    return job


def lacking() -> str:
    """Return what this machine lacks for network namespaces; "" if nothing."""
    if os.geteuid() != 0:
        return f"network namespaces need root, and this is uid {os.geteuid()}"
    try:
        done = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "ip", "link", "show", "lo"],
                              capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    except FileNotFoundError as error:
        return f"{error.filename} is missing; Debian's util-linux and iproute2 have unshare and ip"
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kept = "work there and leave everything; default: a temporary folder"
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help=kept)
    parser.add_argument("--only", nargs="*", choices=JOBS, default=JOBS)
    options = parser.parse_args(arguments)
    if options.keep and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"--keep {options.keep} is not empty; name a new folder")
    if why := lacking():
        print(f"SKIPPED: {why}. A skip is not a pass: nothing was tested.")
        return SKIPPED
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that pods and namespaces end
    try:
        with contextlib.ExitStack() as stack:
            folder = options.keep or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pods-")))
            folder.mkdir(parents=True, exist_ok=True)
            job = prepare(folder.resolve())
            check(stack.enter_context(Pods(job, folder.resolve())), options.only)
    except CheckFailed as error:
        print(f"FAILED: {error}")
        return 1
    print("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
