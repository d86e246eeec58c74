"""Checks distributed/child_process.py: a rank ends with its launcher, and only with a launcher."""

import os
import signal
import subprocess
import sys

import pytest

from tests.patience import patient

CHILD = "from megatron_rl.distributed.child_process import end_with_launcher as e; e(); print('up'); input()"
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-u", "-c", {CHILD!r}])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.process
@pytest.mark.parametrize("launched", [True, False])
def test_a_rank_ends_with_torchrun_and_another_process_outlives_its_shell(launched):
    given = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    if launched:
        given["TORCHELASTIC_RUN_ID"] = "one"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=given, **pipes)
    try:
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "up\n"
        parent.send_signal(signal.SIGKILL)
        parent.wait(patient(10))
        if launched:  # its end closes the pipe that it shares with its parent
            assert parent.stdout.read() == ""
        else:
            os.kill(pid, 0)
    finally:
        parent.kill()
        parent.stdin.close()  # ends a child that waits for a line


CTRL_C = """
import os, signal
from megatron_rl import cli
from megatron_rl.config import Config
def run(config):
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("not reached")
cli._stages_import = lambda is_main: True
cli.load_config = lambda *given: Config()
cli.validate_config = lambda config: None
cli.end_process(lambda: cli.main(run, []))
"""


@pytest.mark.process
@pytest.mark.parametrize(("rank", "lines"), [("0", 1), pytest.param("1", 0, marks=pytest.mark.long)])
def test_ctrl_c_without_checkpoints_is_one_line_of_the_first_rank(rank, lines):
    given = {"env": os.environ | {"RANK": rank}, "capture_output": True, "text": True, "timeout": patient(60)}
    ended = subprocess.run([sys.executable, "-c", CTRL_C], **given)
    assert ended.returncode == 130 and ended.stderr.count("\n") == lines, ended
    assert "ended by Ctrl-C" in ended.stderr or not lines
