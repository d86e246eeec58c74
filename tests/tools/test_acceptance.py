"""Checks that tools/acceptance.py passes a right cell, names planted faults, ends hangs, and names cells not run."""

import json
import os
import pathlib
import re
import subprocess
import sys

import acceptance
import psutil
import pytest
from acceptance_matrix.cells import CELLS, FAULTS, KINDS, LABELS, Cell, tolerances

from tests.patience import patient, until
from tests.reference import MIXTURES
from tests.tools import ROOT, TOOLS, words
from tests.tools.processes import alive
from tests.tools.slurm_stand_ins import write_program

pytestmark = pytest.mark.process

CPU_HOST = {"gpus": 0, "device": "a CPU", "where": "gloo, CPU", "python": "3.11", "versions": {"torch": "2"}}
ONE_GPU, BY_NAME = {**CPU_HOST, "gpus": 1, "where": "NCCL, x"}, {cell.name: cell for cell in CELLS}
APEX = {"apex": "ModuleNotFoundError: No module named 'apex'"}
VLLM = {"vllm": "ModuleNotFoundError: No module named 'vllm'"}
PLANTED = words("tp2:drop-gradient:gradient pp2:wrong-weight:logprobs pp2:drop-survivor:skip pp2:repack:bitwise "
                "single:freeze-ghost:ghost dp2:stale-replica:replicas dp2-overlap:no-ghost-gather:replicas")
PLANTED_IN_FEATURES = words(
    "single:drop-gradient:gradient lora:drop-gradient:gradient critic:wrong-weight:values "
    "critic:drop-gradient:gradient replay:lose-experts:logprobs replay-ep2:drop-gradient:gradient "
    "offload:lose-state:offload offload:keep-memory:held checkpoint:lose-state:checkpoint "
    "sync-shared-memory:flip-byte:delivered delta-shared-memory:flip-byte:delivered "
    "rollout-embedded:other-weights:engine long:drop-gradient:gradient memory:whole-logits:memory"
)


