"""Runs a command on a host whose own name has no address: in a network and a UTS namespace of its own."""

import os
import signal
import subprocess
import sys

import pytest

from tests.patience import patient
from tests.workers.environment import worker_environment

NAME = "megatron-rl-nameless-host"
UNSHARE = ["unshare", "--user", "--map-root-user", "--uts", "--net"]
# Names the host, takes its loopback up (SIOCSIFFLAGS: IFF_UP, IFF_LOOPBACK), and becomes the command.
ENTER = f"""
import fcntl, os, socket, struct, sys
socket.sethostname({NAME!r})
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 1 | 8))
os.execv(sys.argv[1], sys.argv[1:])
"""


def run_nameless(command: list[str], seconds: float) -> tuple[int | None, str]:
    """Return the command's exit code, None where it had not ended in time, and what it said.

    Skips the test where this host permits no namespaces, or gives every host's own name an address.
    """
    enter = [*UNSHARE, sys.executable, "-c", ENTER]
    asks = f"import socket; socket.getaddrinfo({NAME!r}, None)"
    known = subprocess.run([*enter, sys.executable, "-c", asks], capture_output=True, text=True, check=False)
    if known.returncode == 0:
        pytest.skip("this host's resolver gives its own name an address, whatever it is")
    if "gaierror" not in known.stderr:
        pytest.skip(f"no namespace can be made here: {known.stderr.strip()}")
    started = subprocess.Popen(
        [*enter, *command],
        env=worker_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = started.communicate(timeout=patient(seconds))
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        return None, started.communicate()[0]
    return started.returncode, said
