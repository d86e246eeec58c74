"""Checks tools/verify_topology.py on several ranks: right topologies pass, planted faults are caught and named.

A fault ends the tool with exit code 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import psutil
import pytest

from tests.patience import patient
from tests.reference import MIXTURES, tiny_config
from tests.workers.environment import TORCHRUN, worker_environment
from tests.workers.nursery import Nursery

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/verify_topology.py"
FILE = "tests.workers.nursery:run_file"

# a run takes 6 to 15 s on two idle cores; no collective of one waits longer than run.deadline_s
BOUND_S = patient(600.0)


def launch(nursery: Nursery, world: int, family: str, folder: pathlib.Path, *arguments: str) -> tuple[int, dict, str]:
    """Run the tool on ``world`` ranks, of which nothing is left running.

    Returns the largest exit code of the ranks, what --json wrote, and the output.
    """
    given = prepare(family, folder, *arguments)
    with nursery.ranks(world, given, folder / "ranks", function=FILE, given=[str(TOOL)]) as ranks:
        codes = ranks.wait(BOUND_S)
        assert None not in codes, ranks.said()
        return max(codes), answer(folder), ranks.said()


def prepare(family: str, folder: pathlib.Path, *arguments: str) -> list[str]:
    """Write the model; return the tool's arguments."""
    tiny_config(family, layers=8, vocab_size=1001).save_pretrained(folder / "model")
    return [f"model.hf_path={folder / 'model'}", "run.deadline_s=120", "--json", str(folder / "out.json"), *arguments]


def answer(folder: pathlib.Path) -> dict:
    """Read the file that --json wrote; return {} where there is none."""
    out = folder / "out.json"
    return json.loads(out.read_text()) if out.exists() else {}


def launch_by_torchrun(
    _: Nursery, world: int, family: str, folder: pathlib.Path, *arguments: str
) -> tuple[int, dict, str]:
    """Run the tool by the command that docs/verify-topology.md gives; return what ``launch`` returns."""
    command = [sys.executable, "-m", *TORCHRUN, str(world), str(TOOL)]
    command += prepare(family, folder, *arguments)
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=worker_environment(), start_new_session=True, cwd=folder
        )
        try:
            code = process.wait(BOUND_S)
        finally:
            end(process)
    return code, answer(folder), (folder / "log.txt").read_text()


