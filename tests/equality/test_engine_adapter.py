"""Adapters beside Transformer Engine's layers, on a stand-in without kernels, equal merged weights and a plain loop."""

import pytest

from tests.equality.adapter_rig import gradients, merged_apart, three_steps
from tests.equality.engine_rig import ENGINE
from tests.equality.layouts import TOLERANCE
from tests.equality.rows import measured
from tests.pairwise import quick

pytestmark = pytest.mark.distributed
ADAPTED = ("one glm4_moe", "EP2 qwen3_moe", "TP2-SP glm4_moe")
LONG = ("one qwen3", "TP2-SP qwen2_untied", "PP2 qwen2_tied", "TP2-SP-ETP1 mixtral", "one-linears qwen3_5_text",
        "TP2-SP-linears qwen3_next", "TP2-linears qwen3_5_text", "EP2-linears qwen3_5_moe_text")


def engine(rank: int, world: int, family: str, settings: tuple[str, ...]) -> dict[str, object]:
    given = (family, (*settings, *ENGINE))
    apart = {"beside merged": merged_apart(rank, world, *given)}
    return {"errors": apart | gradients(rank, world, *given), **three_steps(rank, world, *given)}


@pytest.mark.parametrize("name", quick((*ADAPTED, *LONG), ADAPTED[1]))
def test_adapters_beside_engine_layers_equal_merged_weights_and_the_reference(engine_pool, name):
    """Log-probs are those of merged weights; gradient, norm, steps and export those of a plain loop with A and B."""
    for found in measured(engine_pool, name, engine):
        assert max(found["errors"].values()) < TOLERANCE, found
        assert found["norm"] < 1e-6 and found["moved"] < 1e-3 and found["export"] < TOLERANCE, found
        assert found["frozen"] and found["trained"] and found["replicas"], found
