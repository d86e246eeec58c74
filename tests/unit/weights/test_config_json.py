"""An odd config.json or generation_config.json ends in one sentence that names file and field."""

import json
import pathlib
import re

import pytest
import torch

from megatron_rl.errors import ConfigError
from megatron_rl.model.hf_config import angle_kinds, read_shape, softmax_scale
from megatron_rl.model.positions import angles_of
from megatron_rl.reward.reward_model import RewardModelScore
from megatron_rl.weights.config_json import check_served, ignored_fields, read_hf_config, stop_ids, transformers_model
from tests.reference import FAMILIES, MIXTURES, tiny_config

ROPE = {"rope_type": "default", "rope_theta": 1e4}
# changed fields of config.json, and the message behind "<folder>/config.json"
FIELDS: list[tuple[dict[str, object], str]] = [
    ({"model_type": "gemma2"}, " holds a 'gemma2' model; this version builds .*; missing for gemma2: soft-capped"),
    ({"model_type": None}, " holds a None model; this version builds qwen2"),
    ({"model_type": ["qwen3"]}, " holds a .'qwen3'. model; this version builds qwen2"),
    ({"num_hidden_layers": "2"}, ": num_hidden_layers must be an integer, and it is '2'"),
    ({"num_hidden_layers": 0}, ": num_hidden_layers must be 1 to 10000, and it is 0"),
    ({"num_hidden_layers": 10**9, "layer_types": None}, ": num_hidden_layers must be 1 to 10000, and it is 1000000000"),
    ({"num_hidden_layers": 3}, " is refused by transformers: .*num_hidden_layers"),
    ({"hidden_size": None}, " lacks the field hidden_size, a size of the model; give the config of its weights"),
    (
        {"text_config": {"hidden_size": 64}},
        " holds a model within the model, text_config=.* a qwen3 model does not",
    ),
    ({"to_dict": 1}, ": to_dict would replace a part of transformers' config class; remove it"),
    ({"per_layer_config": {"0": {"head_dim": 8}}}, ": per_layer_config would replace a part of"),
    ({"attn_implementation": "a/b"}, ": attn_implementation='a/b' names code to download; remove it"),
    ({"partial_rotary_factor": 2.0}, ": partial_rotary_factor must be 0.001 to 1.0, and it is 2.0"),
    ({"rope_parameters": {"full_attention": ROPE} | ROPE}, ": rope_parameters has full_attention; a qwen3 .* one set"),
    ({"rope_parameters": ROPE | {"attention_factor": "x"}}, ": attention_factor must be a number, and it is 'x'"),
    ({"hidden_size": -64}, ": hidden_size must be 1 to 1048576, and it is -64"),
    ({"hidden_size": 64.5}, ": hidden_size must be an integer, and it is 64.5"),
    ({"hidden_size": True}, ": hidden_size must be an integer, and it is True"),
    ({"vocab_size": 10**18}, ": vocab_size must be 1 to 67108864, and it is 1000000000000000000"),
    ({"num_key_value_heads": 3}, ": num_key_value_heads=3 does not divide num_attention_heads=4"),
    ({"num_key_value_heads": 0}, "num_key_value_heads must be 1 to 65536, and it is 0"),
    ({"head_dim": 31}, " is refused by transformers: .*head_dim"),
    ({"rms_norm_eps": 0.0}, ": rms_norm_eps must be 1e-30 to 1.0, and it is 0.0"),
    ({"rms_norm_eps": "small"}, ": rms_norm_eps must be a number, and it is 'small'"),
    ({"initializer_range": -1.0}, ": initializer_range must be 0.0 to 1000000.0, and it is -1.0"),
    ({"num_labels": 2**63}, ": num_labels must be 0 to 65536, and it is 9223372036854775808"),
    ({"max_position_embeddings": 0}, ": max_position_embeddings must be 1 to "),
    ({"pad_token_id": 99}, ": pad_token_id=99 is beyond vocab_size=99"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, ": rope_parameters: rope_theta must be "),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, ": rope_theta must be a number, .* is None"),
    ({"rope_parameters": {"rope_type": 3, "rope_theta": 1e4}}, ": rope_type must be a text, and it is 3"),
    (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        " is refused by transformers: KeyError: .*factor",
    ),
    ({"head_dim": 0}, ": head_dim must be 2 to 65536, and it is 0"),
    ({"rope_parameters": [1]}, "rope_parameters"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"quantization_config": []}, ": quantization_config must be an object"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "must be two integers"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}, "weight_block_size must be 1 to"),
    ({"quantization_config": {"quant_method": "x" * 10_000}}, "quantised by 'x+… .10002 characters"),
    ({"compression_config": {"format": "pack-quantized"}}, ": compression_config says that the weights are quantised"),
    ({"eos_token_id": "a"}, "eos_token_id"),
    ({"dtype": "float7"}, "is refused by transformers"),
]
TEXTS: list[tuple[bytes, str]] = [
    (b"", ": not valid JSON"),
    (b"[]", r" must be an object, and it is \[\]"),
    (b'{"model_type": "qwen3"', ": not valid JSON"),
    (b'{"model_type": "qwen3", "model_type": "llama"}', ": the key 'model_type' stands twice"),
    (b'{"hidden_size": ' + b"9" * 5000 + b"}", ": the number 9+… has 5000 characters"),
    (b'{"hidden_size": NaN}', ": NaN is no JSON number"),
    (b'{"model_type": "\\ud800"}', ": model_type holds half a surrogate pair"),
    (b'{"a":' * 5000, ": not read: brackets are nested"),
    (b"\xff\xfe{}", ": not UTF-8"),
]


