"""The families of models by name, each imported only if it is needed, and what is missing for other families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_rl.errors import ConfigError, quoted
from megatron_rl.weights.families.family import ExpertNames, Family

# prefix of a model_type that names Megatron-Bridge's description of a family, beside the one built here
PREFIX = "bridge:"
BUILT = (
    *("qwen2", "qwen3", "llama", "mistral", "phi3", "olmo2", "olmo3", "gemma3_text"),
    *("mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "llama4_text"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
)


def import_family(model_type: str) -> Family:
    """Return the family named ``model_type``; only the module of this family is imported.

    Raises KeyError for a family that is not built here (not in ``BUILT``).
    """
    match model_type:
        case "qwen2":
            from megatron_rl.weights.families.qwen2 import QWEN2 as family
        case "qwen3":
            from megatron_rl.weights.families.qwen3 import QWEN3 as family
        case "llama":
            from megatron_rl.weights.families.llama import LLAMA as family
        case "mistral":
            from megatron_rl.weights.families.mistral import MISTRAL as family
        case "phi3":
            from megatron_rl.weights.families.phi3 import PHI3 as family
        case "olmo2":
            from megatron_rl.weights.families.olmo2 import OLMO2 as family
        case "olmo3":
            from megatron_rl.weights.families.olmo3 import OLMO3 as family
        case "gemma3_text":
            from megatron_rl.weights.families.gemma3 import GEMMA3_TEXT as family
        case "mixtral":
            from megatron_rl.weights.families.mixtral import MIXTRAL as family
        case "qwen3_moe":
            from megatron_rl.weights.families.qwen3_moe import QWEN3_MOE as family
        case "glm4_moe":
            from megatron_rl.weights.families.glm4_moe import GLM4_MOE as family
        case "deepseek_v3":
            from megatron_rl.weights.families.deepseek_v3 import DEEPSEEK_V3 as family
        case "gpt_oss":
            from megatron_rl.weights.families.gpt_oss import GPT_OSS as family
        case "llama4_text":
            from megatron_rl.weights.families.llama4 import LLAMA4 as family
        case "qwen3_next":
            from megatron_rl.weights.families.qwen3_next import QWEN3_NEXT as family
        case "qwen3_5_text":
            from megatron_rl.weights.families.qwen3_5 import QWEN3_5_TEXT as family
        case "qwen3_5_moe_text":
            from megatron_rl.weights.families.qwen3_5_moe import QWEN3_5_MOE_TEXT as family
        case _:
            raise KeyError(model_type)
    return family


class Families(Mapping[str, Family]):
    """Maps each ``model_type`` to the family built here, which is imported on demand.

    ``describe`` adds families that Megatron-Bridge builds. A look-up by name (``[name]``) finds them
    too, but ``in``, ``len`` and iteration cover only the families built here.
    """

    def __init__(self) -> None:
        self._described: dict[str, Family] = {}

    def describe(self, family: Family) -> None:
        """Add a family that Megatron-Bridge builds; an earlier one of the same ``model_type`` is replaced.

        family: a family whose ``model_type`` begins with "bridge:".
        """
        assert family.model_type.startswith(PREFIX), family.model_type
        self._described[family.model_type] = family

    def __getitem__(self, name: str) -> Family:
        return self._described[name] if name in self._described else import_family(name)

    def __contains__(self, name: object) -> bool:
        return name in BUILT

    def __iter__(self) -> Iterator[str]:
        return iter(BUILT)

    def __len__(self) -> int:
        return len(BUILT)


FAMILIES = Families()
# Other names of a family's model_type, for which transformers has no class.
ALIASES = {"kimi_k2": "deepseek_v3"}
# Vision-language models whose text part is built here: the model's model_type, and its text part's.
TEXT_PARTS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
# Features that Megatron-Core 0.16.1 and 0.19.2 lack in a layer (read: transformer_config.py, transformer_layer.py,
# dot_product_attention.py), or that the model built here lacks; models as in transformers 5.19.
MISSING = {
    "gemma": "norms before attention and MLP alone that multiply by 1 + weight; the rest is built (gemma3_text)",
    "gemma2": "soft-capped attention scores (attn_logit_softcapping) and logits (final_logit_softcapping); the rest is "
    "built (gemma3_text)",
    "gemma3": "a vision tower; its language model alone is gemma3_text",
    "qwen2_moe": "a shared expert with a gate of its own beside the routed experts",
    "deepseek_v32": "attention to the tokens that an indexer chooses, which Megatron-Core 0.16.1 lacks; the rest is "
    "built (deepseek_v3)",
    "glm_moe_dsa": "attention to the tokens that an indexer chooses, which Megatron-Core 0.16.1 lacks",
    "llama4": "a vision tower; its text model alone (llama4_text) is built",
}


def family_of(model_type: object) -> Family | None:
    """Return the family that is built here for a config's ``model_type``; None for any other name."""
    name = ALIASES.get(str(model_type), str(model_type))
    if name not in FAMILIES:
        return None
    return FAMILIES[name]


def has_text_names(family: object) -> bool:
    """Return whether the names in the files of a model of this ``model_type`` are read as those of its text part.

    Files of the text model alone may keep the vision-language model's names, and transformers reads
    them as well.
    """
    return str(family) in {*TEXT_PARTS, *TEXT_PARTS.values()}


def stacking(family: object) -> ExpertNames | None:
    """Return the names of a family's experts if its files stack them (weights/stacked.py); None for any other family.

    family: a config's ``model_type``.
    """
    names = FAMILIES[family].experts if isinstance(family, str) and family in FAMILIES else None
    return names if names is not None and names.stacked else None


def check_family(family: object, where: str) -> None:
    """Raise ConfigError if ``family``, a config's ``model_type``, is not built here. The message names what is missing.

    where: the name of config.json, for the message.
    """
    if ALIASES.get(str(family), str(family)) not in FAMILIES:
        missing = f"; missing for {family}: {MISSING[family]}" if str(family) in MISSING else ""
        raise ConfigError(f"{where} holds a {quoted(family)} model; this version builds {', '.join(FAMILIES)}{missing}")
