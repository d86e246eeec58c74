"""The families of models that are built here, and the parts that other families would need."""

from __future__ import annotations

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.weights.families.bridged import Families
from megatron_rl.weights.families.deepseek_v3 import DEEPSEEK_V3
from megatron_rl.weights.families.family import Family
from megatron_rl.weights.families.gemma3 import GEMMA3_TEXT
from megatron_rl.weights.families.glm4_moe import GLM4_MOE
from megatron_rl.weights.families.gpt_oss import GPT_OSS
from megatron_rl.weights.families.llama import LLAMA
from megatron_rl.weights.families.llama4 import LLAMA4
from megatron_rl.weights.families.mistral import MISTRAL
from megatron_rl.weights.families.mixtral import MIXTRAL
from megatron_rl.weights.families.olmo2 import OLMO2
from megatron_rl.weights.families.olmo3 import OLMO3
from megatron_rl.weights.families.phi3 import PHI3
from megatron_rl.weights.families.qwen2 import QWEN2
from megatron_rl.weights.families.qwen3 import QWEN3
from megatron_rl.weights.families.qwen3_moe import QWEN3_MOE

FAMILIES = Families(
    {
        family.model_type: family
        for family in (
            *(QWEN2, QWEN3, LLAMA, MISTRAL, PHI3, OLMO2, OLMO3, GEMMA3_TEXT),
            *(MIXTRAL, QWEN3_MOE, GLM4_MOE, DEEPSEEK_V3, GPT_OSS, LLAMA4),
        )
    }
)
# Other names of a family's model_type, which transformers has no class for.
ALIASES = {"kimi_k2": "deepseek_v3"}
_DELTA = (
    "the gated delta net of three layers in four: Megatron-Core 0.16.1's GatedDeltaNet (ssm/gated_delta_net.py) raises "
    '"GDN does not support packed sequence for now.", 0.19.2\'s (ssm/gated_delta_net/gdn.py) takes packed sequences '
    "outside deterministic mode alone, and neither is built without flash-linear-attention and its Triton kernels "
    '("FLA is not installed"), which need a GPU'
)
_GATED_ATTENTION = "gates on attention's output, norms that multiply by 1 + weight"
_SHARED_GATE = "a gate of the shared expert"
# Features that a layer of Megatron-Core 0.16.1 and 0.19.2 (read: transformer_config.py, transformer_layer.py,
# dot_product_attention.py) or the model built here lacks; models as in transformers 5.19.
MISSING = {
    "gemma": "norms before attention and MLP alone that multiply by 1 + weight; the rest is built (gemma3_text)",
    "gemma2": "soft-capped attention scores (attn_logit_softcapping) and logits (final_logit_softcapping); the rest is "
    "built (gemma3_text)",
    "gemma3": "a vision tower; its language model alone is gemma3_text",
    "qwen2_moe": "a shared expert with a gate of its own beside the routed experts",
    "qwen3_next": f"{_DELTA}; {_GATED_ATTENTION}, {_SHARED_GATE}",
    "qwen3_5_text": f"{_DELTA}; {_GATED_ATTENTION}",
    "qwen3_5_moe_text": f"{_DELTA}; {_GATED_ATTENTION}, {_SHARED_GATE}",
    "qwen3_5": "a vision tower, and what qwen3_5_text misses",
    "qwen3_5_moe": "a vision tower, and what qwen3_5_moe_text misses",
    "llama4": "a vision tower; its text model alone (llama4_text) is built",
}


def family_of(model_type: object) -> Family | None:
    """Return the family that is built here for a config's ``model_type``, or None for another name."""
    return FAMILIES.get(ALIASES.get(str(model_type), str(model_type)))


def check_family(family: object, where: str) -> None:
    """Raise ConfigError, naming the missing parts, where ``family`` (a config's ``model_type``) is not in FAMILIES."""
    if family_of(family) is None:
        missing = f"; missing for {family}: {MISSING[family]}" if str(family) in MISSING else ""
        raise ConfigError(f"{where} holds a {quoted(family)} model; this version builds {', '.join(FAMILIES)}{missing}")
