"""A real SLURM of two nodes, n0 and n1, on this one machine: munged, slurmctld and two slurmd in a folder of their own.

    with Cluster(folder) as cluster:
        print(cluster.run("sinfo"))

    python -m tests.slurm.cluster [command ...]

The command line starts it, runs the command (default: a shell) in its environment, and stops it. Its daemons and jobs
are a keeper's (keeper.py), which ends them when the process that asked for them has ended, by whatever signal.

Debian's packages (slurmctld, slurmd, slurm-client, munge 0.5; SLURM 22.05 was run), as root, since slurmd starts jobs
as their user. Configuration, keys, state, logs and sockets lie in the folder and the ports are free ones: a SLURM that
the machine has is not touched. Only /etc/hosts is shared: for the cluster's life one marked line makes n0 and n1
resolve, and a lock on it keeps a second cluster out. Each node offers one "GPU", a count without a device, so that
templates are submitted with their own --gpus-per-node=1.

What it cannot show: proctrack/cgroup (linuxproc here: a signal to a step reaches every process in it, not each task's
first), sacct (it needs slurmdbd and a database: ``scontrol show job`` counts restarts), two hosts' different files,
GPUs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from tests.patience import patient
from tests.slurm.keeper import KeeperError, kept

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "mungekey", "sbatch", "srun", "scontrol", "sinfo")
NODES = ("n0", "n1")
START_S, STOP_S, COMMAND_S, INSTALL_S = patient(60.0), patient(20.0), patient(60.0), patient(600.0)
NO_JOBS_S = patient(40.0)  # after scancel: KillWait is 30 s
END_S = NO_JOBS_S + 4 * STOP_S + COMMAND_S
HOSTS = pathlib.Path("/etc/hosts")
HOSTS_LINE = f"127.0.0.1 {' '.join(NODES)}  # megatron_rl tests/slurm/cluster.py, while it runs\n"


class ClusterError(RuntimeError):
    """The cluster did not start, or a command of its own failed: what, with which output."""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]


def search_path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def install() -> str | None:
    """Install what is missing by apt-get; return None when all is there, else why it is not."""
    if not missing_programs():
        return None
    missing = f"{', '.join(missing_programs())} missing"
    if os.geteuid() != 0:
        return f"{missing} and uid {os.geteuid()} cannot install; as root: apt-get install slurm-wlm"
    if shutil.which("apt-get") is None:
        return f"{missing} and there is no apt-get here; install SLURM and munge by this system's own means"
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *PACKAGES]
    said = ""
    for step in (command, ["apt-get", "update"], command):  # a fresh image has no package lists yet
        try:
            own = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            done = subprocess.run(step, env=own, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        except subprocess.TimeoutExpired:
            return f"`{' '.join(step)}` took more than {INSTALL_S:g} s"
        said = (done.stdout + done.stderr)[-1500:]
        if not missing_programs():
            return None
    return f"`{' '.join(command)}` left {', '.join(missing_programs())} missing: {said}"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _configuration(folder: pathlib.Path) -> str:
    host = socket.gethostname().split(".")[0]
    controller, *ports = _free_ports(1 + len(NODES))
    return f"""\
ClusterName=megatron-rl-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0
KillWait=30
NodeName={NODES[0]},{NODES[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]},{ports[1]} \
  CPUs=4 Gres=gpu:1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Commands:
    """Runs commands that talk to the cluster of a folder, in its ``environment``."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": search_path()}

    def run(self, *command: str, timeout_s: float = COMMAND_S) -> str:
        """Run a command and return its output; raises ClusterError with what it said where it fails."""
        given = {"env": self.environment, "timeout": timeout_s}
        done = subprocess.run(command, **given, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"`{' '.join(command)}` ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """Return ``scontrol show job``, by field."""
        fields = self.run("scontrol", "show", "job", job_id, "--oneliner").split()
        return dict(field.split("=", 1) for field in fields if "=" in field)


class Cluster(Commands):
    """The cluster, which starts on enter and ends on exit, or when this process ends, be it by SIGKILL (keeper.py)."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self._kept = contextlib.ExitStack()

    def __enter__(self) -> Cluster:
        try:
            self._kept.enter_context(kept("tests.slurm.cluster:Daemons", self.folder, stop_s=END_S))
        except KeeperError as error:
            raise ClusterError(str(error)) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()