def write(folder: pathlib.Path, family: str = "qwen3", **changes: object) -> None:
    tiny_config(family).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"), FIELDS, ids=lambda x: json.dumps(x)[:60] if isinstance(x, dict) else ""
)
def test_an_odd_field_is_refused_by_name(tmp_path: pathlib.Path, changes: dict, message: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        read_hf_config(tmp_path)
    assert re.match(f"{tmp_path}/config.json.*{message}", str(caught.value)), str(caught.value)
    assert len(str(caught.value)) < 900 and "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "message"), TEXTS, ids=range(len(TEXTS)))
def test_odd_text_is_refused_by_file(tmp_path: pathlib.Path, text: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/config.json{message}"):
        read_hf_config(tmp_path)
    (tmp_path / "generation_config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/generation_config.json{message}"):
        stop_ids(tmp_path)


def test_a_file_without_sizes_or_with_experts_without_number_is_refused(tmp_path: pathlib.Path) -> None:
    """transformers' defaults for the sizes are those of a model of 7,000,000,000 parameters."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(ConfigError, match="lacks the field num_hidden_layers, a size of the model"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "text_config": {"hidden_size": 64}}))
    with pytest.raises(ConfigError, match="holds a model within the model, text_config="):
        read_hf_config(tmp_path)
    for changes, message in (
        ({"n_routed_experts": 2**16, "num_hidden_layers": 99}, "65536 experts in each of 99 layers are more than"),
        ({"n_group": None}, "n_group must be an integer, and it is None"),
    ):
        write(tmp_path, "deepseek_v3", **changes)
        with pytest.raises(ConfigError, match=message):
            read_hf_config(tmp_path)


def test_a_reward_models_sizes_that_its_weights_do_not_have_take_no_memory(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "qwen2_untied", hidden_size=2**20, vocab_size=2**24, num_labels=1)
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    with pytest.raises(
        ConfigError, match="cannot be loaded .*config.json asks for .* and the weights have 1,000 bytes"
    ):
        RewardModelScore(tmp_path)


FOREIGN: dict[str, object] = dict(
    **dict(query_pre_attn_scalar=7, attn_logit_softcapping=1.0, final_logit_softcapping=1.0, sliding_window=3),
    **dict(use_sliding_window=True, attention_bias=True, mlp_bias=True, hidden_activation="gelu", use_qk_norm=True),
    **dict(use_bidirectional_attention=True, norm_topk_prob=True, router_jitter_noise=0.5, attention_chunk_size=3),
    **dict(num_experts=3, num_local_experts=3, n_routed_experts=3, num_experts_per_tok=4, n_group=2, topk_group=1),
    **dict(q_lora_rank=8, kv_lora_rank=8, routed_scaling_factor=3.0, decoder_sparse_step=2, mlp_only_layers=[0]),
    **dict(swiglu_limit=0.1, embedding_multiplier=3.0, logits_scaling=3.0, residual_multiplier=0.3, scale_emb=3),
)


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_fields_of_other_families_change_nothing_and_are_named(tmp_path: pathlib.Path, family: str) -> None:
    """Neither here nor in transformers, whose class of the family does not have them."""
    found = []
    for more in ({}, FOREIGN):
        own = tiny_config(family)
        foreign = {name: x for name, x in more.items() if name not in {*own.to_dict(), *own.attribute_map}}
        write(tmp_path, family, **foreign)
        config = read_hf_config(tmp_path)
        shape, kinds = read_shape(config, layer_spec="torch"), dict.fromkeys(angle_kinds(config))
        angles = angles_of(config, shape)
        scales = [] if shape.kv_lora_rank else [softmax_scale(config, shape.head_dim, kind) for kind in kinds]
        torch.manual_seed(0)
        logits = transformers_model(config, tmp_path).eval()(torch.arange(2, 14)[None]).logits
        tables = [table.tolist() for table in angles.tables.values()]
        found.append((shape, angles.factor, scales, tables, logits.tolist()))
        assert ignored_fields(tmp_path) == foreign
    assert found[0] == found[1]


def test_a_folder_without_a_config_and_fields_that_are_not_read_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=f"^critic.hf_path='{tmp_path}' holds no config.json"):
        read_hf_config(tmp_path, "critic.hf_path")
    write(tmp_path, attention_dropout=0.1, final_logit_softcapping=30.0, resid_pdrop=0.0, transformers_version="4")
    assert ignored_fields(tmp_path) == {"attention_dropout": 0.1, "final_logit_softcapping": 30.0}


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_every_familys_config_is_read_as_transformers_reads_it(tmp_path: pathlib.Path, family: str) -> None:
    from transformers import AutoConfig

    tiny_config(family).save_pretrained(tmp_path)
    assert read_hf_config(tmp_path).to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    assert ignored_fields(tmp_path) == {}


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: pathlib.Path) -> None:
    """A config.json as Moonshot writes it: a name and code that transformers has not, and yarn by its old field."""
    fields = tiny_config("deepseek_v3").to_dict()
    others = ("rope_parameters", "model_type", "num_nextn_predict_layers", "_name_or_path")
    wanted = {k: v for k, v in fields.items() if k not in others}
    rope = {k: v for k, v in fields["rope_parameters"].items() if k not in ("rope_theta", "rope_type")}
    written = wanted | dict(
        model_type="kimi_k2",
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        rope_theta=50000.0,
        rope_scaling=rope | {"type": "yarn"},
        num_nextn_predict_layers=0,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
    )
    (tmp_path / "config.json").write_text(json.dumps(written))
    found = read_hf_config(tmp_path)
    assert found.model_type == "deepseek_v3" and found.num_mtp_layers == 0
    assert found.rope_parameters == rope | {"rope_type": "yarn", "type": "yarn", "rope_theta": 50000.0}
    assert {k: v for k, v in found.to_dict().items() if k in wanted} == wanted and ignored_fields(tmp_path) == {}


def test_vllm_is_refused_another_router_low_precision_weights_and_gpt_oss(tmp_path: pathlib.Path) -> None:
    """transformers writes neither field, and vLLM reads both."""
    write(tmp_path, "moonlight")
    with pytest.raises(ConfigError, match="lacks scoring_func='sigmoid', without which rollout.engine=vllm"):
        check_served(tmp_path)
    write(tmp_path, "moonlight", scoring_func="sigmoid", topk_method="noaux_tc")
    check_served(tmp_path)
    write(tmp_path)
    check_served(tmp_path)
    write(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert "quantization_config" not in read_hf_config(tmp_path).to_dict()
    with pytest.raises(ConfigError, match="rollout.engine=vllm would hold FP8 weights"):
        check_served(tmp_path)
    # gpt_oss was not shown there; a folder of MXFP4 is refused before, since vLLM would hold it so
    write(tmp_path, "gpt_oss")
    with pytest.raises(ConfigError, match="gpt_oss .* rollout.engine=vllm was not shown: .* use rollout.engine=tran"):
        check_served(tmp_path)
    write(tmp_path, "gpt_oss", quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ConfigError, match="rollout.engine=vllm would hold MXFP4 weights"):
        check_served(tmp_path)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(None, []), (3, [3]), ([3, 5], [3, 5]), ("3", None), (True, None), ([3, 1.5], None), ({}, None)],
)
def test_stop_ids_are_the_generation_configs(tmp_path: pathlib.Path, value: object, wanted: list[int] | None) -> None:
    write(tmp_path, eos_token_id=7)
    assert stop_ids(tmp_path) == [7]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    if wanted is None:
        with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id must be a token id, a list"):
            stop_ids(tmp_path)
    else:
        assert stop_ids(tmp_path) == wanted


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mixtral", {"experts_implementation": 64}, "ValueError: .*experts_implementation"),
        ("mixtral", {"dtype": 5}, "AttributeError: .*is_floating_point"),
        ("qwen2_untied", {"dtype": {"rope_theta": 1e4}}, "AttributeError: .*is_floating_point"),
    ],
)
def test_a_field_that_transformers_meets_when_it_makes_the_model_is_refused_too(tmp_path, family, changes, words):
    write(tmp_path, family, **changes)
    config, words = read_hf_config(tmp_path), f"config.json: transformers can make no model of it: {words}"
    with torch.device("meta"), pytest.raises(ConfigError, match=words):
        transformers_model(config, tmp_path)
