"""Checks the SLURM templates by a stand-in srun, and that what tests/slurm/keeper.py keeps ends with its process.

The real thing, two nodes and all, is ``make test-slurm`` (tests/slurm/check.py).
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest

from tests.patience import HANG_S, patient, until
from tests.slurm import check, cluster
from tests.slurm.keeper import KeeperError, kept
from tests.tools import ROOT
from tests.tools.processes import alive
from tests.tools.slurm_stand_ins import SLURM, submit, write_program

pytestmark = pytest.mark.process

GSM8K = ROOT / "examples" / "gsm8k" / "gsm8k.sbatch"
TEMPLATES = [*sorted(SLURM.glob("*.sbatch")), GSM8K]
PARTS = ROOT / "megatron_rl" / "commands" / "templates" / "slurm"
SCRIPTS = sorted([GSM8K, *SLURM.iterdir(), *PARTS.iterdir(), *(ROOT / "examples" / "torchrun").iterdir()])
BOUND_S = patient(HANG_S)

# Two ranks that note SIGUSR1 and leave with 75; torchrun's answer to that is 1.
TORCHRUN = """#!/usr/bin/env python3
import os, pathlib, subprocess, sys
rank = '''
import pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
'''
if sys.argv[-1].isdigit():
    sys.exit(int(sys.argv[-1]))
ranks = [subprocess.Popen([sys.executable, "-c", rank, f"{sys.argv[-1]}/rank{i}"]) for i in range(2)]
codes = [each.wait() for each in ranks]
print(codes, file=sys.stderr)
sys.exit(1)
"""
STAND_IN = "tests.tools.test_slurm_templates:StandIn"
OWNER = f"""
import pathlib, signal, time
from tests.slurm.keeper import kept
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored,
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and so does one of nohup
with kept({STAND_IN!r}, pathlib.Path(__import__("sys").argv[1]), stop_s=20):
    print("up", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound_bash(script):
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=BOUND_S)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", str(script)], cwd=ROOT, check=True, timeout=BOUND_S)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_template_directives(template):
    text = template.read_text()
    wanted = "--requeue --open-mode=append --output=slurm-%x-%j.out --ntasks-per-node=1 --signal=B:USR1@300"
    assert all(f"#SBATCH {line}\n" in text for line in wanted.split())
    assert not re.search(r"^#SBATCH.*(account|partition|--qos|-A |-p )", text, re.M)
    assert "set -euo pipefail" in text and "# Launch:" in text


def test_the_page_names_every_variable_that_the_templates_read():
    page = (ROOT / "docs" / "slurm.md").read_text()
    scripts = [*TEMPLATES, *PARTS.iterdir()]
    read = {name for path in scripts for name in re.findall(r"\$\{([A-Z][A-Z_0-9]+):?[-?+]", path.read_text())}
    ours = {name for name in read if not name.startswith("SLURM")} - {"GSM8K"}  # examples/gsm8k's own
    assert len(ours) > 15 and {name for name in ours if f"`{name}`" not in page} == set()


def test_one_task_per_node_meets_at_the_head_node(tmp_path):
    given = ("--config", "x.yaml", "train.num_rollouts=3")
    code, (call,), said = submit(tmp_path, "multi_node.sbatch", *given, SAVE_EVERY="4")
    assert code == 0 and "--nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=a1,a2 --cpus-per-task=4" in call
    assert f"bash {PARTS}/node.sh a1:20007 -m megatron_rl.train" in call
    assert call.endswith("checkpoint.save_every_rollouts=4 --config x.yaml train.num_rollouts=3")
    assert "attempt 1: a1 a2;" in said and "checkpoint: none" in said
    assert "--container" not in call and "apptainer" not in call and " env " not in call
    code, calls, said = submit(tmp_path, "multi_node.sbatch", CONTAINER="docker")
    assert code == 2 and not calls and "choose none, pyxis or apptainer" in said


@pytest.mark.parametrize(("trainer_code", "saves", "requeued"), [
    ("75", "12", True), ("75", "", False), ("1", "12", False), ("0", "12", False), ("143", "12", False),
])
def test_job_requeues_itself_when_it_was_asked_to_leave_and_has_saved(tmp_path, trainer_code, saves, requeued):
    given = dict(TRAINER_CODE=trainer_code, TRAINER_SAVES=saves)
    code, calls, said = submit(tmp_path, "single_node.sbatch", nodes="a1", **given)
    assert code == int(trainer_code) and ("scontrol requeue 7" in calls) == requeued
    assert ("not requeued" in said) == (trainer_code == "75" and not requeued)


