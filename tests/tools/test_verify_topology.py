"""Checks `megatron-rl verify` on several ranks: right topologies pass, planted faults are named and end with 1."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from tests.pairwise import quick
from tests.patience import patient
from tests.reference import MIXTURES, tiny_config
from tests.tools.processes import BOUND_S, end, run_on_ranks
from tests.tools.simulated_job import OVERLAPS, SP
from tests.workers.environment import TORCHRUN, worker_environment
from tests.workers.nursery import Nursery

pytestmark = pytest.mark.process

TOOL = "megatron_rl.commands.verify"
EXPERTS = ("parallel.expert=2", "parallel.expert_tensor=1")
DELTA = ("qwen3_5_text", "qwen3_next")  # gated delta nets and attention in turn
TWO_KINDS = ("glm4_moe", "deepseek_v3", "llama4_interleaved")  # of layers: a dense one, then a mixture
TP2, PP2, CP2 = "parallel.tensor=2", "parallel.pipeline=2", "parallel.context=2"
PASSING = {"TP2": (2, "qwen2_tied", (TP2,)),
           "PP2": (2, "qwen3", (PP2,)),
           "DP2, overlaps": (2, "llama", OVERLAPS),
           "TP2 SP": (2, "llama3_rope", SP),
           "CP2": (2, "qwen2_untied", (CP2,)),
           "TP2 SP, PP2, VPP2": (4, "qwen2_tied", (*SP, PP2, "parallel.virtual_pipeline=2")),
           "EP2": (2, "mixtral", EXPERTS),
           "TP2 SP, EP2": (2, "qwen3_moe", (*SP, *EXPERTS)),
           "TP2 SP, EP2, sinks": (2, "gpt_oss", (*SP, *EXPERTS)),
           "EP2, PP2, layers of two kinds": (4, "glm4_moe", ("parallel.expert=2", "parallel.pipeline=2")),
           "PP2, dense layers between": (2, "llama4_interleaved", ("parallel.pipeline=2",)),
           "TP2 SP, latents": (2, "deepseek_v3", (*SP, *EXPERTS)),
           "TP2 SP, PP2, delta nets": (4, "qwen3_next", (*SP, PP2)),
           "CP2, delta nets": (2, "qwen3_5_text", (CP2,)),
           "TP2, bfloat16": (2, "qwen2_tied", ("parallel.tensor=2", "--dtype", "bfloat16"))}
OUTPUT = "attention output (model.layers.{}.self_attn.o_proj)"
CORE = "attention core (model.layers.0.self_attn, before o_proj)"
TP_FAULT = ("--inject", "tp_all_reduce", "--layers-per-stage", "3", "--inject-layer")
FAULTY = {
    "tp_all_reduce": (2, (TP2, *TP_FAULT, "1"), OUTPUT.format(1)),
    "tp_all_reduce, SP": (2, (*SP, *TP_FAULT, "2"), OUTPUT.format(2)),
    "tp_all_reduce, PP2": (4, (TP2, PP2, "--inject", "tp_all_reduce"), OUTPUT.format(1)),
    "microbatch_mean": (2, (PP2, "--inject", "microbatch_mean"), "1/{M} of the reference: divided by the {M} micro-"),
    "context_offset": (2, (CP2, "--inject", "context_offset"), CORE),
}


def launch(nursery: Nursery, world: int, family: str, folder: pathlib.Path, *arguments: str) -> tuple[int, dict, str]:
    """Run the tool; return the worst exit code of the ranks, what --json wrote, and the output."""
    code, said = run_on_ranks(nursery, world, folder, TOOL, *prepare(family, folder, *arguments))
    return code, json.loads((folder / "out.json").read_text()), said


def prepare(family: str, folder: pathlib.Path, *arguments: str) -> list[str]:
    """Write the model; return the tool's arguments."""
    tiny_config(family, layers=8, vocab_size=1001).save_pretrained(folder / "model")
    return [f"model.hf_path={folder / 'model'}", "run.deadline_s=120", "--json", str(folder / "out.json"), *arguments]


def launch_by_torchrun(_: Nursery, world: int, family: str, folder: pathlib.Path, *arguments: str):
    """Run the tool by the command that docs/verify-topology.md gives; return what ``launch`` returns."""
    command = [sys.executable, "-m", *TORCHRUN, str(world), "-m", TOOL, *prepare(family, folder, *arguments)]
    with open(folder / "log.txt", "w") as log:
        given = dict(env=worker_environment(), start_new_session=True, cwd=folder)
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **given)
        try:
            code = process.wait(patient(BOUND_S))
        finally:
            end(process)
    return code, json.loads((folder / "out.json").read_text()), (folder / "log.txt").read_text()