def fill(folder: pathlib.Path, *arguments: str) -> tuple[int, list[dict], str]:
    """Run the tool with no GPU in sight; return its exit code, its rows and its output."""
    out = folder / "matrix.json"
    command = [sys.executable, str(TOOLS / "acceptance.py"), "--json", str(out), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    given = dict(capture_output=True, text=True, timeout=patient(600), check=False)
    done = subprocess.run(command, env=environment, cwd=folder, **given)
    return done.returncode, json.loads(out.read_text())["cells"] if out.exists() else [], done.stdout + done.stderr


# Stands in for Python: says how many GPUs; as a launcher, gives the answer of a cell, or has a worker that hangs.
PYTHON = """#!/usr/bin/env bash
[ "$1" = -c ] && echo "$COUNTED" && exit
if [ -n "$MEASURED" ]; then
  while [ "$1" != --out ]; do shift; done
  exec cp "$MEASURED" "$2"
fi
setsid sleep 1000 &
echo $! > worker
sleep 1000
"""


@pytest.fixture
def python(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path, "python", PYTHON)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


def test_single_cell_passes_and_every_other_reason_is_named(nursery, tmp_path, python, monkeypatch, capsys) -> None:
    """The cell's own process is real, and forked; no launcher starts it."""
    measured, page, said = (tmp_path / name for name in ("measured.json", "docs/matrix.md", "said.txt"))
    alone = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    alone |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    stdin, held_open = os.pipe()  # the cell exits when it closes
    given = dict(printed=said, stdin=stdin, environment=alone, program=words(f"--cell single --out {measured}"))
    fork = nursery.start("tests.workers.nursery:run_program", [str(TOOLS / "acceptance.py")], **given)
    os.close(stdin)
    try:
        assert fork.wait(patient(600.0)) == 0, said.read_text()
    finally:
        os.close(held_open)
        fork.kill()
    exec(acceptance.COUNT_GPUS, {})
    assert re.fullmatch(r"GPUS \d+ ?.*", capsys.readouterr().out.strip())
    monkeypatch.setenv("COUNTED", "GPUS 0")
    monkeypatch.setenv("MEASURED", str(measured))
    out = tmp_path / "matrix.json"
    assert acceptance.main(["--only", "=single", "--json", str(out), "--markdown", str(page)]) == 0
    (row,) = json.loads(out.read_text())["cells"]
    assert row["status"] == "passed" and set(row["checks"]) == {"logprobs", "gradient", "skip", "bitwise", "ghost"}
    assert 0 < row["checks"]["gradient"]["error"] < 1e-5 and row["checks"]["ghost"]["error"] == 0.0
    text = page.read_text()
    assert "No GPU was available" in text and "| one process, float32 | one process | gloo, CPU | passed: " in text
    assert str(tmp_path) not in text and str(ROOT) not in text


@pytest.mark.long
def test_a_cell_passes_by_torchrun(tmp_path: pathlib.Path) -> None:
    code, rows, output = fill(tmp_path, "--only", "=single")
    assert code == 0 and rows[0]["status"] == "passed", output


def test_hang_is_bounded_and_leaves_no_process(tmp_path: pathlib.Path, python, monkeypatch) -> None:
    worker = tmp_path / "worker"

    class Launched(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            """Let the time be over as soon as the worker runs."""
            if timeout is None:
                return super().wait()
            assert until(lambda: worker.exists() and worker.read_text().endswith("\n"))
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Launched)
    given = acceptance.parse(["--only", "=single", "--timeout", "3.5"])
    row = acceptance.run_cell(given.cells[0], given, CPU_HOST, tmp_path)
    assert (row["status"], row["reason"]) == ("failed", "no answer in 3.5 s; its processes were killed")
    assert until(lambda: not alive(int(worker.read_text())))


def judged(cell: Cell, **errors: float) -> dict:
    found = {"errors": {**dict.fromkeys(cell.checks, 0.0), **errors}, "backend": "gloo"}
    return acceptance.judge(cell, json.loads(json.dumps(found)), cuda=False)


def test_cell_passes_only_with_every_check_within_its_bound() -> None:
    cell = BY_NAME["dp2"]
    assert judged(cell)["status"] == "passed"
    assert judged(cell, replicas=1.0)["reason"].startswith("replicas 1.0e+00, allowed 0 ")
    nan = judged(cell, skip=float("nan"))
    assert nan["status"] == "failed" and nan["checks"]["skip"]["error"] == "nan"
    missing = {"errors": {name: 0.0 for name in cell.checks if name != "bitwise"}}
    assert acceptance.judge(cell, missing, cuda=False)["reason"].startswith("bitwise nan")
    exact = BY_NAME["checkpoint"]  # no check of its has a tolerance
    assert judged(exact)["status"] == "passed"
    assert judged(exact, checkpoint=3.0)["reason"].startswith("checkpoint 3.0e+00, allowed 0 ")


@pytest.mark.parametrize(("name", "host", "processes", "imports", "reason"), [
    ("tp2-pp2", ONE_GPU, 4, {}, "needs 4 GPUs, this host has 1"),
    ("single", ONE_GPU, 4, {}, ""),
    ("tp2-pp2", CPU_HOST, 2, {}, "needs 4 processes, --max-processes is 2"),
    ("te-single", CPU_HOST, 4, {}, "needs a GPU for transformer_engine, this host has none"),
    ("sync-cuda-ipc", CPU_HOST, 4, {}, "needs a GPU, this host has none"),
    ("sync-broadcast", ONE_GPU, 4, {}, "needs 2 GPUs, this host has 1"),
    ("adam-apex", ONE_GPU, 4, APEX, f"apex cannot be used: {APEX['apex']}"),
    ("vllm", CPU_HOST, 4, VLLM, f"vllm cannot be used: {VLLM['vllm']}"),
])
def test_a_cell_that_this_host_cannot_run_says_why(name, host, processes, imports, reason) -> None:
    assert acceptance.why_not(BY_NAME[name], host, processes, imports) == reason


def test_ranks_share_a_gpu_only_when_told() -> None:
    assert acceptance.why_not(BY_NAME["pp2"], ONE_GPU, 4, {}, share_gpu=True) == ""
    assert acceptance.why_not(BY_NAME["tp2-pp2"], ONE_GPU, 2, {}, share_gpu=True).endswith("--max-processes is 2")
    assert "an engine over 2 GPUs" in acceptance.why_not(BY_NAME["vllm-tp2"], ONE_GPU, 4, {}, share_gpu=True)
    assert acceptance.where(BY_NAME["pp2"], ONE_GPU) == "NCCL over sockets, one GPU"
    assert acceptance.where(BY_NAME["single"], ONE_GPU) == "NCCL, x"
    row = {**dict.fromkeys(("feature", "dtype", "layout", "status", "nearest"), "y"), "reason": "", "seconds": 1.0}
    row["where"] = acceptance.where(BY_NAME["pp2"], ONE_GPU)
    assert "| NCCL over sockets, one GPU |" in acceptance.table_row(row, ONE_GPU["where"])
    row = {"feature": "f", "dtype": "float32", "layout": "TP2", "status": "not run", "reason": "why"}
    assert acceptance.table_row(row, "NCCL, x") == "| f, float32 | TP2 | - | not run: why | - |"


def test_cells_cover_every_layout_and_every_kind_has_its_checks_and_its_module() -> None:
    assert {cell.kind for cell in CELLS} == set(KINDS) and len(BY_NAME) == len(CELLS)
    for cell in CELLS:
        assert cell.expert == 1 or cell.family in MIXTURES, cell.name  # expert ranks without experts prove nothing
        bounds = {**tolerances(cell.dtype, cuda=False), **tolerances(cell.dtype, cuda=True)}
        assert cell.checks and set(cell.checks) <= set(bounds), cell.name
        assert (TOOLS / "acceptance_matrix" / f"{cell.kind}.py").exists() and set(cell.checks) <= set(LABELS)
    layouts = {(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)}
    assert {(c.tensor, c.pipeline, c.data) for c in CELLS} >= layouts
    assert {(c.virtual, c.expert) for c in CELLS} >= {(1, 1), (2, 1), (1, 2)}


def test_several_names_choose_their_cells() -> None:
    given = acceptance.parse(["--only", "=lora,=pp2,family-"])
    assert [x.name for x in given.cells][0] == "pp2" and "lora" in {x.name for x in given.cells}
    assert {x.name for x in given.cells} >= {"family-qwen3", "te-family-llama"}
    assert "lora-pp2" not in {x.name for x in given.cells}


def test_reason_is_the_first_error_without_paths() -> None:
    log = '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/home/me/x.py", line 3\n[rank1]: '
    log += "FileNotFoundError: no /home/me/model/config.json here\nChildFailedError: \n"
    assert acceptance.reason_in(log) == "FileNotFoundError: no <path> here"
    warning = "[rank0]:[W1129 21:59:33.6 ProcessGroupNCCL.cpp:1575] Warning: x\n"
    assert acceptance.reason_in(f"[rank0]: [rank0]: RuntimeError: twice\n{warning}") == "RuntimeError: twice"
    assert acceptance.reason_in(f"it stopped\n{warning}") == "it stopped"


@pytest.mark.long
@pytest.mark.parametrize("planted", PLANTED)
def test_every_check_can_fail(pool, planted: str) -> None:
    """A planted fault is measured by workers; that a failed cell ends the tool with 1 is tested below."""
    cell, fault, check = planted.split(":")
    found = pool.run(BY_NAME[cell].world, measure_faulty, BY_NAME[cell], fault, timeout_s=120)[0]
    row = acceptance.judge(BY_NAME[cell], json.loads(json.dumps(found)), cuda=False)
    assert row["status"] == "failed" and check in row["reason"].split(), row
    assert row["checks"][check]["error"] > 10 * row["checks"][check]["allowed"], row
    assert fault in FAULTS


@pytest.mark.long
@pytest.mark.parametrize("planted", PLANTED_IN_FEATURES)
def test_every_check_of_a_feature_can_fail(tmp_path: pathlib.Path, planted: str) -> None:
    cell, fault, check = planted.split(":")
    code, rows, output = fill(tmp_path, "--only", f"={cell}", "--inject", fault)
    assert code == 1 and rows[0]["status"] == "failed", output
    assert check in rows[0]["reason"].split() and fault in FAULTS, rows[0]["reason"]


def measure_faulty(rank: int, world: int, cell: Cell, fault: str) -> dict:
    from acceptance_matrix import checks

    return checks.measure(cell, fault, 60.0)


@pytest.mark.long
def test_hang_of_one_rank_inside_the_cell_ends(tmp_path: pathlib.Path) -> None:
    """The time reaches the rank that sleeps: its peer's collective times out at half of it, or the cell is killed."""
    seconds = f"60.{os.getpid()}"
    code, rows, output = fill(tmp_path, "--only", "=dp2", "--inject", "hang", "--timeout", seconds)
    assert code == 1 and rows[0]["status"] == "failed", output
    running = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [words for words in running if "--cell" in words and seconds in words]
