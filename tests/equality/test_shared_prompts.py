"""A prompt that runs once for its group changes no number: gradients and log-probs equal a plain loop's."""

import pytest

from tests.equality.rows import assert_close
from tests.equality.shared_cuts import CUTS, every_cut
from tests.pairwise import quick

BASE = ("one qwen3", "TP2-SP qwen2_tied", "PP2 llama3_rope", "CP2 llama3_rope", "EP2 gpt_oss")
FAMILIES = (  # whose layers differ: one cut
    *("DP2 qwen3_moe", "CP2 llama4", "one deepseek_v3", "one mistral_window", "one phi3", "one olmo2", "one olmo3"),
    *("one gemma3_text", "one mixtral", "one glm4_moe"),
)
# the others' prompts apart, and samples that share with none as each is alone, are those of test_gradient.py
APART = ("one qwen3",)
LARGE = (*("PP2-VPP2 qwen2_tied", "PP2-recompute qwen3", "TP2-PP2-SP qwen3", "CP2-DP2 llama", "EP2 qwen3_moe"),
         "CP2 moonlight")


@pytest.mark.parametrize("name", quick((*BASE, *FAMILIES, *LARGE), *BASE, *FAMILIES))
def test_shared_prompts_equal_the_plain_loop(pool, name):
    cuts = CUTS[1:2] if name in FAMILIES else (*CUTS[:2], *CUTS[3:]) if name in BASE[1:] else CUTS
    assert_close(pool, name, every_cut, cuts, (True, False) if name in APART else (True,))
