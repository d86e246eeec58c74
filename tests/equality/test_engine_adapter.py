"""Adapters beside Transformer Engine's layers, on a stand-in without kernels, equal merged weights and a plain loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.equality.adapter_measures import gradients, merged_apart, three_steps
from tests.equality.engine_rig import ENGINE, engine_workers
from tests.equality.layouts import TOLERANCE
from tests.equality.matrix import EP2, PP2, SP, TP2
from tests.equality.rig import sizes
from tests.equality.saved_steps import SHARDED, save_and_load
from tests.pairwise import quick
from tests.workers.pool import Pool

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def engine_pool() -> Iterator[Pool]:
    with engine_workers("2.20.2") as workers:
        yield workers


ADAPTED = {  # in the form of adapter_rig.TOPOLOGIES
    "qwen3": (1, "qwen3", ()),
    "TP2-SP": (2, "qwen2_untied", (TP2, SP)),
    "PP2": (2, "qwen2_tied", (PP2,)),
    "two kinds of layers": (1, "glm4_moe", ()),
    "EP2": (2, "qwen3_moe", (EP2,)),
    "TP2-SP-ETP2": (2, "glm4_moe", (TP2, SP)),
    "TP2-SP-ETP1": (2, "mixtral", (TP2, SP, "expert_tensor=1")),
}


@pytest.mark.parametrize("name", quick(ADAPTED, "TP2-SP", "two kinds of layers", "EP2", "TP2-SP-ETP2"))
def test_adapters_beside_engine_layers_equal_merged_weights_and_the_reference(engine_pool, name):
    """Log-probs are those of merged weights; gradient, norm, steps and export those of a plain loop with A and B."""
    world, family, parallel = ADAPTED[name]
    given = (family, parallel, ENGINE)
    apart = engine_pool.run(world, merged_apart, *given)
    assert max(apart) < TOLERANCE, apart
    taken = engine_pool.run(world, gradients, *given)
    print(name, apart, taken)
    for found in taken:
        assert max(found.values()) < TOLERANCE, found
    for found in engine_pool.run(world, three_steps, *given):
        print(name, found)
        assert found["norm"] < 1e-6 and found["moved"] < 1e-3 and found["export"] < TOLERANCE, found
        assert found["frozen"] and found["trained"] and found["replicas"], found


LORA_EP2 = (*sizes(1, 1), *SHARDED, "parallel.expert=2", "lora.rank=3", "lora.alpha=5")
RESUMED = {"engine": (ENGINE, ENGINE), "torch-to-engine": (("model.layer_spec=torch",), ENGINE)}


@pytest.mark.parametrize("name", RESUMED)
def test_checkpoint_of_experts_adapters_goes_on_under_the_engine(engine_pool, tmp_path, name):
    """Merged weights come back to the bit, from the other layer spec too; with the same spec so do the next steps."""
    given = [(*LORA_EP2, *spec) for spec in RESUMED[name]]
    for found in engine_pool.run(2, save_and_load, str(tmp_path), *given, "glm4_moe", 3):
        assert found["loaded"] and found["moved"] > 1e-3 and found["error"] < TOLERANCE, found
        assert found["next"] or name != "engine", found