class Daemons(Commands):
    """The cluster's daemons, which start on enter and are ended on exit, the jobs before them."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self._processes: dict[str, subprocess.Popen] = {}
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Daemons:
        if os.geteuid() != 0:
            raise ClusterError(f"slurmd starts jobs as their user, so it needs root, and this is uid {os.geteuid()}")
        with contextlib.ExitStack() as stack:
            stack.enter_context(_node_names())
            stack.callback(self._stop)
            self._start()
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _start(self) -> None:
        for name in ("munge", "state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)  # munged's socket must be reachable by all
        munge = self.folder / "munge"
        (self.folder / "slurm.conf").write_text(_configuration(self.folder), encoding="utf-8")
        resources = "".join(f"NodeName={node} Name=gpu File=/dev/null\n" for node in NODES)
        (self.folder / "gres.conf").write_text(resources, encoding="utf-8")
        self.run("mungekey", "--create", f"--keyfile={munge}/key")
        self._launch("munged", "munged", "--foreground", f"--socket={munge}/socket", f"--key-file={munge}/key",
                     f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
                     "--num-threads=2")
        self._wait("munged's socket", lambda: (munge / "socket").exists())
        self._launch("slurmctld", "slurmctld", "-D", "-f", f"{self.folder}/slurm.conf")
        for node in NODES:
            self._launch(f"slurmd.{node}", "slurmd", "-D", "-N", node, "-f", f"{self.folder}/slurm.conf")
        self._wait(f"{len(NODES)} idle nodes", self._is_up)

    def _launch(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("wb") as out:
            self._processes[name] = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL,
                                                     stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def _is_up(self) -> bool:
        try:
            return self.run("sinfo", "--noheader", "--Node", "--format=%t").split() == ["idle"] * len(NODES)
        except (ClusterError, subprocess.TimeoutExpired):
            return False

    def _wait(self, what: str, is_there) -> None:
        deadline = time.monotonic() + START_S
        while not is_there():
            ended = [name for name, process in self._processes.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                why = f"{', '.join(ended)} ended" if ended else f"not within {START_S:g} s"
                raise ClusterError(f"waited for {what}: {why}\n{self.logs()}")
            time.sleep(0.2)

    def logs(self) -> str:
        """Return the end of every daemon's output."""
        paths = sorted(self.folder.glob("*.out"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in paths)

    def _stop(self) -> None:
        if "slurmctld" in self._processes:
            with contextlib.suppress(ClusterError, subprocess.TimeoutExpired):
                self.run("scancel", "--user=root", timeout_s=10.0)
                self._wait_for_no_jobs()
        for name in reversed(list(self._processes)):
            self._processes[name].terminate()
            try:
                self._processes[name].wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._processes[name].kill()
                self._processes[name].wait()

    def _wait_for_no_jobs(self) -> None:
        """Wait until no job runs: jobs that run on would outlive their slurmd."""
        deadline = time.monotonic() + NO_JOBS_S
        while self.run("squeue", "--noheader", timeout_s=10.0).strip() and time.monotonic() < deadline:
            time.sleep(0.5)


@contextlib.contextmanager
def _node_names():
    """Make n0 and n1 resolve to this machine within the context, one cluster at a time.

    The file is written in place: in a container it is a mount.
    """
    with HOSTS.open("r+", encoding="utf-8") as hosts:
        try:
            fcntl.flock(hosts, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            told = f"another test cluster runs on this machine (it holds the lock on {HOSTS}); wait for it to end"
            raise ClusterError(told) from None
        before = hosts.read().replace(HOSTS_LINE, "")  # one that a killed cluster left
        try:
            _rewrite(hosts, before + ("" if before.endswith("\n") or not before else "\n") + HOSTS_LINE)
            yield
        finally:
            _rewrite(hosts, before)


def _rewrite(file, text: str) -> None:
    file.seek(0)
    file.write(text)
    file.truncate()
    file.flush()


def main(command: list[str]) -> int:
    why = install()
    if why:
        print(f"cluster: {why}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the folder is removed
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, Cluster(pathlib.Path(folder)) as cluster:
        print(f"cluster: up in {folder}; {cluster.run('sinfo', '--noheader', '--Node').splitlines()}", file=sys.stderr)
        return subprocess.run(command or ["bash"], env=cluster.environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
