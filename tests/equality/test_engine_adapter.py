"""Adapters beside Transformer Engine's layers, on a stand-in without kernels, equal merged weights and a plain loop."""

from __future__ import annotations

import pytest

from tests.equality.adapter_measures import gradients, merged_apart, three_steps
from tests.equality.engine_rig import ENGINE
from tests.equality.layouts import TOLERANCE
from tests.equality.rows import measured
from tests.equality.saved_steps import SHARDED, save_and_load
from tests.pairwise import quick

pytestmark = pytest.mark.distributed


ADAPTED = ("one glm4_moe", "EP2 qwen3_moe", "TP2-SP glm4_moe")
LONG = ("one qwen3", "TP2-SP qwen2_untied", "PP2 qwen2_tied", "TP2-SP-ETP1 mixtral")


def engine(rank: int, world: int, family: str, settings: tuple[str, ...]) -> dict[str, object]:
    given = (family, (*settings, *ENGINE))
    apart = {"beside merged": merged_apart(rank, world, *given)}
    return {"errors": apart | gradients(rank, world, *given), **three_steps(rank, world, *given)}


@pytest.mark.parametrize("name", quick((*ADAPTED, *LONG), *ADAPTED))
def test_adapters_beside_engine_layers_equal_merged_weights_and_the_reference(engine_pool, name):
    """Log-probs are those of merged weights; gradient, norm, steps and export those of a plain loop with A and B."""
    for found in measured(engine_pool, name, engine):
        assert max(found["errors"].values()) < TOLERANCE, found
        assert found["norm"] < 1e-6 and found["moved"] < 1e-3 and found["export"] < TOLERANCE, found
        assert found["frozen"] and found["trained"] and found["replicas"], found


LORA_EP2 = (*SHARDED, "parallel.expert=2", "lora.rank=3", "lora.alpha=5")
RESUMED = {"engine": (ENGINE, ENGINE), "torch-to-engine": (("model.layer_spec=torch",), ENGINE)}


@pytest.mark.parametrize("name", quick(RESUMED, "torch-to-engine"))
def test_checkpoint_of_experts_adapters_goes_on_under_the_engine(engine_pool, tmp_path, name):
    """Adapters and merged weights come back to the bit, from the other layer spec too; its next steps with the same."""
    given = [(*LORA_EP2, *spec) for spec in RESUMED[name]]
    for found in engine_pool.run(2, save_and_load, str(tmp_path), *given, "glm4_moe", 3):
        assert found["loaded"] and found["export"] == 0 and found["moved"] > 1e-3, found
        assert found["error"] < TOLERANCE and (found["next"] or name != "engine"), found