@pytest.mark.distributed
@pytest.mark.parametrize("cell", quick(PASSING, "TP2"))
def test_a_right_topology_passes_with_every_check_compared(nursery, tmp_path, cell):
    world, family, arguments = PASSING[cell]
    start = launch_by_torchrun if cell == "PP2" else launch
    code, found, output = start(nursery, world, family, tmp_path, *arguments)
    assert code == 0, output
    checks = {row["check"]: row for row in found["checks"]}
    assert found["passed"] and "verdict: PASSED" in output and all(row["passed"] for row in checks.values())
    kinds = {"embedding", "attention qkv", "attention output", "norms"}
    kinds |= {"router", "experts"} if family in MIXTURES else {"mlp gate/up", "mlp down"}
    kinds |= {"mlp gate/up", "mlp down"} if family in (*TWO_KINDS, "qwen3_next") else set()
    untied = ("qwen2_untied", "llama", "mixtral", "gpt_oss", "qwen3_next", *TWO_KINDS)
    kinds |= {"lm head"} if family in untied else set()
    kinds |= {f"delta net {x}" for x in ("projection", "decay", "output")} if family in DELTA else set()
    wanted = {"activations of one sample", "log-probs per sample", "gradient norm of optim_step"}
    wanted |= {"weights after 3 AdamW steps", "skip against dense"}
    assert set(checks) == wanted | {f"gradient: {kind}" for kind in kinds}
    # float32 sums have another order somewhere: with everything bitwise equal, one thing was compared with itself
    assert checks["gradient: attention qkv"]["error"] > 0 and checks["weights after 3 AdamW steps"]["error"] > 0
    assert "16 samples dropped" in checks["skip against dense"]["note"]
    assert max(found["measured"]["microbatches"]) >= 4, "with one micro-batch an average over micro-batches would hide"
    parallel = found["topology"]["parallel"]
    layers = sum(map(int, parallel["pipeline_layout"]))
    assert {x["layer"] for x in found["activations"]} == {-1, *range(layers)}
    points = 5 + 6 if family in TWO_KINDS and layers == 2 else layers * (6 if family in MIXTURES else 5)
    replicas = found["topology"]["world_size"] // (parallel["tensor"] * parallel["pipeline"] * parallel["context"])
    assert len(found["activations"]) == replicas * (2 + points)
    assert "lm_head.weight" in found["gradient_tensors"] or "lm head" not in kinds
    assert str(tmp_path) not in json.dumps({k: v for k, v in found.items() if k != "topology"})


@pytest.mark.distributed
@pytest.mark.parametrize("cell", quick(FAULTY, "tp_all_reduce"))
def test_a_planted_fault_is_named_with_its_place(nursery, tmp_path, cell):
    world, arguments, names = FAULTY[cell]
    start = launch_by_torchrun if cell == "microbatch_mean" else launch
    code, found, output = start(nursery, world, "qwen2_tied", tmp_path, *arguments)
    assert code == 1, output
    count = max(found["measured"]["microbatches"])
    assert count > 1 and not found["passed"] and names.format(M=count) in found["diagnosis"], output
    assert f"checks beyond 1e-05: {found['diagnosis']}" in output
    checks = {row["check"]: row for row in found["checks"]}
    forward = checks["activations of one sample"], checks["log-probs per sample"]
    if cell == "microbatch_mean":  # nothing but what lies behind the loss
        assert all(row["passed"] for row in forward)
        assert found["diagnosis"].startswith("activations and log-probs agree")
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
        said = rf"FAILED, LockstepError: .* different steps \(seen by rank {rank} of 2\): plan: rank 1\b"
        assert re.search(said, output), output
    assert not found["passed"] and re.search(r"plan: rank 1\b", found["verdict"]) and "rank 0 has" not in output


@pytest.mark.distributed
def test_a_fault_that_the_topology_cannot_host_ends_with_exit_code_2(nursery, tmp_path):
    tiny_config("qwen2_tied").save_pretrained(tmp_path)
    code, output = nursery.run_script(TOOL, f"model.hf_path={tmp_path}", "--inject", "tp_all_reduce", timeout_s=BOUND_S)
    assert code == 2 and "parallel.tensor=1" in output and "give parallel.tensor=2" in output, output
    assert "verdict" not in output and "Traceback" not in output
