"""Models of NVIDIA Megatron-Bridge's equal transformers' and ours; a run trains one. `make test-bridge` installs it.

The equalities' errors are those of the equality matrix, relative: 1e-5, float32 sums in another order.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from megatron_rl.model.bridge.family import PLAIN
from tests.patience import patient
from tests.runs.command import ROOT, arguments, rows_of
from tests.workers.environment import TORCHRUN

pytestmark = [pytest.mark.network,  # no part of any target but `make test-bridge`
              pytest.mark.skipif(importlib.util.find_spec("megatron") is None
                                 or importlib.util.find_spec("megatron.bridge") is None,
                                 reason="megatron-bridge is not installed; `make test-bridge` installs it")]
BOUND = 1e-5
# Megatron-Core compiles Gemma's and Nemotron's activations, which takes longer than all that is measured here
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_COMPILE_DISABLE": "1"}
CELLS = {"one": (1, ["qwen3", "llama", "gemma", "nemotron"], []),
         "tp2": (2, ["qwen3", "gemma", "nemotron"], ["parallel.tensor=2", "parallel.sequence_parallel=true"]),
         "pp2": (2, ["gemma", "nemotron"], ["parallel.pipeline=2"])}


def run(module: str, *given: str, world: int = 0, seconds: float = 600) -> str:
    """Run a module of tests.bridge, on ``world`` ranks unless that is 0; return its last line."""
    done = subprocess.run(
        [sys.executable, *(["-m", *TORCHRUN, str(world)] if world else []), "-m", f"tests.bridge.{module}", *given],
        cwd=ROOT, env=os.environ | ENVIRONMENT,
        capture_output=True, text=True, timeout=patient(seconds), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return (done.stdout.strip() or "{}").splitlines()[-1]


@pytest.mark.parametrize("cell", CELLS)
def test_bridge_model_equals_transformers_and_our_table(cell: str) -> None:
    """Log-probs, gradients of dense and skip, norms, three AdamW steps; weights and exports to the bit."""
    world, families, overrides = CELLS[cell]
    found = json.loads(run("job", ",".join(families), *overrides, world=world))
    assert list(found) == families
    for family, its in found.items():
        assert max(its["worst"].values()) < BOUND, (family, its["worst"])
        assert its["round trip"] and its["tensors"] >= 20, (family, its)
        assert its.get("bridge exports the same", world > 1), family
        # the provider's layers are ours then, number for number
        assert its.get("equals ours", family not in ("qwen3", "llama")), family


def test_what_the_seam_does_not_take_is_refused_with_the_reason() -> None:
    said = json.loads(run("refusals"))
    assert said.pop("gemma") == "bridge:gemma of 2 layers"
    expected = {
        "phi3": "makes no provider of a 'phi3' model",
        "qwen3_moe": "has num_moe_experts=4: a mixture of experts",
        "gemma2": "a sliding window",
        "deepseek_v3": "multi-latent attention",
        "exaone4": "layers of its own (megatron.bridge.models.exaone.exaone4.exaone4_provider.exaone4_layer_spec)",
        "yarn": "has position_embedding_type=yarn",
        "no tensor": "has no tensor for decoder.layers.0.mlp.linear_fc1.weight",
        "strange kind": "has a object for mlp.linear_fc1.weight",
        "one tensor": "has gate and up in one tensor, model.layers.0.mlp.gate_up.weight",
        "strange name": "names transformer.h.0.q for mlp.linear_fc1.weight",
    }
    expected |= {f"field {name}": f"has {name}=another: {what}" for name, (_, what) in PLAIN.items()}
    assert set(said) == set(expected)
    for name, part in expected.items():
        assert said[name].startswith("refused: model.provider=bridge") and part in said[name], said[name]


def test_a_run_trains_a_gemma_through_the_bridge(tmp_path: pathlib.Path) -> None:
    """Three rollouts at PP=2 by the command line, weights sent to the embedded engine after each step."""
    from tests.bridge.gemma_folder import prepare_gemma

    folder = prepare_gemma(tmp_path / "gemma")
    given = arguments(folder, tmp_path / "run", "model.provider=bridge", "parallel.pipeline=2", "train.num_rollouts=3")
    run("train", *given, world=2)
    rows = rows_of(tmp_path / "run")
    assert len(rows) >= 3 and any(row["train/grad_norm"] > 0 for row in rows)
    # the engine's log-probs are the trainer's: it got every weight through the mapping
    assert max(row["train/logprob_gap_mean"] for row in rows if "train/logprob_gap_mean" in row) < 1e-4
