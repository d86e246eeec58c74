"""Gated delta nets and gated attention of Transformer Engine's modules, on a stand-in without kernels, equal transformers.

The stand-in is the one of test_transformer_engine.py.
"""

import numpy as np
import pytest

from tests.equality.engine_rig import ENGINE
from tests.equality.layouts import TOLERANCE
from tests.equality.rig import open_rig, ragged_advantages
from tests.equality.rows import measured
from tests.equality.shared_samples import SHARED, advantages_of, group_samples
from tests.pairwise import quick
from tests.reference import masked_logprobs, near_policy, reference_gradient

pytestmark = pytest.mark.distributed
FAMILIES = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
SEVERAL = "plan.max_tokens_per_microbatch=48"  # samples in a micro-batch
LAYOUTS = ("one", "shared", "TP2-SP", "TP2-SP-shared", "CP2", "PP2-shared", "recompute-shared")
CASES = ("TP2 qwen3_5_text", "TP2-shared qwen3_5_text", "EP2-permuted qwen3_next", "TP2-SP-EP2-ETP1 qwen3_5_moe_text",
         *(f"{layout} {family}" for layout in LAYOUTS for family in FAMILIES))
QUICK = ("one qwen3_next", "TP2-SP qwen3_5_moe_text", "TP2-SP-shared qwen3_5_text", "TP2-SP-shared qwen3_next")


def against_transformers(rank: int, world: int, family: str, settings: tuple[str, ...]) -> dict[str, float]:
    """Return the errors of log-probs, of the dense and of the skip run's gradient."""
    with open_rig(family, SEVERAL, *ENGINE, *settings, samples=7) as rig:
        if SHARED in settings:
            samples, groups = group_samples()
            rig.take(near_policy(rig.model, samples), groups)
        count = len(rig.samples)
        advantages = advantages_of(count) if SHARED in settings else ragged_advantages(count)
        found = {"log-probs": float(np.abs(rig.logprobs() * rig.loss_mask - masked_logprobs(rig.model, rig.samples)).max())}
        want, _ = reference_gradient(rig.model, rig.samples, rig.groups, list(advantages))
        return found | rig.errors(advantages, want)


@pytest.mark.parametrize("name", quick(CASES, *QUICK))
def test_log_probs_and_gradients_equal_transformers(engine_pool, name):
    for found in measured(engine_pool, name, against_transformers):
        assert max(found.values()) < TOLERANCE, found
