"""The parent process of one vLLM server: ends all of the server's processes together.

    python -m megatron_rl.rollout.vllm.server_process PARENT GRACE_S COMMAND ...      # started by supervisor.py alone

PARENT is the supervisor's process id. GRACE_S is the time in seconds from SIGTERM to SIGKILL.
COMMAND starts the server.

The server is ended at a signal, if the supervisor ends, or if the server's API process ends. A vLLM
server has several processes. If only its API process is killed (kill -9, out of memory), the
engine's process stays and holds the GPU's memory, and the next server finds none. So each server
gets this small parent, which ends the server's whole process group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from megatron_rl.distributed.child_process import signal_at_parents_end


def main(arguments: list[str]) -> int:
    parent, grace_s, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    signals: list[int] = []  # not an Event: the handler may interrupt a wait that holds the Event's lock
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: signals.append(number))
    signal_at_parents_end(signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    server = subprocess.Popen(command, process_group=0, preexec_fn=lambda: signal_at_parents_end(signal.SIGKILL))
    try:
        while server.poll() is None and not signals:
            time.sleep(0.1)
        if server.poll() is None:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed below
                server.wait(grace_s)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the group may have ended
            os.killpg(server.pid, signal.SIGKILL)
    code = server.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