def test_vllm_takes_the_last_nodes_and_several_servers_on_one_have_successive_ports(tmp_path):
    given = dict(MODEL="m", VLLM_TP="8", VLLM_ARGS="--max-model-len 64", TRAINER_CODE="0")
    code, calls, _ = submit(tmp_path, "trainer_and_vllm.sbatch", "a=b", nodes="a1 a2 a3", **given)
    assert code == 0
    server, trainer = sorted((call for call in calls if call.startswith("srun")), key=lambda call: "node.sh" in call)
    assert "--nodelist=a3" in server and "--model m" in server
    assert "--api-key-env VLLM_API_KEY --tensor-parallel-size 8" in server
    assert "--host 0.0.0.0 --port 20008" in server and server.endswith("-- --max-model-len 64")
    assert "--nodelist=a1,a2" in trainer and trainer.endswith("rollout.servers=[http://a3:20008] a=b")
    assert calls.index("curl http://a3:20008/health") < calls.index(trainer) and "--replicas 1 " in server
    code, calls, said = submit(tmp_path, "trainer_and_vllm.sbatch", nodes="a1", MODEL="m")
    assert code == 2 and not calls and "VLLM_NODES=1 of --nodes=1" in said
    variables = {"MODEL": "m", "VLLM_NODES": "2", "VLLM_TP": "4"}  # as many servers as a node's 8 GPUs hold
    code, calls, _ = submit(tmp_path, "trainer_and_vllm.sbatch", nodes="a1 a2 a3", **variables)
    assert code == 0
    server, trainer = sorted((call for call in calls if call.startswith("srun")), key=lambda call: "node.sh" in call)
    assert "--nodelist=a2,a3" in server and "--port 20008" in server
    assert "--tensor-parallel-size 4 --replicas 2 --log-dir" in server
    servers = ["http://a2:20008", "http://a2:20009", "http://a3:20008", "http://a3:20009"]
    assert f"rollout.servers=[{','.join(servers)}]" in trainer
    assert [call for call in calls if call.startswith("curl")] == [f"curl {each}/health" for each in servers]


@pytest.mark.parametrize(("variables", "code", "words"), [
    ({"VLLM_TP": "16"}, 2, "VLLM_TP=16 is more than the 8 GPUs of a node, and a server does not span nodes"),
    ({"VLLM_TP": "2", "VLLM_REPLICAS": "8"}, 2, "servers of VLLM_TP=2 GPUs want 16 of the 8 GPUs"),
    ({"VLLM_TP": "3"}, 0, "2 servers of 3 GPUs leave 2 of the 8 GPUs of a node idle"),
    ({"VLLM_REPLICAS": "1", "SLURM_GPUS_ON_NODE": ""}, 0, "vLLM is ready at http://a2:20008"),
])
def test_servers_lie_within_a_node(tmp_path, variables, code, words):
    ended, calls, said = submit(tmp_path, "trainer_and_vllm.sbatch", MODEL="m", **variables)
    assert (ended, bool(calls)) == (code, not code) and words in said, said


def test_gsm8k_prepares_on_a_node_and_trains(tmp_path):
    code, calls, said = submit(tmp_path, GSM8K, "sft.steps=0", nodes="a1 a2", GSM8K=str(tmp_path))
    assert code == 0, said
    prepare, train = calls
    assert "--nodelist=a1 " in prepare and f"prepare.py --gsm8k {tmp_path} --out {tmp_path}/run/inputs" in prepare
    assert "--nodelist=a1,a2 " in train and train.endswith(f"eval.path={tmp_path}/run/inputs/test.jsonl sft.steps=0")
    (tmp_path / "run/inputs/model").mkdir(parents=True)
    for name in ("test.jsonl", "model/config.json"):  # of an earlier attempt
        (tmp_path / "run/inputs" / name).touch()
    assert len(submit(tmp_path, GSM8K, GSM8K=str(tmp_path))[1]) == 1


PROLOGUE = """
set -u
unset_variable_of_a_module() { echo "${NOBODY_SET_THIS}"; }
set +u
unset_variable_of_a_module >/dev/null
export FABRIC=here PATH="/of/the/module:$PATH"
set -- other arguments
"""


def test_a_prologue_is_sourced_on_each_node_before_the_task(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text(f"PATH={tmp_path}/bin:$PATH\n")
    (tmp_path / "modules.sh").write_text(PROLOGUE)
    (tmp_path / "fails.sh").write_text("false\n")

    def task(prologue: str) -> tuple[int, str]:
        shown = ["bash", "-c", 'echo "$FABRIC $1 $PATH"', "name", "an argument"]
        command = ["bash", str(PARTS / "task.sh"), str(tmp_path), *shown]
        environment = {**os.environ, "FABRIC": "there", "MEGATRON_RL_PROLOGUE": prologue, "SLURMD_NODENAME": "a1"}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=BOUND_S)
        return done.returncode, done.stdout + done.stderr

    for path in ("modules.sh", str(tmp_path / "modules.sh")):
        code, said = task(path)
        assert code == 0 and f"here an argument {tmp_path}/bin:/of/the/module:" in said, said
    assert "there an argument" in task("")[1]
    for path, words in (("none.sh", "is no file that a1 can read"), ("fails.sh", "fails.sh ended with 1 on a1")):
        code, said = task(path)
        assert code == 2 and words in said and "an argument" not in said, said


