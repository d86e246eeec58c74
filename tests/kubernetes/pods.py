"""Two network namespaces in place of two nodes, and a run's pods in them as a kubelet would start them (root, Linux).

A pod is a process of its own PID, UTS, mount and network namespace: its launcher is process 1, its host name the pod's,
eth0 its one network. Its names lie in /etc/netns/<namespace>/hosts, which `ip netns exec` puts in place of /etc/hosts;
pod 0's is written when pod 0 starts, as DNS learns it.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping

from tests.kubernetes.manifests import variables
from tests.tools.processes import end

ROOT = pathlib.Path(__file__).parents[2]
NETNS = pathlib.Path("/etc/netns")
BECOME = 'hostname "$1" && cd "$2" && shift 2 && exec "$@"'


class Pods:
    """The two pods of a job of two nodes; ``folder`` stands for what all pods mount."""

    def __init__(self, job: dict, folder: pathlib.Path) -> None:
        self.job, self.folder = job, folder
        self.names = [f"rl{os.getpid()}-{index}" for index in (0, 1)]
        self.addresses = ["10.244.0.10", "10.244.1.10"]
        self._running: dict[int, subprocess.Popen] = {}
        self._killed: set[int] = set()  # process ids of unshare, whose pod was killed

    def __enter__(self) -> "Pods":
        for name in self.names:
            self._ip("netns", "add", name)
            (NETNS / name).mkdir(parents=True)
            (NETNS / name / "hosts").write_text("127.0.0.1 localhost\n")
        first, second = self.names
        self._ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        for name, address in zip(self.names, self.addresses, strict=True):
            self._ip("-n", name, "address", "add", f"{address}/16", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            end(process)
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False)
            shutil.rmtree(NETNS / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # others' namespaces lie there too
            NETNS.rmdir()

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=60, capture_output=True, text=True)

    def start(self, index: int, log: pathlib.Path, changes: Mapping[str, str], words: list[str]) -> subprocess.Popen:
        """Start a pod's container from its manifest; ``changes`` are variables, ``words`` arguments after its own."""
        (container,) = self.job["spec"]["template"]["spec"]["containers"]
        host = f"{self.job['metadata']['name']}-{index}"
        stable = f"{host}.{self.job['spec']['template']['spec']['subdomain']}"
        for name in self.names:
            self._learn(name, f"{self.addresses[index]} {stable} {host}\n")
        added = {"JOB_COMPLETION_INDEX": str(index), "POD_IP": self.addresses[index], **changes}
        own = variables(container, added)
        own["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        own["PYTHONPATH"] = str(ROOT)
        command = [*("ip", "netns", "exec", self.names[index], "unshare", "--uts", "--pid", "--fork", "--mount-proc"),
                   *("--kill-child", "sh", "-c", BECOME, "sh", host, str(self.folder)),
                   *container["command"], *container["args"], *words]  # fmt: skip
        with log.open("a") as out:
            process = subprocess.Popen(command, env=own, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        self._running[index] = process
        return process

    @staticmethod
    def _learn(name: str, line: str) -> None:
        """Write a line into the hosts of a namespace, in place: a pod that runs has the file itself mounted."""
        path = NETNS / name / "hosts"
        if line not in path.read_text():
            with path.open("a") as file:
                file.write(line)

    def signal(self, index: int, number: signal.Signals) -> None:
        """Send a signal to a pod's process 1, and to nothing else."""
        unshare = self._running[index].pid
        (process,) = _children(unshare)
        os.kill(process, number)
        if number == signal.SIGKILL:
            self._killed.add(unshare)

    def exit_code(self, process: subprocess.Popen) -> int:
        """Return the code of a pod that has ended, as a kubelet reports it.

        unshare (util-linux 2.38) ends with 1 where SIGKILL ended its child, since it cannot end itself by that.
        """
        if process.pid in self._killed:
            return 128 + signal.SIGKILL
        return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _children(process: int) -> Iterator[int]:
    for path in pathlib.Path(f"/proc/{process}/task").glob("*/children"):
        yield from map(int, path.read_text().split())
