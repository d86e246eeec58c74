"""The families of models that are built here, and the parts that other families would need."""

from __future__ import annotations

from megatron_rl.config.json_text import quoted
from megatron_rl.errors import ConfigError
from megatron_rl.weights.families.bridged import Families
from megatron_rl.weights.families.glm4_moe import GLM4_MOE
from megatron_rl.weights.families.llama import LLAMA
from megatron_rl.weights.families.mistral import MISTRAL
from megatron_rl.weights.families.mixtral import MIXTRAL
from megatron_rl.weights.families.olmo2 import OLMO2
from megatron_rl.weights.families.phi3 import PHI3
from megatron_rl.weights.families.qwen2 import QWEN2
from megatron_rl.weights.families.qwen3 import QWEN3
from megatron_rl.weights.families.qwen3_moe import QWEN3_MOE

FAMILIES = Families(
    {family.model_type: family for family in (QWEN2, QWEN3, LLAMA, MISTRAL, PHI3, OLMO2, MIXTRAL, QWEN3_MOE, GLM4_MOE)}
)
_GEMMA = "the embedding times sqrt(hidden_size), norms that multiply by 1 + weight, a gelu (tanh) MLP"
_SANDWICH = "norms behind attention and behind the MLP (post_attention_layernorm, post_feedforward_layernorm)"
# Features that a layer of Megatron-Core 0.16.1 and 0.19.2 (read: transformer_config.py, transformer_layer.py,
# dot_product_attention.py) or the model built here lacks; models as in transformers 5.19.
MISSING = {
    "gemma": _GEMMA,
    "gemma2": "soft-capped attention scores (attn_logit_softcapping) and logits (final_logit_softcapping), "
    f"{_SANDWICH}, a sliding window in every second layer, {_GEMMA}",
    "gemma3_text": f"{_SANDWICH}, two rotary bases and a sliding window by the layer's kind, {_GEMMA}",
    "gemma3": "a vision tower, and what gemma3_text misses",
    "qwen2_moe": "a shared expert with a gate of its own beside the routed experts",
    "deepseek_v3": "multi-latent attention, whose rotary angles (yarn) Megatron-Core makes within and whose keys and "
    "values differ in size; its mixture is built (glm4_moe)",
    "olmo3": "a sliding window in three layers of four, and rotary bases by the layer's kind",
    "gpt_oss": "attention sinks, clamped gated activations, biases on projections and experts",
}


def check_family(family: object, where: str) -> None:
    """Raise ConfigError, naming the missing parts, where ``family`` (a config's ``model_type``) is not in FAMILIES."""
    if not isinstance(family, str) or family not in FAMILIES:
        missing = f"; missing for {family}: {MISSING[family]}" if str(family) in MISSING else ""
        raise ConfigError(f"{where} holds a {quoted(family)} model; this version builds {', '.join(FAMILIES)}{missing}")