def end(process: subprocess.Popen) -> None:
    """Kill the launcher and all its descendants: its workers lead sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---- on several ranks -----------------------------------------------------------------------------------------------

OVERLAPS = (
    "megatron.ddp.overlap_grad_reduce=true",
    "megatron.ddp.overlap_param_gather=true",
    "megatron.ddp.bucket_size=1000",
)
SP = ("parallel.tensor=2", "parallel.sequence_parallel=true")
EXPERTS = ("parallel.expert=2", "parallel.expert_tensor=1")
TWO_KINDS = ("glm4_moe", "deepseek_v3", "llama4_interleaved")  # of layers: a dense one, then a mixture
PASSING = {"TP2": (2, "qwen2_tied", ("parallel.tensor=2",))}
PASSING_LONG = {
    "PP2": (2, "qwen3", ("parallel.pipeline=2",)),
    "DP2, overlaps": (2, "llama", OVERLAPS),
    "TP2 SP": (2, "llama3_rope", SP),
    "CP2": (2, "qwen2_untied", ("parallel.context=2",)),
    "TP2 SP, PP2, VPP2": (4, "qwen2_tied", (*SP, "parallel.pipeline=2", "parallel.virtual_pipeline=2")),
    "EP2": (2, "mixtral", EXPERTS),
    "TP2 SP, EP2": (2, "qwen3_moe", (*SP, *EXPERTS)),
    "TP2 SP, EP2, sinks": (2, "gpt_oss", (*SP, *EXPERTS)),
    "EP2, PP2, layers of two kinds": (4, "glm4_moe", ("parallel.expert=2", "parallel.pipeline=2")),
    "PP2, dense layers between": (2, "llama4_interleaved", ("parallel.pipeline=2",)),
    "TP2 SP, latents": (2, "deepseek_v3", (*SP, *EXPERTS)),
    "TP2, bfloat16": (2, "qwen2_tied", ("parallel.tensor=2", "--dtype", "bfloat16")),
}


@pytest.mark.distributed
@pytest.mark.parametrize("cell", [*PASSING, *(pytest.param(name, marks=pytest.mark.long) for name in PASSING_LONG)])
def test_a_right_topology_passes_with_every_check_compared(nursery, tmp_path, cell):
    world, family, arguments = {**PASSING, **PASSING_LONG}[cell]
    code, found, output = (launch_by_torchrun if cell == "PP2" else launch)(
        nursery, world, family, tmp_path, *arguments
    )
    assert code == 0, output
    checks = {row["check"]: row for row in found["checks"]}
    assert found["passed"] and "verdict: PASSED" in output and all(row["passed"] for row in checks.values())
    kinds = {"embedding", "attention qkv", "attention output", "norms"}
    kinds |= {"router", "experts"} if family in MIXTURES else {"mlp gate/up", "mlp down"}
    kinds |= {"mlp gate/up", "mlp down"} if family in TWO_KINDS else set()
    kinds |= {"lm head"} if family in ("qwen2_untied", "llama", "mixtral", "gpt_oss", *TWO_KINDS) else set()
    wanted = {f"gradient: {kind}" for kind in kinds} | {
        "activations of one sample",
        "log-probs per sample",
        "gradient norm of optim_step",
    }
    assert set(checks) == wanted | {"weights after 3 AdamW steps", "skip against dense"}
    # float32 sums have another order somewhere; bitwise equality of everything would mean that one thing was compared
    # with itself
    assert checks["gradient: attention qkv"]["error"] > 0 and checks["weights after 3 AdamW steps"]["error"] > 0
    assert "16 samples dropped" in checks["skip against dense"]["note"]
    assert max(found["measured"]["microbatches"]) >= 4, "with one micro-batch an average over micro-batches would hide"
    layers = found["topology"]["parallel"]["pipeline"] * found["topology"]["parallel"]["virtual_pipeline"]
    assert {x["layer"] for x in found["activations"]} == {-1, *range(layers)}
    points_of_layers = 5 + 6 if family in TWO_KINDS and layers == 2 else layers * points(family)
    assert len(found["activations"]) == found["topology"]["world_size"] // model_ranks(found) * (2 + points_of_layers)
    assert "lm_head.weight" in found["gradient_tensors"] or "lm head" not in kinds
    assert str(tmp_path) not in json.dumps({k: v for k, v in found.items() if k != "topology"})


def model_ranks(found: dict) -> int:
    parallel = found["topology"]["parallel"]
    return parallel["tensor"] * parallel["pipeline"] * parallel["context"]


def points(family: str) -> int:
    return 6 if family in MIXTURES else 5


TP_FAULT = ("--inject", "tp_all_reduce", "--layers-per-stage", "3", "--inject-layer")
FAULTY = {
    "tp_all_reduce": (2, ("parallel.tensor=2", *TP_FAULT, "1"), r"attention output (model.layers.1.self_attn.o_proj)"),
    "tp_all_reduce, SP": (2, (*SP, *TP_FAULT, "2"), r"attention output (model.layers.2.self_attn.o_proj)"),
    "tp_all_reduce, PP2": (
        4,
        ("parallel.tensor=2", "parallel.pipeline=2", "--inject", "tp_all_reduce"),
        "attention output (model.layers.1.self_attn.o_proj)",
    ),
    "microbatch_mean": (
        2,
        ("parallel.pipeline=2", "--inject", "microbatch_mean"),
        "every gradient is 1/{M} of the reference: divided by the {M} micro-",
    ),
    "context_offset": (
        2,
        ("parallel.context=2", "--inject", "context_offset"),
        "attention core (model.layers.0.self_attn, before o_proj)",
    ),
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "cell", [x if x == "tp_all_reduce" else pytest.param(x, marks=pytest.mark.long) for x in FAULTY]
)
def test_a_planted_fault_is_named_with_its_place(nursery, tmp_path, cell):
    world, arguments, names = FAULTY[cell]
    code, found, output = (launch_by_torchrun if cell == "microbatch_mean" else launch)(
        nursery, world, "qwen2_tied", tmp_path, *arguments
    )
    assert code == 1, output
    count = max(found["measured"]["microbatches"])
    names = names.format(M=count) if cell == "microbatch_mean" else names
    assert count > 1 and not found["passed"] and names in found["diagnosis"], output
    assert f"checks beyond 1e-05: {found['diagnosis']}" in output
    checks = {row["check"]: row for row in found["checks"]}
    forward = checks["activations of one sample"], checks["log-probs per sample"]
    if cell == "microbatch_mean":  # nothing but what lies behind the loss
        assert all(row["passed"] for row in forward) and found["diagnosis"].startswith(
            "activations and log-probs agree"
        )
    else:
        assert not any(row["passed"] for row in forward)
        # dense and skip are wrong alike, but where a token's place in its micro-batch decides what its rank leaves out
        assert checks["skip against dense"]["passed"] == (cell != "tp_all_reduce, SP")
        assert found["diagnosis"].startswith("the first difference appears at the ")
    if cell == "context_offset":  # of the first sequence's chunks, rank 1 holds the second and the third
        assert ", held by context rank 1." in found["diagnosis"], found["diagnosis"]


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("layout", [(), ("parallel.pipeline=2",)], ids=["DP2", "PP2"])
def test_a_rank_with_another_plan_is_named_by_every_rank(nursery, tmp_path, layout):
    code, found, output = launch(nursery, 2, "qwen2_tied", tmp_path, *layout, "--inject", "other_plan")
    assert code == 1, output
    for rank in (0, 1):
        said = (
            rf"verdict: FAILED, LockstepError: ranks are about to run different steps \(seen by rank {rank} of 2\): "
            r"plan: rank 1\b"
        )
        assert re.search(said, output), output
    assert not found["passed"] and re.search(r"plan: rank 1\b", found["verdict"]) and "rank 0 has" not in output


@pytest.mark.distributed
def test_a_fault_that_the_topology_cannot_host_ends_with_exit_code_2(nursery, tmp_path):
    tiny_config("qwen2_tied").save_pretrained(tmp_path)
    code, output = nursery.run_script(TOOL, f"model.hf_path={tmp_path}", "--inject", "tp_all_reduce", timeout_s=BOUND_S)
    assert code == 2 and "parallel.tensor=1" in output and "give parallel.tensor=2" in output, output
    assert "verdict" not in output and "Traceback" not in output
