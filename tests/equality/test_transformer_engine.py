"""Transformer Engine's layer spec, on a stand-in of its modules, equals the torch spec over the same weights.

The stand-in (tests/stand_ins/) computes in plain torch and refuses each call that the real modules' signatures and
checks would refuse; its processes are its own, as Megatron-Core decides at import what is installed. Not covered:
kernels, their rounding, what a stream would reorder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch

from tests.equality.layouts import TOLERANCE
from tests.equality.rig import open_rig, ragged_advantages
from tests.reference import file_weights, relative_error
from tests.workers.nursery import IMPORTED, Nursery
from tests.workers.pool import Pool

pytestmark = pytest.mark.distributed
NUM_SAMPLES, STEPS = 7, 2
SETTINGS = (
    "optimizer.lr=0.0003",
    "optimizer.weight_decay=0.1",
    "optimizer.clip_grad=0.5",
    "plan.max_tokens_per_microbatch=48",
)
# As on a GPU: Transformer Engine's modules make their parameters on the device by themselves.
ENGINE = ("model.layer_spec=transformer_engine", "megatron.transformer.use_cpu_initialization=false")


@pytest.fixture(scope="module")
def engine_pool() -> Iterator[Pool]:
    """Start gloo workers that find the newest Transformer Engine's stand-in installed."""
    with mock.patch.dict(os.environ, STAND_IN_TRANSFORMER_ENGINE="2.20.2", STAND_IN_ANY_DTYPE="1"):
        with Nursery(imported=("tests.stand_ins.install", *IMPORTED)) as nursery:
            with Pool(max_world=2, nursery=nursery) as workers:
                yield workers


def measured(family: str, *overrides: str) -> dict:
    """Return log-probs, gradient, weights before and after two steps and their norms, by one layer spec."""
    advantages = ragged_advantages(NUM_SAMPLES)
    with open_rig(family, *SETTINGS, *overrides, samples=NUM_SAMPLES, total_steps=STEPS) as rig:
        found = {"weights": rig.weights(), "files": {k: v.clone() for k, v in file_weights(rig.model).items()}}
        found["logprobs"] = rig.backend.logprobs(rig.batch, np.ones(NUM_SAMPLES, dtype=bool)).flat
        found["gradient"] = rig.gradient(advantages, rig.plan(advantages, drops=True))
        found["norms"] = [x.grad_norm for _ in range(STEPS) for x in rig.step(advantages, drops=True)]
        found["later weights"] = rig.weights()
    return found


def both(rank: int, world: int, family: str, overrides: tuple[str, ...]) -> dict:
    """Return the largest gaps between the two specs, whether files' weights came back, and the stand-in's calls."""
    from tests.stand_ins.transformer_engine.contract import CALLS

    torch_layers = measured(family, *overrides, "model.layer_spec=torch")
    CALLS.clear()
    engine = measured(family, *overrides, *ENGINE)
    return {
        "exported": all(torch.equal(engine["files"][name], x) for name, x in engine["weights"].items()),
        "names": set(engine["weights"]) == set(torch_layers["weights"]),
        "gaps": {
            "logprobs": float(np.abs(engine["logprobs"] - torch_layers["logprobs"]).max()),
            "gradient": relative_error(engine["gradient"], torch_layers["gradient"]),
            "norms": float(np.abs(np.array(engine["norms"]) / torch_layers["norms"] - 1).max()),
            "later weights": relative_error(engine["later weights"], torch_layers["later weights"]),
        },
        "calls": dict(CALLS),
    }


CASES = {
    "qwen2": (1, "qwen2_untied", ()),
    "qwen3": (1, "qwen3", ()),
    "llama": (1, "llama3_rope", ()),
    "qwen3_moe": (1, "qwen3_moe", ()),
    "TP2-SP": (2, "qwen2_untied", ("parallel.tensor=2", "parallel.sequence_parallel=true")),
    "TP2": (2, "qwen3", ("parallel.tensor=2",)),
    "PP2": (2, "qwen2_tied", ("parallel.pipeline=2",)),
    "CP2": (2, "qwen3", ("parallel.context=2",)),
    "EP2": (2, "qwen3_moe", ("parallel.expert=2",)),
    "TP2-SP-ETP2": (2, "qwen3_moe", ("parallel.tensor=2", "parallel.sequence_parallel=true")),
    "TP2-SP-EP2-ETP1": (
        2,
        "qwen3_moe",
        ("parallel.tensor=2", "parallel.sequence_parallel=true", "parallel.expert=2", "parallel.expert_tensor=1"),
    ),
    "TP2-SP-ETP1": (
        2,
        "qwen3_moe",
        ("parallel.tensor=2", "parallel.sequence_parallel=true", "parallel.expert_tensor=1"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_engine_spec_equals_torch_spec(engine_pool: Pool, name: str) -> None:
    world, family, overrides = CASES[name]
    for found in engine_pool.run(world, both, family, overrides):
        print(name, {k: f"{v:.1e}" for k, v in found["gaps"].items()}, found["calls"])
        assert found["exported"] and found["names"]
        assert max(found["gaps"].values()) < TOLERANCE, found["gaps"]