@pytest.mark.parametrize(("code", "requeued"), [("75", True), ("1", False), ("143", False)])
def test_a_server_listens_at_the_first_node_and_goes_on_where_it_was_asked_to_leave(tmp_path, code, requeued):
    given = {"TINKER_SERVER_KEYS": "tml-one,tml-two", "SERVE_PORT": "9000", "TRAINER_CODE": code}
    ended, calls, said = submit(tmp_path, "tinker_server.sbatch", "--config", "x.yaml", **given)
    assert ended == int(code) and ("scontrol requeue 7" in calls) == requeued
    assert "node.sh a1:20007 -m megatron_rl.serve --run-dir" in calls[0]
    wanted = "serve.host=0.0.0.0 serve.port=9000 serve.api_key_env=TINKER_SERVER_KEYS serve.save_every_steps=10"
    assert calls[0].endswith(f"{wanted} --config x.yaml") and "tml-one" not in calls[0]
    assert (tmp_path / "run" / "address").read_text() == "http://a1:9000\n"
    ended, calls, said = submit(tmp_path, "tinker_server.sbatch")
    assert ended != 0 and not calls and "TINKER_SERVER_KEYS" in said


def start_node(tmp_path: pathlib.Path, last: str) -> subprocess.Popen:
    write_program(tmp_path / "bin", "torchrun", TORCHRUN)
    environment = os.environ | dict(SLURM_NODEID="0", SLURM_STEP_NUM_NODES="1", SLURMD_NODENAME="a1", SLURM_JOB_ID="7")
    environment |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PROCESSES": "2"}
    command = ["bash", str(PARTS / "node.sh"), "a1:20007", "-m", "megatron_rl.train", last]
    return subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("code", [0, 3])
def test_node_ends_with_torchruns_exit_code(tmp_path, code):
    assert start_node(tmp_path, str(code)).wait(BOUND_S) == code


@pytest.mark.parametrize(("number", "code", "whole_step"), [
    # SIGTERM to every process would end the stand-in; the real torchrun then ends its ranks by it
    (signal.SIGUSR1, 75, False), (signal.SIGUSR1, 75, True), (signal.SIGTERM, 143, False),
])
def test_signal_reaches_the_ranks_and_not_torchrun(tmp_path, number, code, whole_step):
    node = start_node(tmp_path, str(tmp_path))
    assert until(lambda: all((tmp_path / f"rank{i}").exists() for i in range(2)))
    (os.killpg if whole_step else os.kill)(node.pid, number)
    _, said = node.communicate(timeout=BOUND_S)
    assert node.returncode == code
    assert "[75, 75]" in said  # both ranks left by their own handler


@pytest.mark.parametrize(
    ("uid", "why"), [(1000, "slurmd needs root, and this is uid 1000"), (0, "srun missing and there is no apt-get")]
)
def test_check_that_cannot_run_is_skipped_with_a_code_of_its_own(monkeypatch, capsys, uid, why):
    monkeypatch.setattr(cluster.os, "geteuid", lambda: uid)
    monkeypatch.setattr(cluster, "missing_programs", lambda: ["srun"])
    monkeypatch.setattr(cluster.shutil, "which", lambda *_, **__: None)
    assert check.main([]) == 77
    said = capsys.readouterr().out
    assert said.startswith("SKIPPED: ") and why in said and "passed" not in said


class StandIn:
    """A daemon in place of SLURM's: it sleeps, its process id lies in the folder, and its end is written there."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def __enter__(self) -> StandIn:
        if (self.folder / "refuse").exists():
            raise RuntimeError("no daemon today")
        self.daemon = subprocess.Popen(["sleep", "1000"])
        (self.folder / "pid").write_text(str(self.daemon.pid))
        return self

    def __exit__(self, *_: object) -> None:
        self.daemon.terminate()
        (self.folder / "ended").write_text(str(self.daemon.wait()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM, signal.SIGINT], ids=lambda x: x.name)
def test_what_is_kept_ends_with_its_owner(tmp_path: pathlib.Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    owner = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    ended = tmp_path / "ended"
    with owner.stdout:
        assert owner.stdout.readline() == b"up\n"
        daemon = int((tmp_path / "pid").read_text())
        assert alive(daemon)
        owner.send_signal(number)
        owner.wait(BOUND_S)
    assert until(lambda: ended.exists() and ended.read_text() == str(-signal.SIGTERM)) and not alive(daemon)


def test_what_does_not_start_is_an_error_with_its_reason(tmp_path: pathlib.Path) -> None:
    (tmp_path / "refuse").touch()
    with pytest.raises(KeeperError, match="no daemon today"), kept(STAND_IN, tmp_path, stop_s=BOUND_S):
        raise AssertionError("entered without a daemon")
    (tmp_path / "refuse").unlink()
    with kept(STAND_IN, tmp_path, stop_s=BOUND_S):
        assert (tmp_path / "pid").exists() and not (tmp_path / "ended").exists()
    assert (tmp_path / "ended").exists()
