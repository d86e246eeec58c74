"""Checks that tools/acceptance.py passes a right cell, names planted faults, ends hangs, and names cells not run."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import psutil
import pytest

from tests.patience import patient
from tests.reference import MIXTURES

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import acceptance  # noqa: E402
from acceptance_matrix.cells import CELLS, FAULTS, KINDS, LABELS, Cell, tolerances  # noqa: E402

pytestmark = pytest.mark.process

CPU_HOST = {"gpus": 0, "device": "a CPU", "where": "gloo, CPU", "python": "3.11", "versions": {"torch": "2"}}


def fill(folder: pathlib.Path, *arguments: str, bound_s: float = patient(600)) -> tuple[int, list[dict], str]:
    """Run the tool with no GPU in sight; return its exit code, its rows and its output."""
    out = folder / "matrix.json"
    command = [sys.executable, str(ROOT / "tools/acceptance.py"), "--json", str(out), *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=bound_s,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        cwd=folder,
    )
    return done.returncode, json.loads(out.read_text())["cells"] if out.exists() else [], done.stdout + done.stderr


def test_single_cell_passes_and_every_other_reason_is_named(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "docs/matrix.md"
    code, rows, output = fill(tmp_path, "--only", "=single", "--markdown", str(page))
    assert code == 0, output
    (row,) = rows
    assert row["status"] == "passed" and set(row["checks"]) == {"logprobs", "gradient", "skip", "bitwise", "ghost"}
    assert 0 < row["checks"]["gradient"]["error"] < 1e-5 and row["checks"]["ghost"]["error"] == 0.0
    text = page.read_text()
    assert "No GPU was available" in text and "| one process, float32 | one process | gloo, CPU | passed: " in text
    assert str(tmp_path) not in text and str(ROOT) not in text


@pytest.mark.long
def test_planted_fault_is_caught_and_named(tmp_path: pathlib.Path) -> None:
    code, rows, output = fill(tmp_path, "--only", "=single", "--inject", "drop-gradient")
    assert code == 1, output
    assert rows[0]["status"] == "failed" and rows[0]["reason"].startswith("gradient 5.0e-01, allowed 1e-05"), rows


def test_hang_is_bounded_and_leaves_no_process(tmp_path: pathlib.Path) -> None:
    seconds = f"3.{os.getpid()}"  # on the command line of every process of the cell
    code, rows, output = fill(tmp_path, "--only", "=single", "--inject", "hang", "--timeout", seconds)
    assert code == 1 and rows[0]["status"] == "failed", output
    assert rows[0]["reason"].startswith("no answer in 3.") and rows[0]["reason"].endswith("its processes were killed")
    assert not left_over(seconds)


def left_over(seconds: str) -> list[list[str]]:
    """Return the command lines of processes that still run a cell started with this time-out."""
    running = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [words for words in running if "--cell" in words and seconds in words]


def judged(cell: Cell, **errors: float) -> dict:
    found = {"errors": {**dict.fromkeys(cell.checks, 0.0), **errors}, "backend": "gloo"}
    return acceptance.judge(cell, json.loads(json.dumps(found)), cuda=False)


def test_cell_passes_only_with_every_check_within_its_bound() -> None:
    cell = next(x for x in CELLS if x.name == "dp2")
    assert judged(cell)["status"] == "passed"
    assert judged(cell, replicas=1.0)["reason"].startswith("replicas 1.0e+00, allowed 0 ")
    nan = judged(cell, skip=float("nan"))
    assert nan["status"] == "failed" and nan["checks"]["skip"]["error"] == "nan"
    missing = {"errors": {name: 0.0 for name in cell.checks if name != "bitwise"}}
    assert acceptance.judge(cell, missing, cuda=False)["reason"].startswith("bitwise nan")


def test_cells_that_this_host_cannot_run_say_why() -> None:
    by_name = {cell.name: cell for cell in CELLS}
    one_gpu = {**CPU_HOST, "gpus": 1}
    assert acceptance.why_not(by_name["tp2-pp2"], one_gpu, 4, {}) == "needs 4 GPUs, this host has 1"
    assert acceptance.why_not(by_name["single"], one_gpu, 4, {}) == ""
    assert acceptance.why_not(by_name["tp2-pp2"], CPU_HOST, 2, {}) == "needs 4 processes, --max-processes is 2"
    assert (
        acceptance.why_not(by_name["te-single"], CPU_HOST, 4, {})
        == "needs a GPU for transformer_engine, this host has none"
    )
    absent = {"apex": "ModuleNotFoundError: No module named 'apex'"}
    assert acceptance.why_not(by_name["adam-apex"], one_gpu, 4, absent) == f"apex cannot be imported: {absent['apex']}"
    row = {
        "feature": "f",
        "dtype": "float32",
        "layout": "TP2",
        "status": "not run",
        "reason": "needs 2 GPUs, this host has 1",
    }
    assert (
        acceptance.table_row(row, "NCCL, x") == "| f, float32 | TP2 | - | not run: needs 2 GPUs, this host has 1 | - |"
    )


def test_ranks_share_a_gpu_only_when_told() -> None:
    by_name, one_gpu = {cell.name: cell for cell in CELLS}, {**CPU_HOST, "gpus": 1, "where": "NCCL, x"}
    assert acceptance.why_not(by_name["pp2"], one_gpu, 4, {}, share_gpu=True) == ""
    assert acceptance.why_not(by_name["sync-broadcast"], one_gpu, 4, {}) == "needs 2 GPUs, this host has 1"
    assert acceptance.why_not(by_name["tp2-pp2"], one_gpu, 2, {}, share_gpu=True).endswith("--max-processes is 2")
    assert "an engine over 2 GPUs" in acceptance.why_not(by_name["vllm-tp2"], one_gpu, 4, {}, share_gpu=True)
    assert acceptance.where(by_name["pp2"], one_gpu) == "NCCL over sockets, one GPU"
    assert acceptance.where(by_name["single"], one_gpu) == "NCCL, x"
    row = {**dict.fromkeys(("feature", "dtype", "layout", "status", "nearest"), "y"), "reason": "", "seconds": 1.0}
    row["where"] = acceptance.where(by_name["pp2"], one_gpu)
    assert "| NCCL over sockets, one GPU |" in acceptance.table_row(row, one_gpu["where"])


def test_a_cell_that_needs_a_gpu_or_an_engine_says_so() -> None:
    by_name = {cell.name: cell for cell in CELLS}
    assert acceptance.why_not(by_name["sync-cuda-ipc"], CPU_HOST, 4, {}) == "needs a GPU, this host has none"
    absent = {"vllm": "ModuleNotFoundError: No module named 'vllm'"}
    assert acceptance.why_not(by_name["vllm"], CPU_HOST, 4, absent) == f"vllm cannot be imported: {absent['vllm']}"


def test_every_kind_of_cell_has_its_checks_and_its_module() -> None:
    assert {cell.kind for cell in CELLS} == set(KINDS)
    for cell in CELLS:
        assert cell.expert == 1 or cell.family in MIXTURES, cell.name  # expert ranks without experts prove nothing
        bounds = {**tolerances(cell.dtype, cuda=False), **tolerances(cell.dtype, cuda=True)}
        assert cell.checks and set(cell.checks) <= set(bounds), cell.name
        assert (ROOT / "tools" / "acceptance_matrix" / f"{cell.kind}.py").exists()


def test_a_cell_of_exact_checks_alone_is_judged() -> None:
    cell = next(x for x in CELLS if x.name == "checkpoint")
    assert judged(cell)["status"] == "passed"
    assert judged(cell, checkpoint=3.0)["reason"].startswith("checkpoint 3.0e+00, allowed 0 ")


def test_several_names_choose_their_cells() -> None:
    given = acceptance.parse(["--only", "=lora,=pp2,family-"])
    assert [x.name for x in given.cells][0] == "pp2" and "lora" in {x.name for x in given.cells}
    assert {x.name for x in given.cells} >= {"family-qwen3", "te-family-llama"}
    assert "lora-pp2" not in {x.name for x in given.cells}


def test_reason_is_the_first_error_without_paths() -> None:
    log = (
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/home/me/x.py", line 3\n'
        "[rank1]: FileNotFoundError: no /home/me/model/config.json here\nChildFailedError: \n"
    )
    assert acceptance.reason_in(log) == "FileNotFoundError: no <path> here"


def test_cells_have_names_of_their_own_and_cover_every_layout() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)
    assert all(set(cell.checks) <= set(LABELS) for cell in CELLS)
    assert {(c.tensor, c.pipeline, c.data) for c in CELLS} >= {
        (1, 1, 1),
        (2, 1, 1),
        (1, 2, 1),
        (1, 1, 2),
        (2, 2, 1),
        (1, 2, 2),
    }
    assert {(c.virtual, c.expert) for c in CELLS} >= {(1, 1), (2, 1), (1, 2)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("cell", "fault", "check"),
    [
        ("tp2", "drop-gradient", "gradient"),
        ("pp2", "wrong-weight", "logprobs"),
        ("pp2", "drop-survivor", "skip"),
        ("pp2", "repack", "bitwise"),
        ("single", "freeze-ghost", "ghost"),
        ("dp2", "stale-replica", "replicas"),
        ("dp2-overlap", "no-ghost-gather", "replicas"),
    ],
)
def test_every_check_can_fail(pool, cell: str, fault: str, check: str) -> None:
    """Every check fails on a planted fault, by more than ten times what it allows.

    The tool judges measurements of workers; that a cell's failure ends the tool with 1 is tested above.
    """
    (cell,) = (x for x in CELLS if x.name == cell)
    found = pool.run(cell.world, measure_faulty, cell, fault, timeout_s=120)[0]
    row = acceptance.judge(cell, json.loads(json.dumps(found)), cuda=False)
    assert row["status"] == "failed" and check in row["reason"].split(), row
    assert row["checks"][check]["error"] > 10 * row["checks"][check]["allowed"], row
    assert fault in FAULTS


@pytest.mark.long
@pytest.mark.parametrize(
    ("cell", "fault", "check"),
    [
        ("lora", "drop-gradient", "gradient"),
        ("critic", "wrong-weight", "values"),
        ("critic", "drop-gradient", "gradient"),
        ("replay", "lose-experts", "logprobs"),
        ("replay-ep2", "drop-gradient", "gradient"),
        ("offload", "lose-state", "offload"),
        ("offload", "keep-memory", "held"),
        ("checkpoint", "lose-state", "checkpoint"),
        ("sync-shared-memory", "flip-byte", "delivered"),
        ("delta-shared-memory", "flip-byte", "delivered"),
        ("rollout-embedded", "other-weights", "engine"),
        ("long", "drop-gradient", "gradient"),
        ("memory", "whole-logits", "memory"),
    ],
)
def test_every_check_of_a_feature_can_fail(tmp_path: pathlib.Path, cell: str, fault: str, check: str) -> None:
    code, rows, output = fill(tmp_path, "--only", f"={cell}", "--inject", fault)
    assert code == 1 and rows[0]["status"] == "failed", output
    assert check in rows[0]["reason"].split() and fault in FAULTS, rows[0]["reason"]


def measure_faulty(rank: int, world: int, cell: Cell, fault: str) -> dict:
    from acceptance_matrix import checks

    return checks.measure(cell, fault, 60.0)


@pytest.mark.long
def test_hang_of_one_rank_inside_the_cell_ends(tmp_path: pathlib.Path) -> None:
    """A cell in which one rank sleeps fails, and leaves no process behind.

    The time is long enough to reach the rank that sleeps: its peer's collective times out at half the cell's time, or
    the cell is killed.
    """
    seconds = f"60.{os.getpid()}"
    code, rows, output = fill(tmp_path, "--only", "=dp2", "--inject", "hang", "--timeout", seconds)
    assert code == 1 and rows[0]["status"] == "failed", output
    assert not left_over(seconds)
